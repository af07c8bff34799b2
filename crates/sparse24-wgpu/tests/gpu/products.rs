//! Products of integers, which f32 computes exactly, by every kernel of products.

use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_wgpu::gemm;

use crate::{Bits, loaded, open};

/// Products by scalar loads, by vec4 loads, with the larger output tile, and for software adapters.
#[test]
fn products_of_integers() {
    // Forward, dgrad and wgrad of the last three sizes use the larger output tile in turn.
    let large = [[2052, 44, 2044], [2052, 2044, 44], [44, 2044, 2052]];
    // All three consist of whole output tiles of the kernel for software adapters.
    let whole = [128, 256, 384];
    for [p, q, r] in
        [[1, 1, 1], [3, 5, 7], [64, 16, 64], [132, 20, 68], whole].into_iter().chain(large)
    {
        let Some(mut device) = open() else { return };
        let mut given = |shape: [usize; 2], seed| {
            let words = Bits::Any.words(shape[0] * shape[1], seed);
            let values = words.into_iter().map(|word| (word % 17) as f32 - 8.0).collect();
            let values = Array2::from_shape_vec(shape, values).unwrap();
            let bits: Vec<u32> = values.iter().map(|x: &f32| x.to_bits()).collect();
            (loaded(&mut device, shape, &bits), values)
        };
        let [(x, xs), (w, ws), (dz, dzs), (bias, biases)] =
            [given([p, q], 1), given([r, q], 2), given([p, r], 3), given([1, r], 4)];
        let [(z, _), (dx, _), (dw, dws)] = [given([p, r], 5), given([p, q], 6), given([r, q], 7)];
        gemm::linear_forward(&mut device, x, w, Some(bias), z).unwrap();
        gemm::linear_dgrad(&mut device, dz, w, dx).unwrap();
        gemm::linear_wgrad(&mut device, dz, x, dw, Accumulate::Add).unwrap();
        for (what, found, expected) in [
            ("forward", z, xs.dot(&ws.t()) + &biases),
            ("dgrad", dx, dzs.dot(&ws)),
            ("wgrad", dw, dzs.t().dot(&xs) + &dws),
        ] {
            let found = device.download(found).unwrap().into_iter().map(f32::from_bits);
            assert!(found.eq(expected), "{what} of {p} x {q} x {r}");
        }
    }
}
