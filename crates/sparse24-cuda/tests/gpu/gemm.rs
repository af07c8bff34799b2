//! Dense products and their plans.

use half::bf16;
use ndarray::{Array2, ArrayView2};
use sparse24_core::{op::Accumulate, philox::Philox4x32};
use sparse24_cpu::gemm::matmul;
use sparse24_cuda::{
    Device, Error, Matrix,
    gemm::{Gemm, LinearDgrad, LinearForward, LinearWgrad, WORKSPACE},
};

use crate::support::{Poisoned, gaussian, on_gpu, upload};

/// Tokens p, in-features q, out-features r: small, ragged, not multiples of 8, and the shapes of
/// GPT-2 and its head.
const SHAPES: [[usize; 3]; 9] = [
    [1, 8, 8],
    [1, 768, 2304],
    [7, 4, 12],
    [130, 64, 4],
    [77, 1600, 100],
    [129, 768, 3072],
    [300, 1028, 516],
    [64, 768, 50304],
    [1000, 384, 384],
];

fn products(device: &mut Device) -> Gemm {
    let workspace = device.alloc("workspace", [1, WORKSPACE]).expect("memory");
    Gemm::new(device, workspace).expect("the library")
}

fn wide(x: &Array2<bf16>) -> Array2<f32> {
    x.mapv(|x| x.to_f32())
}

/// Integers from -4 to 4: sums of 4000 products are exact in f32.
fn integers([rows, columns]: [usize; 2], seed: u64) -> Array2<bf16> {
    let philox = Philox4x32::new(seed);
    Array2::from_shape_fn((rows, columns), |(row, column)| {
        bf16::from_f32((philox.block([row as u32, column as u32, 0, 0])[0] % 9) as f32 - 4.0)
    })
}

fn multiplied(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>) -> Array2<f32> {
    let mut c = Array2::zeros((a.nrows(), b.ncols()));
    matmul(a, b, c.view_mut(), Accumulate::Overwrite).expect("shapes");
    c
}

/// X, W, b and dZ on the host.
struct Linear {
    x: Array2<bf16>,
    w: Array2<bf16>,
    b: Array2<bf16>,
    dz: Array2<bf16>,
}

impl Linear {
    fn new([p, q, r]: [usize; 3], of: fn([usize; 2], u64) -> Array2<bf16>) -> Self {
        Self { x: of([p, q], 1), w: of([r, q], 2), b: of([1, r], 3), dz: of([p, r], 4) }
    }

    /// Z, dX and dW.
    fn products(&self) -> [Array2<f32>; 3] {
        let [x, w, b, dz] = [&self.x, &self.w, &self.b, &self.dz].map(wide);
        [
            multiplied(x.view(), w.t()) + b,
            multiplied(dz.view(), w.view()),
            multiplied(dz.t(), x.view()),
        ]
    }
}

/// Z, dX and dW from the GPU; dW overwritten and then added to.
fn on_device(
    device: &mut Device,
    gemm: &mut Gemm,
    host: &Linear,
) -> ([Vec<bf16>; 2], [Vec<f32>; 2]) {
    let ([p, q], r) = ([host.x.nrows(), host.x.ncols()], host.w.nrows());
    let [x, weight, bias, dz] = [&host.x, &host.w, &host.b, &host.dz].map(|x| upload(device, x));
    let [z, dx] = [[p, r], [p, q]].map(|shape| Poisoned::<bf16>::new(device, shape));
    let dw = Poisoned::<f32>::new(device, [r, q]);
    gemm.linear_forward(device, &LinearForward { x, weight, bias: Some(bias), z: z.matrix })
        .expect("queued");
    gemm.linear_dgrad(device, &LinearDgrad { dz, weight, dx: dx.matrix }).expect("queued");
    let dws = [Accumulate::Overwrite, Accumulate::Add].map(|accumulate| {
        gemm.linear_wgrad(device, &LinearWgrad { dz, x, dw: dw.matrix, accumulate })
            .expect("queued");
        dw.read(device)
    });
    ([z.read(device), dx.read(device)], dws)
}

