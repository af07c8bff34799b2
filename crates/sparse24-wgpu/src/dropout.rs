//! Inverted dropout, of elements or of whole sequences.

use sparse24_core::op::Dropout;

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// x = dropout(x) in place, x `[p, d]`; elements are numbered row by row, and draw from the
/// dropout's site in this step. The dropped elements are core's.
///
/// # Errors
/// Failures of earlier work.
pub fn dropout(device: &mut Device, x: Matrix, dropout: &Dropout) -> Result<(), Error> {
    let constants = constants(x, dropout, 1);
    device.run(&kernels::DROPOUT, [x], &constants, x.elements().div_ceil(4 * WORKGROUP))
}

/// x = x / (1 - p) in the sequences that are kept, and 0 in the others, in place: x `[p, d]` in
/// sequences of `length` rows; sequence s uses the draw of element s in [`dropout`].
///
/// # Errors
/// [`Error::Shape`] unless the rows are whole sequences; failures of earlier work.
pub fn drop_sequences(
    device: &mut Device,
    x: Matrix,
    length: usize,
    dropout: &Dropout,
) -> Result<(), Error> {
    let ([p, d], length) = (x.shape, length.max(1));
    check_shape("drop sequences", "x", [p / length * length, d], x)?;
    let constants = constants(x, dropout, length * d);
    device.run(&kernels::DROP_SEQUENCES, [x], &constants, x.elements().div_ceil(WORKGROUP))
}

/// The constants of both kernels; `together` elements share a draw.
fn constants(x: Matrix, dropout: &Dropout, together: usize) -> [u32; 8] {
    let [columns, elements, together] = [x.shape[1], x.elements(), together].map(|n| n as u32);
    let ([offset, stride], site) = (x.place(), dropout.site.word());
    let scale = dropout.scale().to_bits();
    [offset, stride, columns, elements, site, dropout.least(), scale, together]
}

#[cfg(test)]
mod tests {
    use sparse24_core::{
        op::StepState,
        philox::{Purpose, Site},
    };

    use crate::{device::tests::open, kernels::Kernel};

    /// All bits of Philox, of which kernels use the upper 24.
    #[test]
    fn random_words_are_those_of_core() {
        static WORDS: Kernel = Kernel {
            name: "words",
            source: concat!(
                include_str!("../kernels/interface.wgsl"),
                include_str!("../kernels/philox.wgsl"),
                "@group(0) @binding(0) var<uniform> site: u32;
                @group(0) @binding(2) var<storage, read_write> out: array<vec4<u32>>;
                @compute @workgroup_size(64)
                fn words(@builtin(global_invocation_id) id: vec3<u32>) {
                    out[id.x] = philox(id.x * 0x9e3779b1u, site);
                }",
            ),
            inputs: 0,
            outputs: 1,
        };
        let Some(mut device) = open() else { return };
        let out = device.alloc("words", [1 << 16, 4], "test").unwrap();
        for (seed, step, site) in [(u64::MAX / 3, 41, 5), (1 << 63 | 7, u32::MAX, 0xff_ffff)] {
            let site = Site::new(Purpose::Dropout, site);
            let state = StepState { seed, step, micro_step: step / 3, ..StepState::default() };
            device.set_step(&state).unwrap();
            device.run(&WORDS, [out], &[site.word()], 1 << 10).unwrap();
            let stream = state.stream(site);
            let calls = (0..1 << 16).map(|i: u32| i.wrapping_mul(0x9e37_79b1));
            let expected = calls.flat_map(|call| stream.words(call));
            assert!(device.download(out).unwrap().into_iter().eq(expected), "{state:?}");
        }
    }
}
