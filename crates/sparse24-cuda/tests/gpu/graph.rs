//! CUDA graphs: a replay repeats the captured work, and what cannot be captured is refused.

use sparse24_cuda::{
    Device, Error, Settings, activation, capturing,
    dropout::dropout,
    gemm::{Gemm, WORKSPACE},
};

use crate::support::{Poisoned, gaussian, on_gpu, upload};
use half::bf16;
use sparse24_core::{
    op::{Activation, Dropout, StepState},
    philox::{Purpose, Site},
};

#[test]
fn a_replay_reads_the_current_memory_and_step_state() {
    on_gpu(|device| {
        // Several waves of blocks, so that one kernel runs into the next where it does not wait.
        let shape = [2056, 1024];
        let inputs = [1, 2, 3].map(|seed| gaussian::<bf16>(shape, seed));
        let (x, h) = (upload(device, &inputs[0]), Poisoned::<bf16>::new(device, shape));
        let rule = Dropout { p: 0.5, site: Site::new(Purpose::Dropout, 7) };
        let work = |device: &mut Device| {
            activation::forward(device, Activation::Gelu, x, h.matrix).expect("queued");
            dropout(device, h.matrix, h.matrix, &rule).expect("queued");
        };
        let state = |step| StepState { seed: 5, step, ..StepState::default() };
        let expected: Vec<Vec<bf16>> = (0..3)
            .map(|step| {
                device.set_step(&state(step as u32)).expect("queued");
                device.upload(x, inputs[step].as_slice().expect("row-major")).expect("queued");
                work(device);
                h.read(device)
            })
            .collect();
        device.fill_bytes(h.matrix, 0xff).expect("filled");
        device.start_capture().expect("kernels are loaded");
        work(device);
        let graph = device.end_capture().expect("launches alone");
        assert!(h.read(device).iter().all(|x| x.is_nan()), "it was captured, not run");
        for (step, expected) in expected.iter().enumerate() {
            device.set_step(&state(step as u32)).expect("queued");
            device.upload(x, inputs[step].as_slice().expect("row-major")).expect("queued");
            device.replay(&graph).expect("queued");
            assert!(h.read(device) == *expected, "step {step}");
        }
        device.reset().expect("reset");
        assert!(matches!(device.replay(&graph), Err(Error::Stale { .. })));
    });
}

/// Another thread that opens or closes cuBLASLt would invalidate the capture.
#[test]
fn a_capture_stays_whole_beside_another_device() {
    on_gpu(|device| {
        let [z, h] = [1, 2].map(|seed| upload(device, &gaussian::<bf16>([8, 8], seed)));
        let work = |device: &mut Device| {
            activation::forward(device, Activation::Gelu, z, h).expect("queued");
        };
        work(device);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut other = Device::open(&Settings::default()).expect("a GPU");
                let workspace = other.alloc("workspace", [1, WORKSPACE]).expect("fits");
                (0..20).for_each(|_| drop(Gemm::new(&other, workspace).expect("a GPU")));
            });
            while !other.is_finished() {
                let _capturing = capturing();
                device.start_capture().expect("ok");
                (0..100).for_each(|_| work(device));
                device.end_capture().expect("ok");
            }
        });
    });
}

#[test]
fn what_cannot_be_captured_is_refused() {
    on_gpu(|device| {
        let x = upload(device, &gaussian::<f32>([4, 4], 1));
        device.start_capture().expect("nothing is recorded yet");
        let is_refused = |result: Result<(), Error>| {
            assert!(matches!(result, Err(Error::Capturing { .. })), "{result:?}")
        };
        is_refused(device.start_capture());
        is_refused(device.upload(x, &[0.0; 16]));
        is_refused(device.download(x).map(drop));
        is_refused(device.alloc::<f32>("more", [1, 1]).map(drop));
        is_refused(device.set_step(&StepState::default()));
        is_refused(device.synchronize());
        is_refused(device.time(|_| Ok(())).map(drop));
        let empty = device.end_capture().expect("nothing was recorded");
        device.replay(&empty).expect("nothing");
        device.synchronize().expect("it works again");
    });
}
