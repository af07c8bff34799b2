//! head_loss, loss_forward, loss_sum.

use half::bf16;
use ndarray::{Array2, s};
use sparse24_core::{
    op::{Accumulate, NonFinite, StepState},
    philox::Philox4x32,
};
use sparse24_cpu::loss as cpu;
use sparse24_cuda::{
    Device, Error,
    health::Health,
    loss::{HeadLoss, IGNORE, head_loss, loss_forward, loss_sum},
};

use crate::{
    support::{Poisoned, gaussian, on_gpu, upload},
    tolerance::{U, assert_within, dlogit, row_loss},
};

/// Rows, columns, vocabulary: up to one vector, one warp, whole blocks, GPT-2's, and one that
/// exceeds shared memory.
const SHAPES: [[usize; 3]; 8] = [
    [3, 8, 1],
    [5, 64, 3],
    [9, 128, 65],
    [33, 256, 256],
    [4, 1000, 999],
    [17, 50304, 50257],
    [2, 50432, 50256],
    [2, 131_072, 130_001],
];

fn random_targets(rows: usize, vocabulary: usize) -> Vec<u32> {
    let philox = Philox4x32::new(77);
    let of_row = |row: usize| {
        if row % 8 == 1 {
            IGNORE
        } else {
            philox.block([row as u32, 0, 0, 0])[0] % vocabulary as u32
        }
    };
    // The last token of the vocabulary lies within a vector.
    (0..rows).map(|row| if row == 0 { vocabulary as u32 - 1 } else { of_row(row) }).collect()
}

/// Logits whose padding would dominate if it were read.
fn random_logits([rows, columns, vocabulary]: [usize; 3], scale: f32) -> Array2<bf16> {
    let mut logits =
        gaussian::<bf16>([rows, columns], 5).mapv(|x| bf16::from_f32(x.to_f32() * scale));
    logits.slice_mut(s![.., vocabulary..]).fill(bf16::from_f32(1000.0));
    logits
}

#[test]
fn losses_and_gradients_are_within_their_bounds() {
    on_gpu(|device| {
        for shape in SHAPES {
            for (smoothing, scale, spread) in
                [(0.0, 1.0, 1.0), (0.1, 1.0 / 16384.0, 3.0), (0.0, 0.5, 20.0)]
            {
                check(device, shape, smoothing, scale, spread);
            }
        }
    });
}

fn check(device: &mut Device, shape: [usize; 3], smoothing: f32, scale: f32, spread: f32) {
    let [rows, columns, vocabulary] = shape;
    let what = format!("{shape:?}, smoothing {smoothing}, spread {spread}");
    let (host, targets) = (random_logits(shape, spread), random_targets(rows, vocabulary));
    let logits = Poisoned::<bf16>::new(device, [rows, columns]);
    device.upload(logits.matrix, host.as_slice().expect("row-major")).expect("uploaded");
    let on_device = device.alloc("targets", [rows, 1]).expect("memory");
    device.upload(on_device, &targets).expect("uploaded");
    let [forward, losses] = [0, 1].map(|_| Poisoned::<f32>::new(device, [rows, 1]));
    let mut op = HeadLoss {
        logits: logits.matrix,
        targets: on_device,
        vocabulary,
        smoothing,
        losses: forward.matrix,
    };
    loss_forward(device, &op).expect("queued");
    assert_eq!(logits.read(device), host.as_slice().expect("row-major"), "{what}: the logits stay");
    op.losses = losses.matrix;
    device.set_step(&StepState { loss_scale: scale, ..StepState::default() }).expect("set");
    head_loss(device, &op).expect("queued");
    let [forward, losses] = [forward, losses].map(|losses| losses.read(device));
    assert_eq!(forward, losses, "{what}: the loss is the same with a gradient and without");

    let mut expected = host.slice(s![.., ..vocabulary]).mapv(|x| x.to_f32());
    let largest: Vec<f64> = expected
        .rows()
        .into_iter()
        .map(|row| row.iter().fold(0.0, |a, x| x.abs().max(a)).into())
        .collect();
    let of_rows: Vec<f64> = (0..rows)
        .map(|row| {
            let row = row..row + 1;
            cpu::head_loss(
                expected.slice_mut(s![row.clone(), ..]),
                &targets[row],
                Some(IGNORE),
                smoothing,
                scale,
            )
            .expect("fits")
            .sum
        })
        .collect();
    assert_within(&format!("{what}: losses"), losses, &of_rows, |row| {
        row_loss(vocabulary, largest[row], smoothing.into())
    });
    let mut padded = Array2::<f64>::zeros([rows, columns]);
    padded.slice_mut(s![.., ..vocabulary]).assign(&expected.mapv(f64::from));
    let found = logits.read(device);
    assert_within(
        &format!("{what}: dlogits"),
        found.iter().map(|x| x.to_f32()),
        padded.as_slice().expect("row-major"),
        |at| {
            let (row, column) = (at / columns, at % columns);
            if column >= vocabulary || targets[row] == IGNORE {
                return 0.0;
            }
            let hit =
                if column == targets[row] as usize { 1.0 - f64::from(smoothing) } else { 0.0 };
            let t = hit + f64::from(smoothing) / vocabulary as f64;
            dlogit(
                vocabulary,
                largest[row],
                scale.into(),
                [padded[(row, column)] / f64::from(scale) + t, t],
            )
        },
    );
}

