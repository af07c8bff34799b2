//! Errors of dropout.

use half::bf16;
use sparse24_core::{
    op::Dropout,
    philox::{Purpose, Site},
};
use sparse24_cuda::dropout::dropout;

use crate::support::{on_gpu, refused};

#[test]
fn bad_probabilities_are_refused() {
    on_gpu(|device| {
        let x = device.alloc::<bf16>("x", [4, 8]).expect("memory");
        for p in [-0.1, 1.0, 2.0, f32::NAN, f32::INFINITY] {
            let rule = Dropout { p, site: Site::new(Purpose::Dropout, 0) };
            let found = refused(dropout(device, x, x, &rule));
            assert_eq!(found, ("range", "the dropout probability"), "{p}");
        }
    });
}
