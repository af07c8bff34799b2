//! Every case of the bench is correct and has a time, on a small layer.

use sparse24_cuda::{
    Device, Settings,
    bench::{Bench, Effort, Outcome, Size, cases},
};

use crate::support::on_gpu;

#[test]
#[ignore = "takes half a minute: `run.sh long`"]
fn every_case_is_correct_and_timed() {
    on_gpu(|_| {
        let device = Device::open(&Settings::default()).expect("it opened before");
        let mut bench = Bench::new(device, Effort::Quick).expect("the machine answers");
        let sizes = [Size::Width(128), Size::Matrix([1000, 264])];
        for case in cases(&sizes) {
            let record = bench.run(&case).expect("no operation refuses");
            match &record.outcome {
                Outcome::Measured(measured) => {
                    let us = measured.us;
                    assert!(
                        0.0 < us.p10 && us.p10 <= us.median && us.median <= us.p90,
                        "{record:?}"
                    );
                    assert!(measured.peers.iter().all(|peer| peer.ratio > 0.0), "{record:?}");
                }
                other => panic!("{} {}: {other:?}", case.kernel, case.shape),
            }
        }
        let report = bench.report().expect("the machine answers");
        assert!(
            report.copy_gb_s.is_some_and(|rate| rate > 1.0)
                && report.dense_tflop_s.is_some_and(|rate| rate > 1.0),
            "{report:?}"
        );
        assert_eq!(report.blocks.len(), 1, "the block of the width");
    });
}
