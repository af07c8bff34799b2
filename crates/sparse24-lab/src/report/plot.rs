//! SVG plots: axes and vertical marks around line charts, point clouds and heat maps.
//!
//! Widths are shares of the available width and heights are pixels, so text and strokes keep their
//! size on a phone: the curves are in an inner picture that is stretched, with strokes that are
//! not. A curve is identified by its colour and by the shape of its markers.

use std::fmt::Write;

use super::{
    axis::{Axis, Scale},
    bucket::{Bucket, buckets},
    figure::data_run,
    text::{Text, number},
};

/// Number of colours, and of marker shapes.
const INKS: usize = 8;
/// Width of the inner picture.
const WIDTH: f64 = 1000.0;
/// Most markers on a line.
const MARKERS: usize = 14;
/// Shades of a heat map, besides the one for zero.
const SHADES: usize = 8;
/// Height of a row of a heat map.
const ROW: f64 = 18.0;

#[derive(Default)]
pub(super) struct Plot {
    /// Unique within the page.
    pub(super) id: String,
    pub(super) title: String,
    /// Alternative text.
    pub(super) description: String,
    /// CSS class.
    pub(super) kind: &'static str,
    /// Pixels.
    pub(super) height: f64,
    pub(super) x: Axis,
    pub(super) y_label: String,
    pub(super) y_scale: Scale,
    pub(super) y_low: f64,
    /// Horizontal lines: distance from the top and label.
    pub(super) levels: Vec<(f64, String)>,
    pub(super) marks: Vec<Mark>,
    /// The run that is drawn, if it is only one of those on the page.
    pub(super) run: Option<usize>,
    /// JSON of what the script draws again and shows under the pointer; empty if it does neither.
    pub(super) data: String,
    /// SVG that is stretched to the width.
    pub(super) inside: String,
    /// SVG on top that is not stretched.
    pub(super) above: String,
}

/// A vertical line.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) x: f64,
    /// Empty if another mark has the same label.
    pub(super) label: String,
    /// The run that it belongs to; none if it is common to all.
    pub(super) run: Option<usize>,
}

/// A line or points of one run. A value that is not finite makes a gap.
#[derive(Default)]
pub(super) struct Curve {
    pub(super) run: usize,
    pub(super) style: Style,
    pub(super) points: Vec<Bucket>,
    /// Whether the ranges of the points are drawn too.
    pub(super) has_band: bool,
    /// Quantity, and the same curve with all its detail, for the script; none if it has no point.
    pub(super) detail: (&'static str, Vec<Bucket>),
}

/// How a curve is drawn; its CSS class. Later ones cover earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Style {
    Faint,
    /// Points without a line.
    Dots,
    /// A line with markers.
    #[default]
    Strong,
}

impl Style {
    fn class(self) -> &'static str {
        ["faint", "dots", "strong"][self as usize]
    }
}

impl Curve {
    pub(super) fn new(run: usize, points: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let points = points.into_iter().map(|point| Bucket::of([point])).collect();
        Self { run, points, ..Self::default() }
    }

    /// Draws only part of the values, those of neighbours as a mean; the script has the rest.
    pub(super) fn of(self, name: &'static str, values: &[[f64; 2]], sharing: usize) -> Self {
        Self { detail: (name, buckets(values, detail(sharing))), ..self }
    }

    /// The curve as JSON: the run, the quantity, and a list for each part of the points.
    fn data(&self) -> String {
        let (name, points) = &self.detail;
        let list = |name: &str, value: &dyn Fn(&Bucket) -> String| {
            format!(",\"{name}\":[{}]", points.iter().map(value).collect::<Vec<_>>().join(","))
        };
        let mut data = format!("{{\"run\":{},\"of\":\"{name}\"", self.run);
        if points.iter().any(|point| point.x[0] != point.x[1]) {
            data += &list("last", &|point| point.x[1].to_string());
            data += &list("low", &|point| digits(point.low));
            data += &list("high", &|point| digits(point.high));
        }
        if points.iter().any(|point| 2.0 * point.at != point.x[0] + point.x[1]) {
            data += &list("at", &|point| format!("{:.7e}", point.at));
        }
        data += &list("step", &|point| point.x[0].to_string());
        data + &list("y", &|point| digits(point.mean)) + "}"
    }
}

