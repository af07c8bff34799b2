//! Axes: the position of a value, and ticks at round numbers.
//!
//! Invariant: `low < high`, both finite, and both positive on a logarithmic axis. Values outside
//! are drawn at the nearer end.

use super::text::{minus, number};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Scale {
    #[default]
    Linear,
    Log,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Axis {
    /// Quantity and unit.
    pub(super) label: String,
    pub(super) scale: Scale,
    pub(super) low: f64,
    pub(super) high: f64,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: String,
}

/// Ratio of the largest to the smallest value from which a logarithmic axis is chosen.
const WIDE: f64 = 40.0;

impl Axis {
    fn linear(label: impl Into<String>, low: f64, high: f64) -> Self {
        Self { label: label.into(), scale: Scale::Linear, low, high }
    }

    /// From 0 to the largest value.
    pub(super) fn from_zero(
        label: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) -> Self {
        let high = range(values).map_or(1.0, |(_, high)| high);
        Self::linear(label, 0.0, if high > 0.0 { high } else { 1.0 })
    }

    /// Between round numbers that enclose the values.
    pub(super) fn around(label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = range(values).unwrap_or((0.0, 1.0));
        let margin = if low == high { low.abs().max(1.0) * 0.05 } else { 0.0 };
        let (low, high) = (low - margin, high + margin);
        let step = step(high - low, 5);
        Self::linear(label, (low / step).floor() * step, (high / step).ceil() * step)
    }

    /// For values of at least 0: logarithmic if the positive ones span a wide range, else from 0.
    pub(super) fn magnitudes(
        label: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) -> Self {
        let values: Vec<f64> =
            values.into_iter().filter(|value| value.is_finite() && *value >= 0.0).collect();
        let positive = values.iter().copied().filter(|value| *value > 0.0);
        let zeros = values.len() - positive.clone().count();
        let Some((low, high)) = range(positive) else { return Self::linear(label, 0.0, 1.0) };
        if high / low > WIDE && 20 * zeros <= values.len() {
            return Self::log(label, low, high);
        }
        let step = step(high, 5);
        Self::linear(label, 0.0, (high / step).ceil() * step)
    }

    /// Logarithmic, from and to the next 1, 2 or 5 times a power of ten.
    pub(super) fn log(label: impl Into<String>, low: f64, high: f64) -> Self {
        // Beyond, powers of ten are zero or infinite.
        let [low, high] = [low, high].map(|value| value.clamp(1e-300, 1e300));
        let steps = |value: f64| {
            let decade = 10_f64.powf(value.log10().floor());
            [1.0, 2.0, 5.0, 10.0].map(|digit| digit * decade)
        };
        let below = steps(low).into_iter().rev().find(|step| *step <= low * 1.0001).unwrap_or(low);
        let above = steps(high).into_iter().find(|step| *step >= high * 0.9999).unwrap_or(high);
        let above = if above > below { above } else { below * 10.0 };
        Self { label: label.into(), scale: Scale::Log, low: below, high: above }
    }

    /// Position of a value, in [0, 1].
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
        let in_thousands = step >= 1000.0 && self.high >= 10_000.0;
        let tick = |at: i64| {
            let value = at as f64 * step;
            let label = match at {
                0 => "0".into(),
                _ if in_thousands => number(value / 1000.0, 9) + "k",
                _ if decimals > 4 => number(value, 3),
                _ => minus(&format!("{value:.decimals$}")),
            };
            Tick { value, label }
        };
        let (first, last) = ((self.low / step - 1e-9).ceil(), (self.high / step + 1e-9).floor());
        (first as i64..=last as i64).map(tick).collect()
    }

    fn log_ticks(&self, most: usize) -> Vec<Tick> {
        let decades = (self.high / self.low).log10();
        let digits: &[f64] = if decades * 3.0 <= most as f64 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = (decades / most as f64).ceil().max(1.0) as i32;
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        (first..=last)
            .filter(|exponent| exponent.rem_euclid(every) == 0)
            .flat_map(|exponent| {
                // Parsing the decimal form gives the f64 nearest to the power of ten.
                let parse =
                    move |digit: &f64| format!("{digit}e{exponent}").parse().expect("a number");
                digits.iter().map(parse)
            })
            .filter(|value: &f64| (self.low * 0.9999..=self.high * 1.0001).contains(value))
            .map(|value| Tick { value, label: number(value, 3) })
            .collect()
    }
}

pub(super) fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    values
        .into_iter()
        .filter(|value| value.is_finite())
        .map(|value| (value, value))
        .reduce(|(low, high), (value, _)| (low.min(value), high.max(value)))
}

/// 1, 2 or 5 times a power of ten, such that about `most` of them make up `length`.
fn step(length: f64, most: usize) -> f64 {
    let least = length / most as f64;
    let decade = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|digit| digit * decade);
    steps.into_iter().find(|step| *step >= least * 0.9999).unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::{Axis, Scale};

    #[test]
    fn ticks_are_round_numbers() {
        for (axis, most, expected) in [
            (Axis::from_zero("", [1500.0]), 6, "0 500 1000 1500"),
            (Axis::from_zero("", [300_000.0]), 6, "0 50k 100k 150k 200k 250k 300k"),
            (Axis::around("", [1.52, 4.39]), 5, "1 2 3 4 5"),
            (Axis::around("", [-0.1, 0.1]), 4, "−0.10 −0.05 0 0.05 0.10"),
            (Axis::magnitudes("", [3e-4, 0.02]), 7, "0.0002 0.0005 0.001 0.002 0.005 0.01 0.02"),
        ] {
            let labels: Vec<_> = axis.ticks(most).into_iter().map(|tick| tick.label).collect();
            assert_eq!(labels.join(" "), expected);
        }
    }

    #[test]
    fn a_wide_range_of_values_gets_a_logarithmic_axis() {
        let axis = Axis::magnitudes("", [3e-4, 0.02]);
        assert_eq!((axis.scale, axis.low, axis.high), (Scale::Log, 2e-4, 0.02));
        assert!((axis.share(2e-3) - 0.5).abs() < 1e-12);
        assert_eq!(Axis::magnitudes("", [0.01, 0.02]).scale, Scale::Linear);
    }

    #[test]
    fn an_axis_exists_for_no_value_and_for_one() {
        for axis in [
            Axis::around("", []),
            Axis::around("", [2.5]),
            Axis::magnitudes("", []),
            Axis::magnitudes("", [0.0]),
            Axis::magnitudes("", [f64::NAN]),
            Axis::from_zero("", [f64::NAN]),
            Axis::log("", 5e-324, 1e308),
            Axis::log("", f64::MAX, f64::MAX),
        ] {
            let is_finite = axis.low.is_finite() && axis.high.is_finite();
            let ticks = axis.ticks(5).len();
            assert!(axis.low < axis.high && is_finite && (1..20).contains(&ticks), "{axis:?}");
        }
    }
}
