//! Long curves as buckets of neighbouring points, each with its mean and its range, so that no
//! spike is lost.

use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bucket {
    /// First and last x.
    pub(super) x: [f64; 2],
    /// Where it is drawn: the middle, unless moved.
    pub(super) at: f64,
    /// Mean of the finite values; NaN if there is none, as `low` and `high`.
    pub(super) mean: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Bucket {
    /// Collects points `[x, value]`.
    pub(super) fn of(points: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let (mut x, mut sum, mut count) = ([f64::NAN; 2], 0.0, 0.0);
        // `f64::min` and `max` ignore NaN.
        let (mut low, mut high) = (f64::NAN, f64::NAN);
        for [at, value] in points {
            x = [if x[0].is_nan() { at } else { x[0] }, at];
            if value.is_finite() {
                (sum, count) = (sum + value, count + 1.0);
                (low, high) = (low.min(value), high.max(value));
            }
        }
        Self { x, at: (x[0] + x[1]) / 2.0, mean: sum / count, low, high }
    }

    /// Where it is drawn, and the mean.
    pub(super) fn point(&self) -> [f64; 2] {
        [self.at, self.mean]
    }

    /// The first and the last x, as text.
    pub(super) fn span(&self) -> String {
        let [first, last] = self.x;
        if first == last { format!("{first}") } else { format!("{first}–{last}") }
    }
}

/// At most `most` ranges of about the same length that make up `0..length`.
pub(super) fn ranges(length: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let count = length.min(most);
    (0..count).map(move |at| at * length / count..(at + 1) * length / count)
}

pub(super) fn buckets(points: &[[f64; 2]], most: usize) -> Vec<Bucket> {
    ranges(points.len(), most).map(|part| Bucket::of(points[part].iter().copied())).collect()
}

#[cfg(test)]
mod tests {
    use super::{Bucket, ranges};

    #[test]
    fn every_point_is_in_one_bucket() {
        for (length, most) in [(0, 5), (3, 5), (5, 5), (7, 5), (1000, 3)] {
            let parts = ranges(length, most);
            assert!(parts.clone().flatten().eq(0..length));
            assert!(parts.clone().all(|part| !part.is_empty()) && parts.count() <= most);
        }
    }

    #[test]
    fn a_bucket_keeps_spikes_and_ignores_nan() {
        let bucket = Bucket::of([[1.0, 2.0], [2.0, f64::NAN], [3.0, 10.0]]);
        assert_eq!(bucket, Bucket { x: [1.0, 3.0], at: 2.0, mean: 6.0, low: 2.0, high: 10.0 });
        assert!(Bucket::of([[1.0, f64::NAN]]).mean.is_nan());
    }
}
