//! Inputs of the properties: any bits, hostile values, ties, moderate values; and case counts.

use proptest::prelude::*;
use sparse24_tests::oracle;

/// This many cases; failures are printed, not saved.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Any f32 at all.
pub(crate) fn any_bits() -> impl Strategy<Value = f32> + Clone {
    any::<u32>().prop_map(f32::from_bits)
}

/// Zeros, subnormals, huge values, infinities and NaN.
pub(crate) fn hostile() -> impl Strategy<Value = f32> + Clone {
    let tiny = f32::from_bits(1);
    let values = [0.0, tiny, 2.0 * tiny, 3.0 * tiny, f32::MIN_POSITIVE, 1e-30];
    let ordinary = [1.0, 1.0 + f32::EPSILON, 3.0, 1e30];
    let huge = [123, 124, 125].map(|power| 2.0_f32.powi(power));
    let largest = [f32::MAX / 2.0, f32::MAX, f32::INFINITY, f32::NAN];
    let values = values.into_iter().chain(ordinary).chain(huge).chain(largest);
    prop::sample::select(values.flat_map(|x| [x, -x]).collect::<Vec<f32>>())
}

/// Small integers, so that most comparisons tie.
pub(crate) fn tied() -> impl Strategy<Value = f32> + Clone {
    (-2_i8..=2).prop_map(f32::from)
}

/// Magnitudes within 2^-20 and 2^20, and zero.
pub(crate) fn moderate() -> impl Strategy<Value = f32> + Clone {
    let scaled = (-1.0_f32..1.0, -20..20).prop_map(|(x, e)| x * 2.0_f32.powi(e));
    prop_oneof![1 => Just(0.0_f32), 8 => -1.0_f32..1.0, 4 => scaled]
}

/// Small subnormal values, where even halving rounds.
pub(crate) fn subnormal() -> impl Strategy<Value = f32> + Clone {
    (0_u32..40, any::<bool>())
        .prop_map(|(n, negative)| if negative { -f32::from_bits(n) } else { f32::from_bits(n) })
}

/// Index of a uniform, with frequent extremes.
pub(crate) fn uniform() -> impl Strategy<Value = u32> {
    let all = oracle::UNIFORMS;
    prop_oneof![2 => 0..all, 1 => 0_u32..4, 1 => all - 4..all]
}

/// A tile of one kind of values or of all kinds mixed.
pub(crate) fn tile() -> impl Strategy<Value = [f32; 16]> {
    use prop::array::uniform16;
    let mixed = prop_oneof![any_bits(), hostile(), tied(), moderate()];
    prop_oneof![
        uniform16(any_bits()),
        uniform16(hostile()),
        uniform16(tied()),
        uniform16(moderate()),
        uniform16(mixed)
    ]
}

/// A group of any kind.
pub(crate) fn group() -> impl Strategy<Value = [f32; 4]> {
    use prop::array::uniform4;
    let mixed = prop_oneof![any_bits(), hostile(), tied(), moderate()];
    let kinds = prop_oneof![
        uniform4(any_bits()),
        uniform4(hostile()),
        uniform4(tied()),
        uniform4(moderate()),
        uniform4(subnormal()),
        uniform4(mixed)
    ];
    // Padded groups end in zeros.
    (kinds, 1_usize..=8).prop_map(|(mut group, length)| {
        group.iter_mut().skip(length).for_each(|x| *x = 0.0);
        group
    })
}