#[test]
fn the_sum_raises_the_flag_if_it_is_not_finite() {
    on_gpu(|device| {
        for rows in [0, 1, 1023, 1025, 16384] {
            let host = gaussian::<f32>([rows, 1], 3).mapv(|x| x + 5.0);
            let losses = upload(device, &host);
            let loss = Poisoned::<f32>::new(device, [1, 1]);
            let expected = host.iter().map(|&x| f64::from(x)).sum::<f64>();
            for (times, beta) in [(1.0, Accumulate::Overwrite), (2.0, Accumulate::Add)] {
                loss_sum(device, losses, loss.matrix, beta, None).expect("queued");
                assert_within("loss", loss.read(device), &[times * expected], |_| {
                    4.0 * U * expected
                });
            }
            let health = device.alloc::<u32>("health", [1, Health::WORDS]).expect("memory");
            loss_sum(device, losses, loss.matrix, Accumulate::Overwrite, Some(health))
                .expect("queued");
            assert_eq!(device.download(health).expect("read"), [0; 2]);
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut host = Array2::from_elem([2000, 1], 1.0);
            host[(1500, 0)] = bad;
            let (losses, health) = (
                upload(device, &host),
                device.alloc::<u32>("health", [1, Health::WORDS]).expect("memory"),
            );
            let loss = Poisoned::<f32>::new(device, [1, 1]);
            loss_sum(device, losses, loss.matrix, Accumulate::Overwrite, Some(health))
                .expect("queued");
            let words = device.download(health).expect("read");
            assert_eq!(Health::of_words([words[0], words[1]]).non_finite, Some(NonFinite::Loss));
            assert!(!loss.read(device)[0].is_finite());
        }
    });
}

#[test]
fn a_bad_logit_or_target_spoils_its_row_only() {
    on_gpu(|device| {
        let shape = [4, 50304, 50257];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut host = random_logits(shape, 1.0);
            host[(2, 40000)] = bf16::from_f32(bad);
            let logits = upload(device, &host);
            let targets = upload(device, &ndarray::array![[1_u32], [50257], [7], [50256]]);
            let losses = Poisoned::<f32>::new(device, [4, 1]);
            device.set_step(&StepState { loss_scale: 1.0, ..StepState::default() }).expect("set");
            head_loss(
                device,
                &HeadLoss {
                    logits,
                    targets,
                    vocabulary: shape[2],
                    smoothing: 0.0,
                    losses: losses.matrix,
                },
            )
            .expect("queued");
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
        let mut run = |columns: usize, vocabulary: usize, rows: usize| {
            let logits = device.alloc("logits", [3, columns]).expect("memory");
            let targets = device.alloc("targets", [rows, 1]).expect("memory");
            let losses = device.alloc("losses", [3, 1]).expect("memory");
            head_loss(device, &HeadLoss { logits, targets, vocabulary, smoothing: 0.0, losses })
        };
        assert!(matches!(run(12, 12, 3), Err(Error::Shape { expected: [3, 16], .. })));
        assert!(matches!(run(16, 17, 3), Err(Error::TooLarge { limit: 16, .. })));
        assert!(matches!(run(16, 0, 3), Err(Error::OutOfRange { what: "the vocabulary", .. })));
        assert!(matches!(run(16, 16, 2), Err(Error::Shape { operand: "targets", .. })));
        assert_eq!(run(16, 16, 3), Ok(()));
        for smoothing in [-0.1, 1.0, f32::NAN] {
            let logits = device.alloc("logits", [1, 8]).expect("memory");
            let (targets, losses) = (
                device.alloc("targets", [1, 1]).expect("memory"),
                device.alloc("losses", [1, 1]).expect("memory"),
            );
            let op = HeadLoss { logits, targets, vocabulary: 8, smoothing, losses };
            assert!(
                matches!(
                    head_loss(device, &op),
                    Err(Error::OutOfRange { what: "the smoothing", .. })
                ),
                "{smoothing}"
            );
        }
    });
}
