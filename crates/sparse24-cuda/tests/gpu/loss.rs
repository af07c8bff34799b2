//! Losses: what their values do not depend on, and their errors. The conformance suite checks the
//! values themselves, and the bench those of large vocabularies.

use half::bf16;
use ndarray::{Array2, s};
use sparse24_core::{
    op::{Accumulate, StepState},
    philox::Philox4x32,
};
use sparse24_cuda::loss::{HeadLoss, IGNORE, head_loss, loss_forward, loss_sum};

use crate::support::{Poisoned, gaussian, on_gpu, refused, upload};

fn random_targets(rows: usize, vocabulary: usize) -> Array2<u32> {
    let philox = Philox4x32::new(77);
    Array2::from_shape_fn([rows, 1], |(row, _)| match row {
        // The last token of the vocabulary lies within a vector.
        0 => vocabulary as u32 - 1,
        row if row % 8 == 1 => IGNORE,
        row => philox.block([row as u32, 0, 0, 0])[0] % vocabulary as u32,
    })
}

/// Logits whose padding would dominate if it were read.
fn random_logits([rows, columns, vocabulary]: [usize; 3]) -> Array2<bf16> {
    let mut logits = gaussian::<bf16>([rows, columns], 5);
    logits.slice_mut(s![.., vocabulary..]).fill(bf16::from_f32(1000.0));
    logits
}

/// In shared memory, and beyond it.
#[test]
fn the_loss_is_the_same_with_a_gradient_and_without() {
    on_gpu(|device| {
        for shape @ [rows, columns, vocabulary] in
            [[9, 128, 65], [17, 50304, 50257], [2, 131_072, 130_001]]
        {
            let host = random_logits(shape);
            let logits = upload(device, &host);
            let targets = upload(device, &random_targets(rows, vocabulary));
            let [forward, losses] = [0, 1].map(|_| Poisoned::<f32>::new(device, [rows, 1]));
            let smoothing = 0.1;
            let op = HeadLoss {
                logits,
                targets,
                vocabulary,
                smoothing,
                mixed: None,
                losses: forward.matrix,
            };
            loss_forward(device, &op).expect("queued");
            let unchanged = device.download(logits).expect("read");
            assert_eq!(unchanged, host.as_slice().expect("row-major"), "{shape:?}: the logits");
            head_loss(device, &HeadLoss { losses: losses.matrix, ..op }).expect("queued");
            assert_eq!(forward.read(device), losses.read(device), "{shape:?}");
            let gradient = device.download(logits).expect("read");
            for (row, padding) in gradient.chunks(columns).enumerate() {
                let zero = padding[vocabulary..].iter().all(|x| x.to_f32() == 0.0);
                assert!(zero, "{shape:?}: the padding of row {row}");
            }
        }
    });
}

#[test]
fn a_sum_may_be_added_to_what_was_there() {
    on_gpu(|device| {
        for rows in [0, 1, 1023, 1025, 16384] {
            // Sums of small integers are exact.
            let losses = upload(device, &Array2::from_shape_fn([rows, 1], |(i, _)| (i % 7) as f32));
            let sum = (0..rows).map(|i| i % 7).sum::<usize>() as f32;
            let loss = Poisoned::<f32>::new(device, [1, 1]);
            for (times, beta) in [(1.0, Accumulate::Overwrite), (2.0, Accumulate::Add)] {
                loss_sum(device, losses, loss.matrix, beta, None).expect("queued");
                assert_eq!(loss.read(device), [times * sum], "{rows} rows, {beta:?}");
            }
        }
    });
}

#[test]
fn a_bad_logit_or_target_spoils_its_row_only() {
    on_gpu(|device| {
        let shape = [4, 50304, 50257];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut host = random_logits(shape);
            host[(2, 40000)] = bf16::from_f32(bad);
            let logits = upload(device, &host);
            let targets = upload(device, &ndarray::array![[1_u32], [50257], [7], [50256]]);
            let losses = Poisoned::<f32>::new(device, [4, 1]);
            device.set_step(&StepState { loss_scale: 1.0, ..StepState::default() }).expect("set");
            let [_, _, vocabulary] = shape;
            let op = HeadLoss {
                logits,
                targets,
                vocabulary,
                smoothing: 0.0,
                mixed: None,
                losses: losses.matrix,
            };
            head_loss(device, &op).expect("queued");
            let losses = losses.read(device);
            assert_eq!(
                [0, 1, 2, 3].map(|row| losses[row].is_finite()),
                [true, false, false, true],
                "{bad}: {losses:?}"
            );
            let gradient = device.download(logits).expect("read");
            let finite =
                |row: usize| gradient[row * shape[1]..][..shape[1]].iter().all(|x| x.is_finite());
            assert!(finite(0) && !finite(1) && finite(3), "{bad}");
        }
    });
}

#[test]
fn bad_operands_are_refused() {
    on_gpu(|device| {
        let mut refuse = |columns, vocabulary, rows, smoothing| {
            let logits = device.alloc("logits", [3, columns]).expect("memory");
            let targets = device.alloc("targets", [rows, 1]).expect("memory");
            let losses = device.alloc("losses", [3, 1]).expect("memory");
            let op = HeadLoss { logits, targets, vocabulary, smoothing, mixed: None, losses };
            refused(head_loss(device, &op))
        };
        assert_eq!(refuse(12, 12, 3, 0.0), ("shape", "logits"));
        assert_eq!(refuse(16, 17, 3, 0.0), ("too large", "the vocabulary"));
        assert_eq!(refuse(16, 0, 3, 0.0), ("range", "the vocabulary"));
        assert_eq!(refuse(16, 16, 2, 0.0), ("shape", "targets"));
        for smoothing in [-0.1, 1.0, f32::NAN] {
            assert_eq!(refuse(16, 16, 3, smoothing), ("range", "the smoothing"));
        }
    });
}
