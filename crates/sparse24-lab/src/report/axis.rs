//! Axes: where a value stands on one, and ticks at round numbers.
//!
//! Invariant: `low < high`, both finite, and positive on a logarithmic axis; what lies outside
//! stands at the nearer end.

use super::markup::{number, signed};

/// How values are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Log,
}

/// An axis with its range.
#[derive(Debug, Clone)]
pub(super) struct Axis {
    /// What it measures, with its unit.
    pub(super) label: String,
    pub(super) scale: Scale,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// A labelled place on an axis.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: String,
}

/// Beyond this ratio of the largest to the least, a logarithmic axis shows more.
const WIDE: f64 = 40.0;

impl Axis {
    /// From 0 to the largest value.
    pub(super) fn from_zero(
        label: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) -> Self {
        let high = values.into_iter().filter(|value| value.is_finite()).fold(0.0, f64::max);
        Self {
            label: label.into(),
            scale: Scale::Linear,
            low: 0.0,
            high: if high > 0.0 { high } else { 1.0 },
        }
    }

    /// Around the values, to round numbers beyond them.
    pub(super) fn around(label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = range(values).unwrap_or((0.0, 1.0));
        let room = if low == high { low.abs().max(1.0) * 0.05 } else { 0.0 };
        let (low, high) = (low - room, high + room);
        let step = step(high - low, 5);
        Self {
            label: label.into(),
            scale: Scale::Linear,
            low: (low / step).floor() * step,
            high: (high / step).ceil() * step,
        }
    }

    /// From 0 to beyond the values; logarithmic around the positive ones where they are wide.
    pub(super) fn of_magnitudes(
        label: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) -> Self {
        let values: Vec<f64> =
            values.into_iter().filter(|value| value.is_finite() && *value >= 0.0).collect();
        let (low, high) =
            range(values.iter().copied().filter(|value| *value > 0.0)).unwrap_or((0.0, 1.0));
        let label = label.into();
        let zeros = values.iter().filter(|value| **value == 0.0).count();
        if high / low > WIDE && 20 * zeros <= values.len() {
            return Self::log(label, low, high);
        }
        let step = step(high, 5);
        Self { label, scale: Scale::Linear, low: 0.0, high: (high / step).ceil() * step }
    }

    /// Logarithmic, to the next 1, 2 or 5 beyond the ends.
    pub(super) fn log(label: impl Into<String>, low: f64, high: f64) -> Self {
        let steps = |value: f64| {
            let decade = 10_f64.powf(value.log10().floor());
            [1.0, 2.0, 5.0, 10.0].map(|digit| digit * decade)
        };
        let below = steps(low).into_iter().rev().find(|step| *step <= low * 1.0001).unwrap_or(low);
        let above = steps(high).into_iter().find(|step| *step >= high * 0.9999).unwrap_or(high);
        let above = if above > below { above } else { below * 10.0 };
        Self { label: label.into(), scale: Scale::Log, low: below, high: above }
    }

    /// Where a value stands, in [0, 1].
    pub(super) fn share(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }

    /// About `most` round numbers.
    pub(super) fn ticks(&self, most: usize) -> Vec<Tick> {
        match self.scale {
            Scale::Linear => self.linear_ticks(most),
            Scale::Log => self.log_ticks(most),
        }
    }

    fn linear_ticks(&self, most: usize) -> Vec<Tick> {
        let step = step(self.high - self.low, most);
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let (first, last) =
            ((self.low / step - 1e-9).ceil() as i64, (self.high / step + 1e-9).floor() as i64);
        let in_thousands = step >= 1000.0 && self.high >= 10_000.0;
        let label = |value: f64| match value {
            0.0 => "0".into(),
            value if in_thousands => number(value / 1000.0, 9) + "k",
            value if decimals > 4 => number(value, 3),
            value => signed(&format!("{value:.decimals$}")),
        };
        let value = |at: i64| at as f64 * step;
        (first..=last)
            .map(|at| Tick {
                value: value(at),
                label: label(if at == 0 { 0.0 } else { value(at) }),
            })
            .collect()
    }

    fn log_ticks(&self, most: usize) -> Vec<Tick> {
        let decades = (self.high / self.low).log10();
        let digits: &[f64] = if decades * 3.0 <= most as f64 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = (decades / most as f64).ceil().max(1.0) as i32;
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let values = (first..=last).filter(|exponent| exponent.rem_euclid(every) == 0).flat_map(
            |exponent| {
                // By its decimal form, a power of ten is the nearest number to it.
                let value =
                    move |digit: &f64| format!("{digit}e{exponent}").parse().expect("a number");
                digits.iter().map(value)
            },
        );
        let within =
            values.filter(|value: &f64| (self.low * 0.9999..=self.high * 1.0001).contains(value));
        within.map(|value| Tick { value, label: number(value, 3) }).collect()
    }
}

/// The least and the largest of the finite values.
pub(super) fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    values.into_iter().filter(|value| value.is_finite()).fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

/// 1, 2 or 5 times a power of ten, so that about `most` of them make `length`.
fn step(length: f64, most: usize) -> f64 {
    let least = length / most as f64;
    let decade = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|digit| digit * decade)
        .find(|step| *step >= least * 0.9999)
        .unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::{Axis, Scale};

    fn labels(axis: &Axis, most: usize) -> Vec<String> {
        axis.ticks(most).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&Axis::from_zero("step", [1500.0]), 6), ["0", "500", "1000", "1500"]);
        assert_eq!(
            labels(&Axis::from_zero("step", [300_000.0]), 6),
            ["0", "50k", "100k", "150k", "200k", "250k", "300k"]
        );
        let loss = Axis::around("loss", [1.52, 4.39]);
        assert_eq!(
            (loss.low, loss.high, labels(&loss, 5)),
            (1.0, 5.0, vec!["1".into(), "2".into(), "3".into(), "4".into(), "5".into()])
        );
        assert_eq!(
            labels(&Axis::around("loss", [-0.1, 0.1]), 4),
            ["−0.10", "−0.05", "0.00", "0.05", "0.10"].map(|l| if l == "0.00" { "0" } else { l })
        );
    }

    #[test]
    fn wide_values_stand_on_a_logarithmic_axis() {
        let axis = Axis::of_magnitudes("flip rate", [3e-4, 0.02]);
        assert_eq!((axis.scale, axis.low, axis.high), (Scale::Log, 2e-4, 0.02));
        assert_eq!(
            labels(&axis, 7),
            ["0.0002", "0.0005", "0.001", "0.002", "0.005", "0.01", "0.02"]
        );
        assert_eq!(Axis::of_magnitudes("flip rate", [0.01, 0.02]).scale, Scale::Linear);
        assert!((axis.share(2e-3) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn nothing_or_one_value_has_an_axis() {
        for axis in [
            Axis::around("", []),
            Axis::around("", [2.5]),
            Axis::of_magnitudes("", []),
            Axis::of_magnitudes("", [0.0]),
            Axis::from_zero("", [f64::NAN]),
        ] {
            assert!(
                axis.low < axis.high && axis.low.is_finite() && axis.high.is_finite(),
                "{axis:?}"
            );
            assert!(!axis.ticks(5).is_empty(), "{axis:?}");
        }
    }
}
