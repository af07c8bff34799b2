//! mvue_compress: metadata and values have core's bits, padding included.

use half::bf16;
use ndarray::{Array2, ArrayView2, s};
use sparse24_core::{
    compressed::Compressed24,
    mvue::{Estimator, call},
    op::{Activation, StepState},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::mvue as cpu;
use sparse24_cuda::{
    Device, Matrix, activation,
    compressed::Compressed,
    layout::{Fragments, to_fragments},
    mvue::{backward_compress, mvue_compress},
};

use crate::search::hostile;
use crate::support::{Poisoned, affordable, gaussian, on_gpu, refused, upload};

const ESTIMATORS: [Estimator; 2] = [Estimator::Exact, Estimator::Approximate];
const SITE: Site = Site::new(Purpose::Mvue, 77);

fn state(seed: u64) -> StepState {
    StepState {
        seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        step: 3 + seed as u32,
        micro_step: 5,
        ..StepState::default()
    }
}

fn stream(state: &StepState) -> Stream {
    Stream::new(state.seed, SITE, state.micro_step, state.step)
}

/// The kernel's result, in poisoned memory.
fn compressed(device: &mut Device, dz: Matrix<bf16>, estimator: Estimator) -> Fragments {
    poisoned(device, dz.shape(), |device, out| {
        mvue_compress(device, dz, estimator, SITE, out).expect("queued");
    })
}

/// Returns what is written to poisoned memory for a sample of dZ `[p, r]`.
fn poisoned(
    device: &mut Device,
    [p, r]: [usize; 2],
    write: impl FnOnce(&mut Device, Compressed),
) -> Fragments {
    let mut out = Compressed::alloc(device, "out", [r, p.next_multiple_of(4)]).expect("memory");
    let values = Poisoned::new(device, out.values.shape());
    let metadata = Poisoned::new(device, out.metadata.shape());
    (out.values, out.metadata) = (values.matrix, metadata.matrix);
    write(device, out);
    Fragments { values: values.read(device), metadata: metadata.read(device) }
}

/// Asserts that values, nibbles and padding have the expected bits.
pub(crate) fn assert_same(found: &Fragments, expected: &Fragments, what: &str) {
    assert!(found.metadata == expected.metadata, "{what}: metadata");
    let pairs = found.values.iter().zip(&expected.values);
    let differs = pairs.clone().position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differs, None, "{what}: the first differing value, in the order of fragments");
    assert_eq!(found.values.len(), expected.values.len(), "{what}: values");
}

/// Compares both estimators with the CPU, which has core's bits.
fn check_estimates(device: &mut Device, dz: &Array2<bf16>, seed: u64) {
    let on_device = upload(device, dz);
    for estimator in ESTIMATORS {
        check(device, (dz.view(), on_device), estimator, seed);
    }
}

fn check(
    device: &mut Device,
    (dz, on_device): (ArrayView2<'_, bf16>, Matrix<bf16>),
    estimator: Estimator,
    seed: u64,
) {
    let state = state(seed);
    device.set_step(&state).expect("set");
    let [p, r] = on_device.shape();
    let mut expected = Compressed24::zeros(r, p.next_multiple_of(4)).expect("grouped");
    cpu::mvue_compress(dz, estimator, stream(&state), &mut expected).expect("shapes agree");
    let found = compressed(device, on_device, estimator);
    assert_same(&found, &to_fragments(&expected), &format!("{p}x{r}, seed {seed}, {estimator:?}"));
}

#[test]
fn ragged_shapes() {
    on_gpu(|device| {
        for p in [0, 1, 3, 4, 63, 64, 65, 1000] {
            for r in [0, 4, 64, 100, 1600].into_iter().filter(|r| affordable(p * r)) {
                check_estimates(device, &gaussian([p, r], (p + 7 * r) as u64), (p * r) as u64);
            }
        }
    });
}

/// Ties, few nonzeros, sums that overflow, the smallest numbers, and numbers that are not finite.
#[test]
fn special_values() {
    on_gpu(|device| {
        for seed in 0..if affordable(usize::MAX) { 280 } else { 14 } {
            check_estimates(device, &hostile([16, 1600], seed), seed);
        }
    });
}

#[test]
fn rows_may_be_strided() {
    on_gpu(|device| {
        let dz: Array2<bf16> = gaussian([130, 212], 1);
        let whole = upload(device, &dz);
        for columns in [0..64, 4..72, 100..212] {
            let part = whole.rows(1..128).columns(columns.clone());
            let dz = dz.slice(s![1..128, columns]);
            check(device, (dz, part), Estimator::Exact, 1);
        }
    });
}

/// dZ and its sample have the bits of the two kernels, for every z in bf16 and ragged shapes.
#[test]
fn activations_may_be_fused() {
    on_gpu(|device| {
        device.set_step(&state(1)).expect("set");
        for activation in Activation::ALL {
            let halves = activation.columns_in();
            for shape @ [p, f] in [[256, 256], [0, 64], [1, 64], [67, 192], [130, 136], [4100, 64]]
                .into_iter()
                .filter(|[p, f]| affordable(p * f))
            {
                let z = match shape {
                    [256, 256] => Array2::from_shape_fn([p, halves * f], |(row, column)| {
                        bf16::from_bits((256 * row + column % 256) as u16)
                    }),
                    _ => gaussian([p, halves * f], 3),
                };
                let [dh, z] = [gaussian([p, f], 2), z].map(|x: Array2<bf16>| upload(device, &x));
                let [dz, alone] = [(); 2].map(|()| Poisoned::<bf16>::new(device, z.shape()));
                let what = format!("{activation:?}, {shape:?}");
                let run = |device: &mut Device, out| {
                    let operands = [dh, z, dz.matrix];
                    backward_compress(device, activation, operands, SITE, out).expect("queued")
                };
                let served = if halves == 2 { f % 64 == 0 } else { activation != Activation::Tanh };
                if !served {
                    let out = Compressed::alloc(device, "out", [f, p.next_multiple_of(4)]);
                    assert!(!run(device, out.expect("memory")), "{what}");
                    continue;
                }
                let found =
                    poisoned(device, z.shape(), |device, out| assert!(run(device, out), "{what}"));
                activation::backward(device, activation, dh, z, alone.matrix).expect("queued");
                let expected = compressed(device, alone.matrix, Estimator::Exact);
                let [dz, alone] = [dz, alone].map(|of| of.read(device));
                let differs = dz.iter().zip(&alone).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differs, None, "{what}: dz");
                assert_same(&found, &expected, &what);
            }
        }
    });
}

