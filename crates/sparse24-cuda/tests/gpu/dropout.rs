//! dropout: the CPU's bits, rounded to bf16.

use half::bf16;
use ndarray::Array2;
use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_cpu::dropout as cpu;
use sparse24_cuda::{
    Error, StepState,
    dropout::{Dropout, dropout},
};

use crate::support::{Poisoned, gaussian, on_gpu};

#[test]
fn what_is_kept_is_the_cpu_s() {
    on_gpu(|device| {
        let site = Site::new(Purpose::Dropout, 12);
        for (number, shape) in [[0, 8], [1, 1], [1, 7], [3, 5], [4, 64], [130, 1604], [1024, 768]]
            .into_iter()
            .enumerate()
        {
            for p in [0.0, 1e-9, 0.1, 0.2, 0.75, 1.0 - f32::EPSILON / 2.0] {
                let state = StepState {
                    seed: 0x0123_4567_89ab_cdef,
                    step: 7,
                    micro_step: number as u32,
                    ..StepState::default()
                };
                device.set_step(&state).expect("set");
                let x: Array2<bf16> = gaussian(shape, number as u64);
                let on_device = Poisoned::new(device, shape);
                device
                    .upload(on_device.matrix, x.as_slice().expect("row-major"))
                    .expect("uploaded");
                dropout(device, on_device.matrix, &Dropout { p, site }).expect("queued");
                let mut expected = x.mapv(bf16::to_f32);
                let stream = Stream::new(state.seed, site, state.micro_step, state.step);
                let rule = sparse24_core::op::Dropout { p, site };
                cpu::dropout(expected.view_mut(), &rule, stream).expect("contiguous");
                for (at, (found, &expected)) in
                    on_device.read(device).into_iter().zip(&expected).enumerate()
                {
                    assert_eq!(
                        found.to_bits(),
                        bf16::from_f32(expected).to_bits(),
                        "{shape:?}, p = {p}, element {at}"
                    );
                }
            }
        }
    });
}

#[test]
fn what_is_no_probability_is_refused() {
    on_gpu(|device| {
        let x = device.alloc::<bf16>("x", [4, 8]).expect("memory");
        for p in [-0.1, 1.0, 2.0, f32::NAN, f32::INFINITY] {
            let refused = dropout(device, x, &Dropout { p, site: Site::new(Purpose::Dropout, 0) });
            assert!(matches!(refused, Err(Error::OutOfRange { operation: "dropout", .. })), "{p}");
        }
    });
}
