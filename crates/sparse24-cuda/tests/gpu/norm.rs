//! Norms: what their values do not depend on, and their errors. The conformance suite checks the
//! values themselves.

use half::bf16;
use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_cuda::{
    Device, Matrix,
    norm::{
        MAX_WIDTH, NormBackward, NormForward, norm_backward, norm_backward_scratch, norm_forward,
    },
};

use crate::support::{Poisoned, gaussian, on_gpu, refused, upload};

/// Each call reads or overwrites operands of the one before it, while that one still runs.
#[test]
fn overlapping_calls_are_the_same_as_separate_ones() {
    on_gpu(|device| {
        let shape @ [p, c] = [1500, 1280];
        let [x, dy] = [1, 2].map(|seed| gaussian::<bf16>(shape, seed));
        let gamma = upload(device, &gaussian::<f32>([1, c], 3));
        let scratch_shape = norm_backward_scratch(device, c);
        let mut run = |between: fn(&mut Device)| {
            let [residual, y, dy] = [&x, &dy, &dy].map(|x| upload(device, x));
            let dresidual = upload(device, &x);
            let stats = device.alloc("stats", [p, 2]).expect("memory");
            let scratch = device.alloc("scratch", scratch_shape).expect("memory");
            let sums: Vec<[Matrix<f32>; 2]> = (0..20)
                .map(|_| {
                    [0, 1].map(|_| device.alloc("a parameter's gradient", [1, c]).expect("memory"))
                })
                .collect();
            for &[dgamma, dbeta] in &sums {
                let forward = NormForward {
                    x: residual,
                    delta: Some(y),
                    gamma,
                    beta: None,
                    epsilon: 1e-5,
                    residual,
                    y: dy,
                    stats,
                };
                norm_forward(device, &forward).expect("queued");
                between(device);
                // Twice, with the same scratch.
                for dbeta in [None, Some(dbeta)] {
                    let accumulate = Accumulate::Overwrite;
                    let op = NormBackward {
                        dy,
                        residual,
                        stats,
                        gamma,
                        dx: dresidual,
                        accumulate_dx: Accumulate::Add,
                        dgamma,
                        dbeta,
                        accumulate,
                        scratch,
                    };
                    norm_backward(device, &op).expect("queued");
                    between(device);
                }
            }
            let sums = sums
                .as_flattened()
                .iter()
                .flat_map(|&sums| device.download(sums).expect("downloaded"));
            let sums: Vec<u32> = sums.map(f32::to_bits).collect();
            (device.download(dresidual).expect("downloaded"), sums)
        };
        let alone = run(|device| device.synchronize().expect("done"));
        assert!((0..5).all(|_| run(|_| {}) == alone));
    });
}

fn plain(x: Matrix<bf16>, gamma: Matrix<f32>, y: Matrix<bf16>, stats: Matrix<f32>) -> NormForward {
    NormForward { x, delta: None, gamma, beta: None, epsilon: 1e-5, residual: x, y, stats }
}

#[test]
fn a_bad_row_spoils_only_itself() {
    on_gpu(|device| {
        let shape = [5, 768];
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = gaussian::<bf16>(shape, 1);
            x[(2, 700)] = bf16::from_f32(bad);
            let x = upload(device, &x);
            let gamma = upload(device, &Array2::from_elem([1, shape[1]], 1.0));
            let y = Poisoned::<bf16>::new(device, shape);
            let stats = Poisoned::new(device, [shape[0], 2]).matrix;
            norm_forward(device, &plain(x, gamma, y.matrix, stats)).expect("queued");
            let y = y.read(device);
            let spoilt = |row: usize| y[row * shape[1]..][..shape[1]].iter().all(|y| y.is_nan());
            assert_eq!([0, 1, 2, 3, 4].map(spoilt), [false, false, true, false, false], "{bad}");
        }
    });
}

#[test]
fn bad_rows_are_refused() {
    on_gpu(|device| {
        let mut forward = |width: usize, y_rows: usize| {
            let x = device.alloc::<bf16>("x", [3, width]).expect("memory");
            let gamma = device.alloc("gamma", [1, width]).expect("memory");
            let y = device.alloc("y", [y_rows, width]).expect("memory");
            let stats = device.alloc("stats", [3, 2]).expect("memory");
            norm_forward(device, &plain(x, gamma, y, stats))
        };
        assert_eq!(refused(forward(6, 3)), ("shape", "x"));
        assert_eq!(refused(forward(MAX_WIDTH + 4, 3)), ("too large", "the width"));
        assert_eq!(refused(forward(8, 2)), ("shape", "y"));
        assert_eq!(forward(8, 3), Ok(()));
    });
}