/// Uniforms in units of 2^-24: the extremes, and both sides of the values where draws from equal
/// magnitudes change (multiples of a quarter and of a third); each with a seed whose stream has it
/// in its first 2^14 calls.
const EDGES: [(u32, u64); 17] = [
    (0, 468),
    (1, 682),
    (0x3f_ffff, 37),
    (0x40_0000, 81),
    (0x40_0001, 88),
    (0x55_5555, 37),
    (0x55_5556, 269),
    (0x7f_ffff, 550),
    (0x80_0000, 66),
    (0x80_0001, 113),
    (0xaa_aaaa, 256),
    (0xaa_aaab, 208),
    (0xbf_ffff, 1331),
    (0xc0_0000, 229),
    (0xc0_0001, 70),
    (0xff_fffe, 53),
    (0xff_ffff, 699),
];
/// One call per row of dZ^T: four groups, 16 tokens.
const OF_EDGES: [usize; 2] = [16, 1 << 14];

#[test]
fn seeds_draw_their_edges() {
    for (edge, seed) in EDGES {
        let stream = stream(&state(seed));
        let [p, r] = OF_EDGES;
        assert!(
            (0..r).any(|row| stream.words(call(p, row, 0)).map(|word| word >> 8).contains(&edge)),
            "{edge:#x}"
        );
    }
}

/// All 3^4 groups of -1, 0 and 1, each with many uniforms, including the edges.
#[test]
fn every_ternary_group_at_the_edges() {
    on_gpu(|device| {
        let some = if affordable(usize::MAX) { 1 } else { 20 };
        for number in (0..81_usize).step_by(some) {
            let group = [1, 3, 9, 27].map(|unit| bf16::from_f32((number / unit % 3) as f32 - 1.0));
            let dz = Array2::from_shape_fn(OF_EDGES, |(token, _)| group[token % 4]);
            let on_device = upload(device, &dz);
            for (_, seed) in EDGES.into_iter().step_by(some) {
                for estimator in ESTIMATORS {
                    check(device, (dz.view(), on_device), estimator, seed);
                }
            }
            device.reset().expect("reset");
        }
    });
}

/// The ring of tiles wraps around; this also runs under the sanitizer.
#[test]
fn more_tiles_than_a_block_of_threads_holds_at_once() {
    on_gpu(|device| check_estimates(device, &gaussian([16_384, 1024], 11), 12));
}

#[test]
#[cfg_attr(debug_assertions, ignore = "needs optimization")]
fn a_thousand_million_groups() {
    a_thousand_million(Estimator::Exact);
}

#[test]
#[ignore = "as long again: `run.sh long`"]
fn a_thousand_million_groups_approximately() {
    a_thousand_million(Estimator::Approximate);
}

/// More than 10^9 groups of all kinds of numbers, with other uniforms each time.
fn a_thousand_million(estimator: Estimator) {
    on_gpu(|device| {
        let [p, r] = [16_384, 4096];
        if !affordable(p * r) {
            return;
        }
        let mut groups = 0;
        for number in 0..7 {
            let dz = hostile([p, r], number);
            let on_device = upload(device, &dz);
            for seed in 0..10 {
                check(device, (dz.view(), on_device), estimator, 100 * number + seed);
                groups += p / 4 * r;
            }
            device.reset().expect("reset");
        }
        assert!(groups >= 1_000_000_000, "{groups} groups");
    });
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let dz = device.alloc::<bf16>("dz", [64, 68]).expect("memory");
        let out = Compressed::alloc(device, "out", [64, 64]).expect("memory");
        let mut refuse = |dz, out| refused(mvue_compress(device, dz, Estimator::Exact, SITE, out));
        assert_eq!(refuse(dz, out), ("shape", "out"));
        assert_eq!(refuse(dz.columns(2..66), out), ("alignment", "dz"));
        assert_eq!(refuse(dz.columns(0..62), out), ("semantics", ""));
        let out = Compressed::alloc(device, "out", [64, 32]).expect("memory");
        let dz = out.values.reshaped([32, 64]);
        let aliased = mvue_compress(device, dz, Estimator::Exact, SITE, out);
        assert_eq!(refused(aliased), ("alias", "out"));
    });
}
