//! Line charts and clouds of points. A series is told by its colour and by the shape of its
//! markers.

use std::fmt::Write;

use super::{
    axis::Axis,
    frame::{Frame, Mark, across, down, ink, marker, percent},
};

/// A chart over a common x.
pub(super) struct Chart {
    pub(super) id: String,
    pub(super) title: String,
    pub(super) description: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    /// In pixels.
    pub(super) height: f64,
    pub(super) series: Vec<Series>,
    pub(super) marks: Vec<Mark>,
    /// The column of the figure's tables that holds x.
    pub(super) column: usize,
}

/// What one run draws. What is not finite is a gap.
#[derive(Default)]
pub(super) struct Series {
    /// Its number among the runs.
    pub(super) number: usize,
    /// x, low and high.
    pub(super) band: Vec<[f64; 3]>,
    /// A thin line.
    pub(super) faint: Vec<[f64; 2]>,
    /// A line with markers.
    pub(super) strong: Vec<[f64; 2]>,
    /// Points alone.
    pub(super) dots: Vec<[f64; 2]>,
}

/// Draws a part of a series, as the data of a path.
type Draw = fn(&Chart, &Series) -> String;

/// At most so many markers on a line.
const MARKERS: usize = 14;

impl Chart {
    /// The SVG element.
    pub(super) fn draw(self) -> String {
        let (mut inside, mut above) = (String::new(), String::new());
        // Whatever is drawn last stands above: lines above bands.
        let layers: [(&str, Draw); 4] = [
            ("band", |chart, series| chart.band(&series.band)),
            ("faint", |chart, series| chart.line(&series.faint)),
            ("dots", |chart, series| chart.dots(&series.dots)),
            ("strong", |chart, series| chart.line(&series.strong)),
        ];
        for (class, data) in layers {
            for series in &self.series {
                let data = data(&self, series);
                if !data.is_empty() {
                    let _ = writeln!(
                        inside,
                        "<path class=\"{class} {}\" d=\"{data}\"/>",
                        ink(series.number)
                    );
                }
            }
        }
        for (order, series) in self.series.iter().enumerate() {
            self.draw_markers(&mut above, order, series);
        }
        let levels =
            self.y.ticks(5).into_iter().map(|tick| (self.y(tick.value), tick.label)).collect();
        let Self { id, title, description, x, y, height, marks, column, .. } = self;
        Frame {
            id,
            title,
            description,
            class: "",
            height,
            x,
            y_label: y.label,
            levels,
            marks,
            column,
        }
        .draw(&inside, &above)
    }

    fn draw_markers(&self, svg: &mut String, order: usize, series: &Series) {
        let points = &series.strong;
        let every = points.len().div_ceil(MARKERS).max(1);
        // Staggered, so that curves that run together show all their markers.
        let first = order * every / self.series.len().max(1);
        for &[x, y] in points.iter().skip(first).step_by(every).filter(|[x, y]| (x + y).is_finite())
        {
            let (symbol, ink) = (marker(series.number), ink(series.number));
            let _ = writeln!(
                svg,
                "<use href=\"{symbol}\" class=\"{ink}\" x=\"{}\" y=\"{}\"/>",
                percent(&self.x, x),
                self.y(y)
            );
        }
    }

    fn x(&self, value: f64) -> f64 {
        across(&self.x, value)
    }

    fn y(&self, value: f64) -> f64 {
        down(&self.y, self.height, value)
    }

    fn line(&self, points: &[[f64; 2]]) -> String {
        let mut data = String::new();
        for piece in points.split(|[x, y]| !(x + y).is_finite()) {
            self.trace(&mut data, piece.iter().copied());
        }
        data
    }

    fn band(&self, points: &[[f64; 3]]) -> String {
        let mut data = String::new();
        for piece in points
            .split(|[x, low, high]| !(x + low + high).is_finite())
            .filter(|piece| !piece.is_empty())
        {
            let there = piece.iter().map(|&[x, _, high]| [x, high]);
            self.trace(&mut data, there.chain(piece.iter().rev().map(|&[x, low, _]| [x, low])));
            data.push('Z');
        }
        data
    }

    fn dots(&self, points: &[[f64; 2]]) -> String {
        points.iter().fold(String::new(), |mut data, &[x, y]| {
            // A line of no length has round ends, however the picture is stretched.
            let _ = write!(data, "M{} {}h0", self.x(x), self.y(y));
            data
        })
    }

    fn trace(&self, data: &mut String, points: impl Iterator<Item = [f64; 2]>) {
        for (at, [x, y]) in points.enumerate() {
            let _ = write!(data, "{}{} {}", if at == 0 { 'M' } else { 'L' }, self.x(x), self.y(y));
        }
    }
}
