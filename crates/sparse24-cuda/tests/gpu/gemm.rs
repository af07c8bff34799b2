//! Dense products of rectangles, and their plans. The conformance suite checks their values.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{op::Accumulate, philox::Philox4x32};
use sparse24_cpu::gemm::matmul;
use sparse24_cuda::{
    Device, Error,
    gemm::{Gemm, LinearDgrad, LinearForward, LinearWgrad, WORKSPACE},
};

use crate::support::{Poisoned, gaussian, on_gpu, refused, upload};

fn products(device: &mut Device) -> Gemm {
    let workspace = device.alloc("workspace", [1, WORKSPACE]).expect("memory");
    Gemm::new(device, workspace).expect("the library")
}

/// Integers from -4 to 4: sums of 4000 products are exact in f32.
fn integers([rows, columns]: [usize; 2], seed: u64) -> Array2<bf16> {
    let philox = Philox4x32::new(seed);
    Array2::from_shape_fn((rows, columns), |(row, column)| {
        bf16::from_f32((philox.block([row as u32, column as u32, 0, 0])[0] % 9) as f32 - 4.0)
    })
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

/// A NaN spoils its row only.
#[test]
fn rectangles_of_wider_matrices_are_operands() {
    on_gpu(|device| {
        let [p, q, r] = [100, 64, 192];
        let mut host = Linear::new([p, q, r], integers);
        host.x[(3, 5)] = bf16::NAN;
        let mut gemm = products(device);
        // Like q, k and v side by side.
        let wide_z = Poisoned::<bf16>::new(device, [p, 3 * r]);
        let wide_x = device.alloc::<bf16>("x", [p, 2 * q]).expect("memory");
        let (x, z) = (wide_x.columns(q..2 * q), wide_z.matrix.columns(r..2 * r));
        device.upload(x, host.x.as_slice().expect("row-major")).expect("uploaded");
        let weight = upload(device, &host.w);
        gemm.linear_forward(device, &LinearForward { x, weight, bias: None, z }).expect("queued");
        let [x, w] = [&host.x, &host.w].map(|x| x.mapv(bf16::to_f32));
        let mut expected = Array2::zeros((p, r));
        matmul(x.view(), w.t(), expected.view_mut(), Accumulate::Overwrite).expect("shapes");
        for (at, found) in wide_z.read(device).into_iter().enumerate() {
            let (row, column) = (at / (3 * r), at % (3 * r));
            // Nothing is written outside the rectangle.
            if row == 3 || !(r..2 * r).contains(&column) {
                assert!(found.is_nan(), "{row}, {column}: {found}");
            } else {
                assert_eq!(found, bf16::from_f32(expected[(row, column - r)]), "{row}, {column}");
            }
        }
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
fn bad_operands_are_refused() {
    on_gpu(|device| {
        let mut gemm = products(device);
        let [x, weight, z] = [[8, 64], [16, 64], [8, 16]]
            .map(|shape| device.alloc::<bf16>("operand", shape).expect("memory"));
        let op = LinearForward { x, weight, bias: None, z };
        let mut refuse =
            |device: &mut Device, op: LinearForward| refused(gemm.linear_forward(device, &op));
        let z = z.rows(0..7);
        assert_eq!(refuse(device, LinearForward { z, ..op }), ("shape", "z"));
        let x = x.columns(0..32);
        assert_eq!(refuse(device, LinearForward { x, ..op }), ("shape", "weight"));
        let x = device.alloc::<bf16>("wide", [8, 72]).expect("memory").columns(1..65);
        assert_eq!(refuse(device, LinearForward { x, ..op }), ("alignment", "x"));
        let (x, z) = (weight.rows(0..8), weight.rows(0..8).columns(0..8));
        let within = LinearForward { x, weight: x, bias: None, z };
        assert_eq!(refuse(device, within), ("alias", "z"));
        device.reset().expect("reset");
        assert_eq!(refuse(device, op).0, "stale");
    });
}
