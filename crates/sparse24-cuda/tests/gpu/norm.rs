//! norm_forward, norm_backward.

use half::bf16;
use ndarray::{Array1, Array2};
use sparse24_core::op::Accumulate;
use sparse24_cpu::norm as cpu;
use sparse24_cuda::{
    Beta, Device, Error, Matrix,
    norm::{
        MAX_WIDTH, NormBackward, NormForward, norm_backward, norm_backward_scratch, norm_forward,
    },
};

use crate::{
    support::{Poisoned, gaussian, on_gpu, upload},
    tolerance::{assert_within, norm_dresidual, norm_parameter, norm_stats, norm_y},
};

const SHAPES: [[usize; 2]; 12] = [
    [1, 4],
    [37, 4],
    [5, 64],
    [130, 768],
    [1, 1028],
    [67, 1280],
    [67, 1600],
    [29, 2048],
    [300, 2052],
    [9, 4096],
    [3, 8192],
    [2200, 64],
];

fn widened(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

fn wide(shape: [usize; 2], x: &[bf16]) -> Array2<f32> {
    Array2::from_shape_vec(shape, widened(x)).expect("as many elements")
}

/// Whether an optional operand is given.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Optional {
    Given,
    Absent,
}

#[test]
fn forward_is_the_cpu_s_within_its_bound() {
    on_gpu(|device| {
        for shape in SHAPES {
            for optional in [Optional::Given, Optional::Absent] {
                check_forward(device, shape, optional);
            }
        }
    });
}

fn check_forward(device: &mut Device, shape: [usize; 2], optional: Optional) {
    let what = format!("{shape:?}, {optional:?}");
    // A mean far from zero: a variance by cancelling squares would fail.
    let x = gaussian::<bf16>(shape, 1).mapv(|x| bf16::from_f32(x.to_f32() * 0.5 + 8.0));
    let delta = (optional == Optional::Given).then(|| gaussian::<bf16>(shape, 2));
    let gamma = gaussian::<f32>([1, shape[1]], 3).mapv(|x| x + 1.0);
    let beta = (optional == Optional::Given).then(|| gaussian::<f32>([1, shape[1]], 4));
    let [residual, y] = [0, 1].map(|_| Poisoned::<bf16>::new(device, shape));
    let stats = Poisoned::<f32>::new(device, [shape[0], 2]);
    let op = NormForward {
        x: upload(device, &x),
        delta: delta.as_ref().map(|delta| upload(device, delta)),
        gamma: upload(device, &gamma),
        beta: beta.as_ref().map(|beta| upload(device, beta)),
        residual: residual.matrix,
        y: y.matrix,
        stats: stats.matrix,
    };
    norm_forward(device, &op).expect("queued");
    let residual = residual.read(device);
    let sum: Vec<bf16> = match &delta {
        Some(delta) => x
            .iter()
            .zip(delta)
            .map(|(x, delta)| bf16::from_f32(x.to_f32() + delta.to_f32()))
            .collect(),
        None => x.iter().copied().collect(),
    };
    assert_eq!(residual, sum, "{what}: the residual is rounded once");

    let x = wide(shape, &residual);
    let [mut copy, mut expected] = [0, 1].map(|_| Array2::zeros(shape));
    let mut expected_stats = Array2::zeros([shape[0], 2]);
    let row = |x: &Array2<f32>| x.row(0).to_owned();
    let beta = beta.as_ref().map(row);
    let (gamma, beta) = (row(&gamma), beta.as_ref().map(|beta| beta.view()));
    cpu::norm_forward(
        x.view(),
        None,
        gamma.view(),
        beta,
        copy.view_mut(),
        expected.view_mut(),
        expected_stats.view_mut(),
    )
    .expect("shapes");
    let rows: Vec<Vec<f64>> =
        x.rows().into_iter().map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect();
    let bounds: Vec<[f64; 2]> = rows.iter().map(|row| norm_stats(row)).collect();
    let expected_stats: Vec<f64> = expected_stats.iter().map(|&x| x.into()).collect();
    assert_within(&format!("{what}: stats"), stats.read(device), &expected_stats, |at| {
        bounds[at / 2][at % 2]
    });
    let expected: Vec<f64> = expected.iter().map(|&y| y.into()).collect();
    assert_within(&format!("{what}: y"), widened(&y.read(device)), &expected, |at| {
        let (row, column) = (at / shape[1], at % shape[1]);
        let stats = [expected_stats[2 * row], expected_stats[2 * row + 1]];
        norm_y(rows[row][column], stats, bounds[row], gamma[column].into(), expected[at])
    });
}

#[test]
fn backward_is_the_cpu_s_within_its_bound() {
    on_gpu(|device| {
        for shape in SHAPES {
            for (optional, accumulate) in [
                (Optional::Given, Beta::Overwrite),
                (Optional::Given, Beta::Accumulate),
                (Optional::Absent, Beta::Accumulate),
            ] {
                check_backward(device, shape, optional, accumulate);
            }
        }
    });
}

