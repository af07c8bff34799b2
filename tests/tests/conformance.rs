//! The CPU backend in both arithmetics conforms, and planted defects are noticed.

use sparse24_train::backend::{Arithmetic, Backend, cpu::CpuBackend};

fn cpu(arithmetic: Arithmetic) -> Box<dyn Backend> {
    Box::new(CpuBackend::new(arithmetic))
}

sparse24_tests::conformance!(cpu_f32, || Some(crate::cpu(crate::Arithmetic::F32)));
sparse24_tests::conformance!(cpu_bf16, || Some(crate::cpu(crate::Arithmetic::Bf16)));

#[test]
fn planted_defects_are_noticed() {
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
        sparse24_tests::conformance::assert_noticed(|| cpu(arithmetic));
    }
}
