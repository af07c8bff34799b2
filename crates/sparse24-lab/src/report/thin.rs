//! Long curves as buckets: the mean of neighbours, and the envelope of their least and largest.
//!
//! Invariant: every point is in one bucket, in order; no spike is lost, since the envelope holds
//! it.

use std::ops::Range;

/// Neighbouring points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bucket {
    /// The first and the last x.
    pub(super) x: [f64; 2],
    /// The mean of the finite values; NaN if there is none.
    pub(super) mean: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Bucket {
    /// Of x and value.
    pub(super) fn of(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let (mut x, mut sum, mut count) = ([f64::NAN; 2], 0.0, 0.0);
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for (at, value) in points {
            x = [if x[0].is_nan() { at } else { x[0] }, at];
            if value.is_finite() {
                (sum, count) = (sum + value, count + 1.0);
                (low, high) = (low.min(value), high.max(value));
            }
        }
        let none = count == 0.0;
        Self {
            x,
            mean: sum / count,
            low: if none { f64::NAN } else { low },
            high: if none { f64::NAN } else { high },
        }
    }

    /// Its middle.
    pub(super) fn middle(&self) -> f64 {
        (self.x[0] + self.x[1]) / 2.0
    }
}

/// At most `most` ranges of about the same length that make up `0..length`.
pub(super) fn ranges(length: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = length.min(most);
    (0..count).map(move |at| at * length / count..(at + 1) * length / count)
}

#[cfg(test)]
mod tests {
    use super::{Bucket, ranges};

    #[test]
    fn every_point_is_in_one_bucket() {
        for (length, most) in [(0, 5), (3, 5), (5, 5), (7, 5), (1000, 3)] {
            let joined: Vec<usize> = ranges(length, most).flatten().collect();
            assert_eq!(joined, (0..length).collect::<Vec<_>>());
            assert!(
                ranges(length, most).all(|range| !range.is_empty())
                    && ranges(length, most).count() <= most
            );
        }
    }

    #[test]
    fn a_bucket_keeps_the_spike_and_passes_over_what_is_no_number() {
        let bucket = Bucket::of([(1.0, 2.0), (2.0, f64::NAN), (3.0, 10.0)]);
        assert_eq!(bucket, Bucket { x: [1.0, 3.0], mean: 6.0, low: 2.0, high: 10.0 });
        assert!(Bucket::of([(1.0, f64::NAN)]).mean.is_nan());
    }
}