fn check_backward(device: &mut Device, shape: [usize; 2], optional: Optional, accumulate: Beta) {
    let what = format!("{shape:?}, {optional:?}, {accumulate:?}");
    let [p, c] = shape;
    let [dy, residual, above] = [5, 6, 7].map(|seed| gaussian::<bf16>(shape, seed));
    let gamma = gaussian::<f32>([1, c], 8).mapv(|x| x + 1.0);
    let stats = Array2::from_shape_fn([p, 2], |(row, column)| {
        if column == 0 { 0.1 } else { 1.0 + 0.01 * (row % 7) as f32 }
    });
    let [held_gamma, held_beta] = [9, 10].map(|seed| gaussian::<f32>([1, c], seed));
    let dresidual = Poisoned::<bf16>::new(device, shape);
    let [dgamma, dbeta] = [0, 1].map(|_| Poisoned::<f32>::new(device, [1, c]));
    device.upload(dresidual.matrix, above.as_slice().expect("row-major")).expect("uploaded");
    if accumulate == Beta::Accumulate {
        device.upload(dgamma.matrix, held_gamma.as_slice().expect("row-major")).expect("uploaded");
        device.upload(dbeta.matrix, held_beta.as_slice().expect("row-major")).expect("uploaded");
    }
    let scratch = Poisoned::<f32>::new(device, norm_backward_scratch(device, c));
    let op = NormBackward {
        dy: upload(device, &dy),
        residual: upload(device, &residual),
        stats: upload(device, &stats),
        gamma: upload(device, &gamma),
        dresidual: dresidual.matrix,
        dgamma: dgamma.matrix,
        dbeta: (optional == Optional::Given).then_some(dbeta.matrix),
        accumulate,
        scratch: scratch.matrix,
    };
    norm_backward(device, &op).expect("queued");
    scratch.assert_guarded(device);

    let wide = |x: &Array2<bf16>| x.mapv(|x| x.to_f32());
    let (dy, residual, mut expected) = (wide(&dy), wide(&residual), wide(&above));
    let held = |x: &Array2<f32>| {
        if accumulate == Beta::Accumulate { x.row(0).to_owned() } else { Array1::zeros(c) }
    };
    let (mut sums, gamma) = ([held(&held_gamma), held(&held_beta)], gamma.row(0).to_owned());
    let [expected_gamma, expected_beta] = &mut sums;
    cpu::norm_backward(
        dy.view(),
        residual.view(),
        stats.view(),
        gamma.view(),
        expected.view_mut(),
        Accumulate::Add,
        expected_gamma.view_mut(),
        Some(expected_beta.view_mut()),
        Accumulate::Add,
    )
    .expect("shapes");
    let n = Array2::from_shape_fn(shape, |(row, column)| {
        f64::from((residual[(row, column)] - stats[(row, 0)]) * stats[(row, 1)])
    });
    let g =
        Array2::from_shape_fn(shape, |(row, column)| f64::from(dy[(row, column)] * gamma[column]));
    let means: Vec<[f64; 2]> = (0..p)
        .map(|row| {
            let of = |term: &dyn Fn(usize) -> f64| (0..c).map(term).sum::<f64>() / c as f64;
            [
                of(&|column| g[(row, column)].abs()),
                of(&|column| (g[(row, column)] * n[(row, column)]).abs()),
            ]
        })
        .collect();
    let expected: Vec<f64> = expected.iter().map(|&x| x.into()).collect();
    assert_within(
        &format!("{what}: dresidual"),
        widened(&dresidual.read(device)),
        &expected,
        |at| {
            let place = (at / c, at % c);
            norm_dresidual(
                c,
                stats[(place.0, 1)].into(),
                [g[place], n[place]],
                means[place.0],
                expected[at],
            )
        },
    );
    let columns = |term: &dyn Fn((usize, usize)) -> f64, held: &Array2<f32>| -> Vec<f64> {
        (0..c)
            .map(|column| {
                f64::from(held[(0, column)].abs())
                    + (0..p).map(|row| term((row, column)).abs()).sum::<f64>()
            })
            .collect()
    };
    let of_gamma = columns(&|at| f64::from(dy[at]) * n[at], &held_gamma);
    let exact = |x: &Array1<f32>| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    assert_within(&format!("{what}: dgamma"), dgamma.read(device), &exact(&sums[0]), |at| {
        norm_parameter(p, of_gamma[at])
    });
    if optional == Optional::Given {
        let of_beta = columns(&|at| dy[at].into(), &held_beta);
        assert_within(&format!("{what}: dbeta"), dbeta.read(device), &exact(&sums[1]), |at| {
            norm_parameter(p, of_beta[at])
        });
    }
}

