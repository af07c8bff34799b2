//! What all pictures share: axes, vertical marks, a title and a description, around what is drawn.
//!
//! Widths are shares of what room there is, heights are pixels, so that text and strokes keep their
//! size on a phone: what is drawn stands in an inner picture that is stretched, with strokes that
//! are not.

use std::fmt::Write;

use super::{
    axis::{Axis, Scale},
    markup::Text,
};

/// Kinds of ink, and of markers; a series takes the next one.
const INKS: usize = 8;

/// The width of the inner picture.
const WIDTH: f64 = 1000.0;

/// Axes with a title.
pub(super) struct Frame {
    /// Of the page alone.
    pub(super) id: String,
    pub(super) title: String,
    /// What is to be seen, for who does not see it.
    pub(super) description: String,
    /// Classes of the picture.
    pub(super) class: &'static str,
    /// In pixels.
    pub(super) height: f64,
    pub(super) x: Axis,
    /// What stands above the vertical axis.
    pub(super) y_label: String,
    /// Horizontal lines, from the top, with what stands beside each.
    pub(super) levels: Vec<(f64, String)>,
    pub(super) marks: Vec<Mark>,
    /// The column of the figure's tables that holds x.
    pub(super) column: usize,
}

/// A vertical line.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) x: f64,
    /// Empty for a line that another one explains.
    pub(super) label: String,
    /// The series that it belongs to, where it is not everyone's.
    pub(super) series: Option<usize>,
}

/// The classes of ink and dashes of a series.
pub(super) fn ink(number: usize) -> String {
    format!("s{} d{}", number % INKS, number / INKS % 3)
}

/// The symbol of a series.
pub(super) fn marker(number: usize) -> String {
    format!("#m{}", (number + number / INKS) % INKS)
}

/// Where a value stands in the inner picture.
pub(super) fn across(axis: &Axis, value: f64) -> f64 {
    tenths(WIDTH * axis.share(value))
}

/// The same from the top, in pixels.
pub(super) fn down(axis: &Axis, height: f64, value: f64) -> f64 {
    tenths(height * (1.0 - axis.share(value)))
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

impl Frame {
    /// The SVG element, with what is stretched inside and what is not above it.
    pub(super) fn draw(&self, inside: &str, above: &str) -> String {
        let Self { id, title, description, class, height, x, column, .. } = self;
        let scale = if x.scale == Scale::Log { "log" } else { "linear" };
        let (title, description) = (Text(title), Text(description));
        let mut svg = format!(
            "<svg class=\"plot {class}\" id=\"{id}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" width=\"100%\" height=\"{height}\" \
             data-low=\"{}\" data-high=\"{}\" data-scale=\"{scale}\" data-column=\"{column}\">\n\
             <title id=\"{id}-title\">{title}</title><desc id=\"{id}-desc\">{description}</desc>\n",
            x.low, x.high
        );
        self.draw_levels(&mut svg);
        self.draw_x(&mut svg);
        let view = format!(
            "width=\"100%\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" preserveAspectRatio=\"none\""
        );
        let _ = writeln!(svg, "<svg {view}>\n{inside}</svg>");
        self.draw_marks(&mut svg);
        svg + above + "</svg>\n"
    }

    fn draw_levels(&self, svg: &mut String) {
        for (y, label) in &self.levels {
            let line = format!("<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\"/>");
            let _ = writeln!(
                svg,
                "{line}<text class=\"y\" x=\"-8\" y=\"{y}\" dy=\"0.32em\">{}</text>",
                Text(label)
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"label\" x=\"-48\" y=\"-13\">{}</text>",
            Text(&self.y_label)
        );
    }

    fn draw_x(&self, svg: &mut String) {
        let Self { height, x, .. } = self;
        let ticks = x.ticks(7);
        for (number, tick) in ticks.iter().enumerate() {
            let share = percent(x, tick.value);
            // A phone has room for every other one.
            let class = if number % 2 == 1 && ticks.len() > 4 { "x other" } else { "x" };
            let line = format!(
                "<line class=\"tick\" x1=\"{share}\" x2=\"{share}\" y1=\"{height}\" y2=\"{}\"/>",
                height + 5.0
            );
            let _ = writeln!(
                svg,
                "{line}<text class=\"{class}\" x=\"{share}\" y=\"{}\">{}</text>",
                height + 19.0,
                Text(&tick.label)
            );
        }
        let line =
            format!("<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"{height}\" y2=\"{height}\"/>");
        let _ = writeln!(
            svg,
            "{line}<text class=\"label end\" x=\"100%\" y=\"{}\">{}</text>",
            height + 38.0,
            Text(&x.label)
        );
    }

    fn draw_marks(&self, svg: &mut String) {
        for Mark { x, label, series } in &self.marks {
            let (share, ink) = (percent(&self.x, *x), series.map(ink).unwrap_or_default());
            let _ = writeln!(
                svg,
                "<line class=\"mark {ink}\" x1=\"{share}\" x2=\"{share}\" y1=\"0\" y2=\"{}\"/>",
                self.height
            );
            if !label.is_empty() {
                let (class, dx) = if self.x.share(*x) > 0.55 {
                    ("mark-label end", -6)
                } else {
                    ("mark-label", 6)
                };
                let _ = writeln!(
                    svg,
                    "<text class=\"{class}\" x=\"{share}\" dx=\"{dx}\" y=\"13\">{}</text>",
                    Text(label)
                );
            }
        }
    }
}

/// Where a value stands across the outer picture.
pub(super) fn percent(axis: &Axis, value: f64) -> String {
    format!("{:.2}%", 100.0 * axis.share(value))
}
