//! One suite for every backend: each operation of [`sparse24_conformance`] on fixed hostile cases
//! and on drawn ones, and a few steps of every method.
//!
//! [`conformance!`](crate::conformance!) instantiates the suite for a backend. `defect` corrupts
//! one output of one operation at a time, to test that the suite notices.

use std::{cell::RefCell, env};

use proptest::{
    prelude::*,
    sample::select,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use sparse24_conformance::{Draw, OPERATIONS, Values, fixed};
use sparse24_train::backend::Backend;

mod defect;
mod methods;

pub use defect::{DEFECTS, assert_noticed};

/// Opens a backend; none where the machine has none, which skips the test.
pub type Open<'a> = &'a dyn Fn() -> Option<Box<dyn Backend>>;

/// Stamps one test per operation for the backend that a closure opens.
#[macro_export]
macro_rules! conformance {
    ($backend:ident, $open:expr) => {
        $crate::conformance!(@ $backend, $open;
            mask_search permuted_mask compress_weight mvue_compress
            linear_forward linear_dgrad linear_wgrad bias_grad
            activation_forward activation_backward norm_forward norm_backward
            attention_forward attention_backward embed_forward embed_backward
            head_loss span_loss logits dropout drop_sequences rows scale copy_and_fill optimizer
            adam sgd lion moving_average distances methods refusals
        );
    };
    (@ $backend:ident, $open:expr; $($case:ident)*) => {
        mod $backend {
            $(#[test]
            fn $case() {
                $crate::conformance::check(stringify!($case), &$open);
            })*

            #[test]
            fn every_operation_is_tested() {
                $crate::conformance::assert_complete(&[$(stringify!($case)),*]);
            }
        }
    };
}

/// Cases drawn per operation.
const DRAWN: u32 = 512;
/// The same on a software adapter.
const DRAWN_IMITATED: u32 = 32;

fn drawn() -> impl Strategy<Value = Draw> {
    let sizes = [0..40_usize, 1..24, 1..40, 1..4];
    (sizes, 1..3_usize, any::<[bool; 4]>(), select(&Values::ALL[..]), any::<u64>()).prop_map(
        |(sizes, batch, options, values, seed)| Draw { sizes, batch, options, values, seed },
    )
}

/// Whether the backend runs on a software adapter, where fewer cases are drawn.
fn is_imitated(backend: &dyn Backend) -> bool {
    backend.device().description.contains("llvmpipe")
}

/// Runs one operation of the suite.
///
/// # Panics
/// If the backend does not conform, or has no such operation.
pub fn check(name: &str, open: Open<'_>) {
    if name == "methods" {
        return methods::check(open);
    }
    let Some(mut backend) = open() else { return };
    if name == "refusals" {
        return sparse24_conformance::refusals(&mut *backend);
    }
    let is_imitated = is_imitated(&*backend);
    let backend = RefCell::new(backend);
    let run = |draw: &Draw| sparse24_conformance::check(name, &mut **backend.borrow_mut(), draw);
    fixed().for_each(|draw| run(&draw));
    // Under a sanitizer, which is a hundred times slower, the fixed cases suffice.
    if env::var_os("SPARSE24_SMALL").is_some() {
        return;
    }
    let config = Config {
        cases: if is_imitated { DRAWN_IMITATED } else { DRAWN },
        failure_persistence: None,
        max_shrink_iters: 256,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let drawn = TestRunner::new_with_rng(config, rng).run(&drawn(), |draw| {
        run(&draw);
        Ok(())
    });
    drawn.unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// Checks every operation of a backend that does something else in each call, such as using another
/// number of threads: each case is executed three times with the same bits.
pub fn check_all(backend: &mut dyn Backend) {
    OPERATIONS.iter().for_each(|(name, _)| check_fixed(name, backend));
}

/// The fixed cases of one operation.
fn check_fixed(name: &str, backend: &mut dyn Backend) {
    fixed().for_each(|draw| sparse24_conformance::check(name, backend, &draw));
}

/// Checks that every operation of the suite is among these names.
///
/// # Panics
/// If one is not.
pub fn assert_complete(names: &[&str]) {
    let missing = OPERATIONS.iter().find(|(name, _)| !names.contains(name));
    assert!(missing.is_none(), "{missing:?} is not tested");
}
