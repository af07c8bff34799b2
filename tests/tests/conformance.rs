//! The CPU backend in both arithmetics conforms, on any number of threads, and planted defects are
//! noticed.

use rayon::ThreadPoolBuilder;
use sparse24_tests::{conformance::check_all, hooked::Hooked};
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

/// The next operation is executed on one thread, two or seven, in turns: the three executions of a
/// case each get another number.
#[test]
fn threads_change_no_bit() {
    let pools =
        [1, 2, 7].map(|n| ThreadPoolBuilder::new().num_threads(n).build().expect("threads"));
    let mut turns = (0..pools.len()).cycle();
    let cpu = cpu(Arithmetic::F32);
    check_all(&mut *Hooked::new(
        cpu,
        Box::new(move |backend, _, op| {
            let turn = turns.next().expect("a cycle");
            pools[turn].install(|| backend.execute(op))
        }),
    ));
}