#[test]
fn products_of_small_integers_are_exact() {
    on_gpu(|device| {
        let mut gemm = products(device);
        for shape in SHAPES {
            let host = Linear::new(shape, integers);
            let [z, dx, dw] = host.products();
            let ([found_z, found_dx], [once, twice]) = on_device(device, &mut gemm, &host);
            for (name, found, expected) in [("Z", found_z, z), ("dX", found_dx, dx)] {
                let pairs = found.iter().zip(&expected).enumerate();
                let wrong: Vec<_> = pairs
                    .filter(|(_, (found, expected))| **found != bf16::from_f32(**expected))
                    .take(4)
                    .collect();
                assert!(wrong.is_empty(), "{name} of {shape:?}: {wrong:?}");
            }
            assert!(once.iter().eq(dw.iter()), "dW of {shape:?}");
            assert!(
                twice.iter().copied().eq(dw.iter().map(|x| 2.0 * x)),
                "dW onto dW of {shape:?}"
            );
        }
    });
}

#[test]
fn rectangles_of_wider_matrices_are_operands() {
    on_gpu(|device| {
        let [p, q, r] = [100, 64, 192];
        let host = Linear::new([p, q, r], integers);
        let mut gemm = products(device);
        // Like q, k and v side by side.
        let wide_z = Poisoned::<bf16>::new(device, [p, 3 * r]);
        let wide_x = device.alloc::<bf16>("x", [p, 2 * q]).expect("memory");
        let (x, z) = (wide_x.columns(q..2 * q), wide_z.matrix.columns(r..2 * r));
        device.upload(x, host.x.as_slice().expect("row-major")).expect("uploaded");
        let weight = upload(device, &host.w);
        gemm.linear_forward(device, &LinearForward { x, weight, bias: None, z }).expect("queued");
        let expected = multiplied(wide(&host.x).view(), wide(&host.w).t());
        assert!(
            device
                .download(z)
                .expect("read")
                .into_iter()
                .eq(expected.iter().map(|&x| bf16::from_f32(x)))
        );
        let whole = wide_z.read(device);
        let outside = |at: usize| !(r..2 * r).contains(&(at % (3 * r)));
        assert!(
            (0..whole.len()).filter(|&at| outside(at)).all(|at| whole[at].is_nan()),
            "nothing is written outside the rectangle"
        );
    });
}

#[test]
fn plans_and_their_copies_repeat_their_bits() {
    on_gpu(|device| {
        let mut gemm = products(device);
        // Few outputs and long sums, where split-K is fastest.
        let hosts = [[4096, 64, 64], [64, 64, 4096], [2048, 128, 136]]
            .map(|shape| Linear::new(shape, gaussian::<bf16>));
        let bits = |(bf16s, f32s): ([Vec<bf16>; 2], [Vec<f32>; 2])| {
            (
                bf16s.map(|x| x.into_iter().map(bf16::to_bits).collect::<Vec<_>>()),
                f32s.map(|x| x.into_iter().map(f32::to_bits).collect::<Vec<_>>()),
            )
        };
        let all = |device: &mut Device, gemm: &mut Gemm| {
            hosts.each_ref().map(|host| bits(on_device(device, gemm, host)))
        };
        let first = all(device, &mut gemm);
        assert!((0..5).all(|_| all(device, &mut gemm) == first), "a plan repeats its bits");
        let plans = gemm.plans();
        let mut copy = products(device);
        plans.iter().for_each(|(product, plan)| {
            copy.use_plan(product, plan).expect("plans of this library")
        });
        assert_eq!(copy.plans(), plans);
        assert!(all(device, &mut copy) == first, "a copy of the plans gives the same bits");
        assert_eq!(copy.plans(), plans, "nothing was planned again");
    });
}