/// A JSON number with the digits of the metrics, which are f32 or f64.
fn digits(value: f64) -> String {
    match value {
        value if !value.is_finite() => "null".into(),
        value if f64::from(value as f32) == value => format!("{:?}", value as f32),
        value => format!("{value:?}"),
    }
}

/// Most points of a curve that the script gets, if `runs` share a plot.
fn detail(runs: usize) -> usize {
    (3000 / runs.max(1)).clamp(200, 1500)
}

/// CSS classes for the colour and the dashes of a run.
pub(super) fn ink(run: usize) -> String {
    format!("s{} d{}", run % INKS, run / INKS % 3)
}

pub(super) fn marker(run: usize) -> String {
    format!("#m{}", (run + run / INKS) % INKS)
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Horizontal position in the inner picture.
pub(super) fn across(axis: &Axis, value: f64) -> f64 {
    tenths(WIDTH * axis.share(value))
}

/// Horizontal position in the outer picture.
fn percent(axis: &Axis, value: f64) -> String {
    format!("{:.2}%", 100.0 * axis.share(value))
}

impl Plot {
    pub(super) fn with_curves(mut self, y: Axis, curves: &[Curve]) -> Self {
        let point = |[x, value]: [f64; 2]| {
            format!("{} {}", across(&self.x, x), tenths(self.height * (1.0 - y.share(value))))
        };
        let trace = |points: &mut dyn Iterator<Item = [f64; 2]>| {
            format!("M{}", points.map(point).collect::<Vec<_>>().join("L"))
        };
        let pieces = |points: &[Bucket],
                      is_there: fn(&Bucket) -> bool,
                      draw: &dyn Fn(&[Bucket]) -> String| {
            let pieces = points.split(|point| !is_there(point)).filter(|piece| !piece.is_empty());
            pieces.map(draw).collect::<String>()
        };
        let band = |piece: &[Bucket]| {
            let above = piece.iter().map(|point| [point.at, point.high]);
            trace(&mut above.chain(piece.iter().rev().map(|point| [point.at, point.low]))) + "Z"
        };
        let line = |piece: &[Bucket]| trace(&mut piece.iter().map(Bucket::point));
        // A line of length zero has round ends that are not stretched.
        let dots = |piece: &[Bucket]| {
            piece.iter().map(|at| format!("M{}h0", point(at.point()))).collect::<String>()
        };
        // Later layers cover earlier ones.
        let mut layers = [const { String::new() }; 4];
        for (number, curve) in curves.iter().enumerate() {
            let ink = ink(curve.run);
            let mut add = |layer: usize, class: &str, d: String| {
                if !d.is_empty() {
                    let _ = writeln!(
                        layers[layer],
                        "<path class=\"{class} {ink}\" data-curve=\"{number}\" d=\"{d}\"/>"
                    );
                }
            };
            if curve.has_band {
                let is_there = |point: &Bucket| (point.at + point.low + point.high).is_finite();
                add(0, "band", pieces(&curve.points, is_there, &band));
            }
            let is_there = |point: &Bucket| (point.at + point.mean).is_finite();
            let draw: &dyn Fn(&[Bucket]) -> String =
                if curve.style == Style::Dots { &dots } else { &line };
            let d = pieces(&curve.points, is_there, draw);
            add(1 + curve.style as usize, curve.style.class(), d);
        }
        let inside = layers.concat();
        let height = |value: f64| tenths(self.height * (1.0 - y.share(value)));
        let mut above = String::new();
        let strong = |curve: &(_, &Curve)| curve.1.style == Style::Strong;
        let strong: Vec<_> = curves.iter().enumerate().filter(strong).collect();
        for (order, &(number, curve)) in strong.iter().enumerate() {
            let every = curve.points.len().div_ceil(MARKERS).max(1);
            // Staggered, so that curves that coincide show all their markers.
            let points = curve.points.iter().skip(order * every / strong.len()).step_by(every);
            for [x, value] in points.map(Bucket::point).filter(|[x, y]| (x + y).is_finite()) {
                let (symbol, ink) = (marker(curve.run), ink(curve.run));
                let (x, y) = (percent(&self.x, x), height(value));
                let _ = writeln!(
                    above,
                    "<use href=\"{symbol}\" class=\"{ink}\" data-curve=\"{number}\" x=\"{x}\" \
                     y=\"{y}\"/>"
                );
            }
        }
        if curves.iter().any(|curve| !curve.detail.1.is_empty()) {
            self.data =
                format!("[{}]", curves.iter().map(Curve::data).collect::<Vec<_>>().join(","));
        }
        self.levels = y.ticks(5).into_iter().map(|tick| (height(tick.value), tick.label)).collect();
        (self.y_label, self.y_scale, self.y_low) = (y.label, y.scale, y.low);
        (self.inside, self.above) = (inside, above);
        self
    }

    /// Draws rows of cells in shades by the logarithm of their value; `edges` are the ends of the
    /// columns, one more than columns. Zero has its own shade, and NaN none. Neighbours of one
    /// shade are one rectangle, and all of a shade one path, so a thousand cells take few
    /// kilobytes.
    pub(super) fn with_heat(
        mut self,
        names: &[String],
        edges: &[f64],
        cells: &[Vec<f64>],
        shades: Shades,
    ) -> Self {
        let mut paths = [const { String::new() }; SHADES + 1];
        for (row, cells) in cells.iter().enumerate() {
            let (top, mut first) = (ROW * row as f64 + 1.0, 0);
            for same in cells.chunk_by(|a, b| shades.shade(*a) == shades.shade(*b)) {
                let [from, to] = [first, first + same.len()].map(|at| across(&self.x, edges[at]));
                first += same.len();
                if let Some(shade) = shades.shade(same[0]) {
                    let _ = write!(paths[shade], "M{from} {top}H{to}v{}H{from}z", ROW - 2.0);
                }
            }
        }
        for (shade, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            let _ = writeln!(self.inside, "<path class=\"h{shade}\" d=\"{path}\"/>");
        }
        let level = |(row, name): (usize, &String)| (ROW * (row as f64 + 0.5), name.clone());
        self.levels = names.iter().enumerate().map(level).collect();
        Self { kind: "heat", height: ROW * cells.len() as f64, ..self }
    }

    pub(super) fn draw(&self) -> String {
        let Self { id, kind, height, x, inside, above, .. } = self;
        let name = |scale| if scale == Scale::Log { "log" } else { "linear" };
        let (scale, y_scale) = (name(x.scale), name(self.y_scale));
        let data = match self.data.as_str() {
            "" => String::new(),
            data => format!(" data-curves=\"{}\"", Text(data)),
        };
        let mut svg = format!(
            "<svg class=\"plot {kind}\" id=\"{id}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-desc\" width=\"100%\" height=\"{height}\" \
             data-low=\"{}\" data-high=\"{}\" data-scale=\"{scale}\" data-y-scale=\"{y_scale}\" \
             data-y-low=\"{}\"{data}>\n\
             <title id=\"{id}-title\">{}</title><desc id=\"{id}-desc\">{}</desc>\n",
            x.low,
            x.high,
            self.y_low,
            Text(&self.title),
            Text(&self.description)
        );
        self.draw_axes(&mut svg);
        let _ = writeln!(
            svg,
            "<svg width=\"100%\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
             preserveAspectRatio=\"none\">\n{inside}</svg>"
        );
        self.draw_marks(&mut svg);
        svg + above + "</svg>\n"
    }

    fn draw_axes(&self, svg: &mut String) {
        let Self { height, x, .. } = self;
        let line = |class: &str, x: [&str; 2], y: [f64; 2]| {
            format!(
                "<line class=\"{class}\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>",
                x[0], x[1], y[0], y[1]
            )
        };
        for (y, label) in &self.levels {
            *svg += &line("grid", ["0", "100%"], [*y; 2]);
            let label = Text(label);
            let _ =
                writeln!(svg, "<text class=\"y\" x=\"-8\" y=\"{y}\" dy=\"0.32em\">{label}</text>");
        }
        let label = Text(&self.y_label);
        let _ = writeln!(svg, "<text class=\"label\" x=\"-48\" y=\"-13\">{label}</text>");
        let ticks = x.ticks(7);
        for (at, tick) in ticks.iter().enumerate() {
            let share = percent(x, tick.value);
            // On a phone, every other label is hidden.
            let class = if at % 2 == 1 && ticks.len() > 4 { "x other" } else { "x" };
            *svg += &line("tick", [&share; 2], [*height, height + 5.0]);
            let (y, label) = (height + 19.0, Text(&tick.label));
            let _ = writeln!(svg, "<text class=\"{class}\" x=\"{share}\" y=\"{y}\">{label}</text>");
        }
        *svg += &line("axis", ["0", "100%"], [*height; 2]);
        let (y, label) = (height + 38.0, Text(&x.label));
        let _ = writeln!(svg, "<text class=\"label end\" x=\"100%\" y=\"{y}\">{label}</text>");
    }

    fn draw_marks(&self, svg: &mut String) {
        for Mark { x, label, run } in &self.marks {
            let (share, ink) = (percent(&self.x, *x), run.map(ink).unwrap_or_default());
            let data = format!("data-x=\"{x}\"{}", data_run(*run));
            let _ = writeln!(
                svg,
                "<line class=\"mark {ink}\" {data} x1=\"{share}\" x2=\"{share}\" y1=\"0\" y2=\"{}\"/>",
                self.height
            );
            let (class, dx) = if self.x.share(*x) > 0.55 { (" end", -6) } else { ("", 6) };
            if !label.is_empty() {
                let label = Text(label);
                let _ = writeln!(
                    svg,
                    "<text class=\"mark-label{class}\" {data} x=\"{share}\" dx=\"{dx}\" \
                     y=\"13\">{label}</text>"
                );
            }
        }
    }
}

/// The smallest and the largest value of a scale of shades, both positive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shades {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Shades {
    /// 0 for zero, then from 1; none for NaN.
    fn shade(self, value: f64) -> Option<usize> {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        match value {
            value if !value.is_finite() => None,
            value if value <= 0.0 => Some(0),
            _ => Some(1 + ((share * SHADES as f64).max(0.0) as usize).min(SHADES - 1)),
        }
    }

    /// A rectangle and the upper end of each shade.
    pub(super) fn legend(self) -> impl Iterator<Item = (String, String)> {
        let end = move |shade: usize| match shade {
            0 => 0.0,
            shade => self.low * (self.high / self.low).powf(shade as f64 / SHADES as f64),
        };
        (0..=SHADES).map(move |shade| {
            let rectangle = format!("<rect class=\"h{shade}\" width=\"26\" height=\"14\"/>");
            (rectangle, number(end(shade), 2))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{SHADES, Shades};

    #[test]
    fn shades_follow_the_logarithm() {
        let shades = Shades { low: 1e-4, high: 1e-2 };
        assert_eq!(
            [0.0, 1e-6, 1e-4, 1.1e-3, 1e-2, 1.0].map(|value| shades.shade(value)),
            [0, 1, 1, 5, SHADES, SHADES].map(Some)
        );
        assert_eq!(shades.shade(f64::NAN), None);
    }
}
