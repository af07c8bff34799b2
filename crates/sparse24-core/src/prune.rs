//! Magnitude pruning of groups, masked matrices, and the soft threshold of S-STE.

use ndarray::{Array2, ArrayView2, Zip};

use crate::{
    Element, Error,
    group::Pattern,
    mask::{Mask, check_shape},
};

/// The two largest magnitudes of a group; on ties the lower index is kept. A NaN counts as
/// infinite, so it is kept and noticed downstream.
#[must_use]
#[inline]
pub fn largest_two(group: [f32; 4]) -> Pattern {
    let m = group.map(|x| if x.is_nan() { f32::INFINITY } else { x.abs() });
    let largest_but = |skip: usize| {
        (0..4).filter(|&i| i != skip).reduce(|best, i| if m[i] > m[best] { i } else { best })
    };
    let first = largest_but(4).expect("a group has four elements");
    let second = largest_but(first).expect("three remain");
    Pattern::from_indices([first.min(second) as u8, first.max(second) as u8])
        .expect("two distinct elements, ascending")
}

/// How kept values are mapped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ValueMap {
    /// They are unchanged.
    Identity,
    /// S-STE: `copysign(max(|w| - t, 0), w) * scale`, where t is the second-smallest magnitude of
    /// the group.
    ///
    /// |w| - t is negative only if the mask does not keep the two largest. A NaN stays NaN.
    SoftThreshold {
        /// The tensor's constant factor, from [`soft_threshold_scale`] at the start of training.
        scale: f32,
    },
}

/// The group with pruned elements zero and kept ones mapped.
///
/// Source of the soft threshold: Hu et al., "S-STE: Continuous pruning function for efficient 2:4
/// sparse pre-training", NeurIPS 2024.
#[must_use]
#[inline]
pub fn group(x: [f32; 4], pattern: Pattern, map: ValueMap) -> [f32; 4] {
    let kept = |i: usize| pattern.bits() >> i & 1 == 1;
    match map {
        ValueMap::Identity => core::array::from_fn(|i| if kept(i) { x[i] } else { 0.0 }),
        ValueMap::SoftThreshold { scale } => {
            let mut a = x.map(f32::abs);
            a.sort_by(f32::total_cmp);
            let threshold = a[1];
            let excess = |x: f32| if x.abs() < threshold { 0.0 } else { x.abs() - threshold };
            core::array::from_fn(
                |i| if kept(i) { excess(x[i]).copysign(x[i]) * scale } else { 0.0 },
            )
        }
    }
}

/// The scale that minimizes the distance from w to the soft-thresholded matrix S(w), with groups
/// along rows: `<w, S(w)> / <S(w), S(w)>`.
///
/// Sums are in f64, row-major. The scale is 1 if S(w) is zero, and NaN if S(w) is not finite.
///
/// # Errors
/// [`Error::NotGrouped`] unless the number of columns is a multiple of 4.
pub fn soft_threshold_scale<T: Element>(w: ArrayView2<'_, T>) -> Result<f32, Error> {
    if !w.ncols().is_multiple_of(4) {
        return Err(Error::NotGrouped { operation: "soft threshold", length: w.ncols() });
    }
    let (mut cross, mut own) = (0.0_f64, 0.0_f64);
    for row in w.rows() {
        for at in (0..row.len()).step_by(4) {
            let x: [f32; 4] = core::array::from_fn(|i| row[at + i].to_f32());
            let pruned = group(x, largest_two(x), ValueMap::SoftThreshold { scale: 1.0 });
            for (x, s) in x.into_iter().zip(pruned) {
                cross += f64::from(x) * f64::from(s);
                own += f64::from(s) * f64::from(s);
            }
        }
    }
    Ok(if own == 0.0 { 1.0 } else { (cross / own) as f32 })
}

/// S(w): pruned elements are +0, kept ones are unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless the mask has the shape of `w`.
pub fn masked<T: Element>(w: ArrayView2<'_, T>, mask: &Mask) -> Result<Array2<T>, Error> {
    check_shape("prune", [w.nrows(), w.ncols()], mask.shape())?;
    let mut out = Array2::default(w.dim());
    Zip::indexed(&mut out).and(w).for_each(|(row, column), out, &w| {
        if mask.keeps(row, column) {
            *out = w;
        }
    });
    Ok(out)
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::{ValueMap, group, largest_two, soft_threshold_scale};
    use crate::group::Pattern;

    #[test]
    fn the_soft_threshold_subtracts_the_second_smallest() {
        let soft = ValueMap::SoftThreshold { scale: 2.0 };
        let x = [-5.0, 1.0, 2.0, 3.5];
        assert_eq!(group(x, largest_two(x), soft), [-6.0, 0.0, 0.0, 3.0]);
        assert_eq!(group(x, largest_two(x), ValueMap::Identity), [-5.0, 0.0, 0.0, 3.5]);
        // Another mask may keep elements below the threshold.
        assert_eq!(group(x, Pattern::ALL[0], soft), [-6.0, 0.0, 0.0, 0.0]);
        assert!(group([f32::NAN, 1.0, 2.0, 3.0], Pattern::ALL[0], soft)[0].is_nan());
    }

    #[test]
    fn the_scale_is_the_least_squares_solution() {
        // S = [-3, 0, 0, 1.5]: (15 + 5.25) / (9 + 2.25).
        assert_eq!(soft_threshold_scale(arr2(&[[-5.0_f32, 1.0, 2.0, 3.5]]).view()), Ok(1.8));
        assert_eq!(soft_threshold_scale(arr2(&[[1.0_f32; 4]]).view()), Ok(1.0));
    }
}