#[test]
fn malformed_plans_are_refused() {
    on_gpu(|device| {
        let mut gemm = products(device);
        on_device(device, &mut gemm, &Linear::new([64, 64, 64], integers));
        let plans = gemm.plans();
        let (product, plan) = plans
            .iter()
            .find(|(product, _)| product.starts_with("wgrad "))
            .expect("it was measured");
        let mut fresh = products(device);
        let mut refuses = |product: &str, plan: &str, word: &str| {
            let error = fresh.use_plan(product, plan).expect_err("it is changed");
            assert!(
                matches!(&error, Error::Recorded { key, .. } if key == product)
                    && error.to_string().contains(word),
                "{error}"
            );
            assert!(fresh.plans().is_empty());
        };
        refuses("", plan, "not a dense product");
        refuses(&product.replace("wgrad", "egrad"), plan, "not a dense product");
        refuses(product, "", "not an algorithm");
        refuses(product, &plan[1..], "not an algorithm");
        refuses(
            product,
            &plan.chars().map(|c| if c == '-' { c } else { 'f' }).collect::<String>(),
            "cuBLASLt reports",
        );
    });
}

#[test]
fn no_tokens_give_a_zero_weight_gradient() {
    on_gpu(|device| {
        let mut gemm = products(device);
        let none: Matrix<bf16> = device.alloc("none", [0, 64]).expect("memory");
        let (weight, dw) =
            (upload(device, &integers([64, 64], 1)), Poisoned::<f32>::new(device, [64, 64]));
        gemm.linear_forward(device, &LinearForward { x: none, weight, bias: None, z: none })
            .expect("nothing");
        gemm.linear_dgrad(device, &LinearDgrad { dz: none, weight, dx: none }).expect("nothing");
        gemm.linear_wgrad(
            device,
            &LinearWgrad { dz: none, x: none, dw: dw.matrix, accumulate: Accumulate::Add },
        )
        .expect("nothing");
        assert!(dw.read(device).iter().all(|x| x.is_nan()));
        gemm.linear_wgrad(
            device,
            &LinearWgrad { dz: none, x: none, dw: dw.matrix, accumulate: Accumulate::Overwrite },
        )
        .expect("queued");
        assert!(dw.read(device).iter().all(|&x| x == 0.0));
    });
}

#[test]
fn a_nan_spoils_its_row_only() {
    on_gpu(|device| {
        let mut gemm = products(device);
        let mut host = Linear::new([40, 64, 72], integers);
        host.x[(3, 5)] = bf16::NAN;
        let [x, weight] = [&host.x, &host.w].map(|x| upload(device, x));
        let z = Poisoned::<bf16>::new(device, [40, 72]);
        gemm.linear_forward(device, &LinearForward { x, weight, bias: None, z: z.matrix })
            .expect("queued");
        assert!(
            z.read(device)
                .chunks(72)
                .enumerate()
                .all(|(row, z)| z.iter().all(|z| z.is_nan() == (row == 3)))
        );
    });
}

#[test]
fn bad_operands_are_refused() {
    on_gpu(|device| {
        let mut gemm = products(device);
        let [x, weight, z] = [[8, 64], [16, 64], [8, 16]]
            .map(|shape| device.alloc::<bf16>("operand", shape).expect("memory"));
        let op = LinearForward { x, weight, bias: None, z };
        assert!(matches!(
            gemm.linear_forward(device, &LinearForward { z: z.rows(0..7), ..op }),
            Err(Error::Shape { operand: "z", .. })
        ));
        assert!(matches!(
            gemm.linear_forward(device, &LinearForward { x: x.columns(0..32), ..op }),
            Err(Error::Shape { operand: "weight", .. })
        ));
        let shifted = device.alloc::<bf16>("wide", [8, 72]).expect("memory").columns(1..65);
        assert!(matches!(
            gemm.linear_forward(device, &LinearForward { x: shifted, ..op }),
            Err(Error::Alignment { operand: "x", .. })
        ));
        let within = LinearForward {
            x: weight.rows(0..8),
            weight: weight.rows(0..8),
            bias: None,
            z: weight.rows(0..8).columns(0..8),
        };
        assert!(matches!(gemm.linear_forward(device, &within), Err(Error::Alias { .. })));
        device.reset().expect("reset");
        assert!(matches!(gemm.linear_forward(device, &op), Err(Error::Stale { .. })));
    });
}