#[test]
fn a_call_repeats_its_bits() {
    on_gpu(|device| {
        let shape = [5000, 1600];
        let [dy, residual, above] =
            [1, 2, 3].map(|seed| upload(device, &gaussian::<bf16>(shape, seed)));
        let stats = upload(device, &Array2::from_elem([shape[0], 2], 0.5));
        let gamma = upload(device, &gaussian::<f32>([1, shape[1]], 4));
        let scratch_shape = norm_backward_scratch(device, shape[1]);
        let scratch = Poisoned::new(device, scratch_shape).matrix;
        let run = |device: &mut Device| {
            let dresidual = Poisoned::<bf16>::new(device, shape);
            let [dgamma, dbeta] = [0, 1].map(|_| Poisoned::<f32>::new(device, [1, shape[1]]));
            device.copy(above, dresidual.matrix).expect("copied");
            let (of_gamma, of_beta) = (dgamma.matrix, Some(dbeta.matrix));
            let op = NormBackward {
                dy,
                residual,
                stats,
                gamma,
                dresidual: dresidual.matrix,
                dgamma: of_gamma,
                dbeta: of_beta,
                accumulate: Beta::Overwrite,
                scratch,
            };
            norm_backward(device, &op).expect("queued");
            let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            (dresidual.read(device), bits(dgamma.read(device)), bits(dbeta.read(device)))
        };
        let first = run(device);
        assert!((0..4).all(|_| run(device) == first));
    });
}

/// Each reads what the one before it wrote, or overwrites what it read, and takes its places while
/// that one runs.
#[test]
fn calls_in_a_row_are_the_same_as_one_at_a_time() {
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
                    residual,
                    y: dy,
                    stats,
                };
                norm_forward(device, &forward).expect("queued");
                between(device);
                // Twice, with one scratch.
                for dbeta in [None, Some(dbeta)] {
                    let accumulate = Beta::Overwrite;
                    let op = NormBackward {
                        dy,
                        residual,
                        stats,
                        gamma,
                        dresidual,
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

#[test]
fn a_row_that_is_not_finite_spoils_only_itself() {
    on_gpu(|device| {
        let shape = [5, 768];
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = gaussian::<bf16>(shape, 1);
            x[(2, 700)] = bf16::from_f32(bad);
            let x = upload(device, &x);
            let gamma = upload(device, &Array2::from_elem([1, shape[1]], 1.0));
            let y = Poisoned::<bf16>::new(device, shape);
            let stats = Poisoned::new(device, [shape[0], 2]).matrix;
            norm_forward(
                device,
                &NormForward { x, delta: None, gamma, beta: None, residual: x, y: y.matrix, stats },
            )
            .expect("queued");
            let y = y.read(device);
            let spoilt = |row: usize| y[row * shape[1]..][..shape[1]].iter().all(|y| y.is_nan());
            assert_eq!([0, 1, 2, 3, 4].map(spoilt), [false, false, true, false, false], "{bad}");
        }
    });
}

#[test]
fn nothing_is_done_for_no_rows_and_gradients_of_none_are_zero() {
    on_gpu(|device| {
        let none: Matrix<bf16> = device.alloc("none", [0, 64]).expect("memory");
        let stats = device.alloc("stats", [0, 2]).expect("memory");
        let gamma = device.alloc("gamma", [1, 64]).expect("memory");
        norm_forward(
            device,
            &NormForward {
                x: none,
                delta: None,
                gamma,
                beta: None,
                residual: none,
                y: none,
                stats,
            },
        )
        .expect("nothing");
        let [dgamma, dbeta] = [0, 1].map(|_| Poisoned::<f32>::new(device, [1, 64]));
        let scratch_shape = norm_backward_scratch(device, 64);
        let scratch = Poisoned::new(device, scratch_shape).matrix;
        let accumulate = Beta::Overwrite;
        let (dgamma_, dbeta_) = (dgamma.matrix, Some(dbeta.matrix));
        let op = NormBackward {
            dy: none,
            residual: none,
            stats,
            gamma,
            dresidual: none,
            dgamma: dgamma_,
            dbeta: dbeta_,
            accumulate,
            scratch,
        };
        norm_backward(device, &op).expect("queued");
        assert_eq!((dgamma.read(device), dbeta.read(device)), (vec![0.0; 64], vec![0.0; 64]));
    });
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    on_gpu(|device| {
        let mut forward = |width: usize, y_rows: usize| {
            let x = device.alloc::<bf16>("x", [3, width]).expect("memory");
            let gamma = device.alloc("gamma", [1, width]).expect("memory");
            let y = device.alloc("y", [y_rows, width]).expect("memory");
            let stats = device.alloc("stats", [3, 2]).expect("memory");
            norm_forward(
                device,
                &NormForward { x, delta: None, gamma, beta: None, residual: x, y, stats },
            )
        };
        assert!(matches!(forward(6, 3), Err(Error::Shape { expected: [3, 8], .. })));
        assert!(matches!(forward(MAX_WIDTH + 4, 3), Err(Error::TooLarge { limit: MAX_WIDTH, .. })));
        assert!(matches!(forward(8, 2), Err(Error::Shape { operand: "y", .. })));
        assert_eq!(forward(8, 3), Ok(()));
    });
}
