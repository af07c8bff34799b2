//! One panel of the figure: frame, round ticks, curves. Coordinates are SVG's, y downwards. There
//! is no interaction.

use std::fmt::Write;

/// Where the plots begin and end, from the left.
pub(super) const LEFT: f64 = 64.0;
const RIGHT: f64 = 822.0;

/// How a curve is drawn.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Ink {
    /// A thin pale line, for what is noisy.
    Faint,
    /// A line with a dot at each point, for what is sampled.
    Marked,
}

impl Ink {
    /// A line through `points`, with its dots at `dots` where it has any.
    pub(super) fn stroke(self, points: &[(f64, f64)], dots: &[(f64, f64)], colour: &str) -> String {
        let (width, opacity, dots) =
            if self == Self::Faint { (1.2, 0.7, &[][..]) } else { (1.8, 1.0, dots) };
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dots: String = dots
            .iter()
            .map(|(x, y)| format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="2.6" fill="{colour}"/>"#))
            .collect();
        format!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"/>{dots}"#,
            points.join(" ")
        )
    }
}

/// Where the value axis begins.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Floor {
    Zero,
    /// Below the smallest value.
    Data,
}

pub(super) struct Curve {
    /// (step, value), steps ascending.
    pub(super) points: Vec<(f64, f64)>,
    pub(super) colour: &'static str,
    pub(super) ink: Ink,
}

pub(super) struct Panel {
    pub(super) title: &'static str,
    /// The upper edge of the plot.
    pub(super) top: f64,
    pub(super) height: f64,
    pub(super) floor: Floor,
    /// The name of the step axis, where its ticks are labelled.
    pub(super) step_axis: Option<&'static str>,
}

impl Panel {
    /// The panel as SVG; `switches` are the last sparse steps.
    pub(super) fn draw(&self, curves: &[Curve], last_step: f64, switches: &[f64]) -> String {
        let values = || curves.iter().flat_map(|curve| &curve.points).map(|&(_, value)| value);
        let low =
            if self.floor == Floor::Zero { 0.0 } else { values().fold(f64::INFINITY, f64::min) };
        let high = values().fold(f64::NEG_INFINITY, f64::max);
        // An empty or flat panel still gets an axis.
        let (low, high) = if low < high {
            (low, high)
        } else if low.is_finite() {
            (low, low + 1.0)
        } else {
            (0.0, 1.0)
        };
        let step_size = round_step(high - low, 5);
        let (low, high) =
            ((low / step_size).floor() * step_size, (high / step_size).ceil() * step_size);

        let bottom = self.top + self.height;
        let x = |step: f64| LEFT + step / last_step * (RIGHT - LEFT);
        let y = |value: f64| bottom - (value - low) / (high - low) * self.height;

        let mut svg = String::new();
        let mut put = |element: std::fmt::Arguments<'_>| {
            writeln!(svg, "{element}").expect("a string takes any text")
        };
        put(format_args!(
            r#"<text x="{LEFT}" y="{}" font-weight="600">{}</text>"#,
            self.top - 12.0,
            self.title
        ));
        for (tick, label) in ticks(low, high, step_size) {
            let at = y(tick);
            put(format_args!(
                r##"<path d="M{LEFT} {at:.1}H{RIGHT}" stroke="#8b949e" stroke-opacity=".3"/>"##
            ));
            put(format_args!(
                r#"<text x="{}" y="{:.1}" text-anchor="end">{label}</text>"#,
                LEFT - 9.0,
                at + 4.5
            ));
        }
        for (tick, label) in ticks(0.0, last_step, round_step(last_step, 8)) {
            let at = x(tick);
            put(format_args!(r##"<path d="M{at:.1} {bottom}v5" stroke="#8b949e"/>"##));
            if self.step_axis.is_some() {
                put(format_args!(
                    r#"<text x="{at:.1}" y="{}" text-anchor="middle">{label}</text>"#,
                    bottom + 20.0
                ));
            }
        }
        if let Some(name) = self.step_axis {
            put(format_args!(
                r#"<text x="{}" y="{}" text-anchor="middle">{name}</text>"#,
                (LEFT + RIGHT) / 2.0,
                bottom + 42.0
            ));
        }
        for &switch in switches {
            let at = x(switch);
            put(format_args!(
                r##"<path d="M{at:.1} {}V{bottom}" stroke="#8b949e" stroke-dasharray="5 4"/>"##,
                self.top
            ));
            for (dx, anchor, phase) in [(-7.0, "end", "sparse"), (7.0, "start", "dense")] {
                let (x, y) = (at + dx, self.top - 12.0);
                put(format_args!(
                    r#"<text x="{x:.1}" y="{y}" text-anchor="{anchor}" font-style="italic">{phase}</text>"#
                ));
            }
        }
        for curve in curves {
            let points: Vec<(f64, f64)> =
                curve.points.iter().map(|&(step, value)| (x(step), y(value))).collect();
            put(format_args!("{}", curve.ink.stroke(&points, &points, curve.colour)));
        }
        svg
    }
}

/// The largest of 1, 2, 5 times a power of ten that cuts `span` into at most `parts` whole parts
/// and two broken ones.
fn round_step(span: f64, parts: usize) -> f64 {
    let rough = span / parts as f64;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|digit| digit * power)
        .into_iter()
        .find(|step| *step >= rough * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

/// The multiples of `step` in `low..=high`, each with its label.
fn ticks(low: f64, high: f64, step: f64) -> Vec<(f64, String)> {
    let decimals = (-(step * (1.0 + 1e-9)).log10().floor()).max(0.0) as usize;
    let (first, last) = ((low / step - 1e-6).ceil() as i64, (high / step + 1e-6).floor() as i64);
    (first..=last).map(|i| (i as f64 * step, format!("{:.decimals$}", i as f64 * step))).collect()
}

#[cfg(test)]
mod tests {
    use super::{Curve, Floor, Ink, Panel, round_step, ticks};

    #[test]
    fn ticks_are_round() {
        for (low, high, parts, labels) in [
            (0.0, 0.043, 5, vec!["0.00", "0.01", "0.02", "0.03", "0.04"]),
            (0.0, 300.0, 8, vec!["0", "50", "100", "150", "200", "250", "300"]),
            (1.4, 5.6, 5, vec!["2", "3", "4", "5"]),
            (2.5, 3.0, 5, vec!["2.5", "2.6", "2.7", "2.8", "2.9", "3.0"]),
            (0.0, 1.0, 8, vec!["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ] {
            let found: Vec<String> = ticks(low, high, round_step(high - low, parts))
                .into_iter()
                .map(|(_, label)| label)
                .collect();
            assert_eq!(found, labels);
        }
    }

    #[test]
    fn extremes_stay_inside_the_frame() {
        let panel =
            Panel { title: "t", top: 10.0, height: 100.0, floor: Floor::Data, step_axis: None };
        for points in
            [vec![], vec![(1.0, 3.0)], vec![(1.0, 1.5), (7.0, 9.75)], vec![(0.0, -2.0), (7.0, 0.0)]]
        {
            let curve = Curve { points, colour: "red", ink: Ink::Marked };
            let svg = panel.draw(&[curve], 7.0, &[]);
            let centres = svg
                .split("cy=\"")
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap());
            for y in centres {
                assert!((10.0..=110.0).contains(&y), "{y} in {svg}");
            }
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
