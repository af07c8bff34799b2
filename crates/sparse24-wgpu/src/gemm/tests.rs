//! The kernels for products against each other.

use sparse24_core::op::Accumulate;

use super::{FOURS, LARGE, SINGLES, SOFTWARE, Transposed, constants};
use crate::device::tests::open;

/// All kernels that accept a shape give the same bits, even those this adapter would not choose.
#[test]
fn all_kernels_have_the_same_bits() {
    let Some(mut device) = open() else { return };
    for [m, n, k] in [[288, 384, 320], [132, 140, 300]] {
        let [a, b] = [[m, k], [n, k]].map(|shape| {
            let matrix = device.alloc("operand", shape, "test").unwrap();
            let value = |i: usize| 0x3f80_0000 | (i as u32).wrapping_mul(0x9e37_79b9) >> 9;
            let values: Vec<u32> = (0..matrix.elements()).map(|i| value(i + shape[0])).collect();
            device.upload(matrix, &values).unwrap();
            matrix
        });
        let out = device.alloc("product", [m, n], "test").unwrap();
        let (of_a, of_b) = ((a, Transposed::No), (b, Transposed::Yes));
        let constants = constants(of_a, of_b, None, out, Accumulate::Overwrite).unwrap();
        let mut results = Vec::new();
        for product in [&SINGLES, &FOURS, &LARGE, &SOFTWARE] {
            if product.depth.is_none() || product.fits([m, n, k]) {
                device.upload(out, &vec![0; m * n]).unwrap();
                product.run(&mut device, [a, b, b, out], &constants).unwrap();
                results.push(device.download(out).unwrap());
            }
        }
        assert!(results.iter().all(|bits| *bits == results[0]), "{m} x {n} x {k}");
        assert_eq!(results.len(), if k % 64 == 0 { 4 } else { 3 });
    }
}
