//! A heat map: rows of cells in shades by the logarithm of their value.
//!
//! Zero has a shade of its own, and what is missing none. Neighbours of one shade are one
//! rectangle, and those of a shade one path, so that a thousand cells are a few kilobytes.

use std::fmt::Write;

use super::{
    axis::Axis,
    frame::{Frame, Mark, across},
    markup::number,
};

/// Cells over a common x.
pub(super) struct Heat {
    pub(super) id: String,
    pub(super) title: String,
    pub(super) description: String,
    pub(super) x: Axis,
    /// Names of the rows, from the top.
    pub(super) rows: Vec<String>,
    /// Where each column begins, and after the last one where it ends.
    pub(super) edges: Vec<f64>,
    /// By row.
    pub(super) cells: Vec<Vec<f64>>,
    pub(super) shades: Shades,
    pub(super) marks: Vec<Mark>,
}

/// The least and the largest value of a scale of shades, both positive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shades {
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Shades above zero's.
const SHADES: usize = 8;
const ROW: f64 = 18.0;

impl Shades {
    /// The shade of a value: 0 for zero, then from 1.
    fn of(self, value: f64) -> Option<usize> {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        match value {
            value if !value.is_finite() => None,
            value if value <= 0.0 => Some(0),
            _ => Some(1 + ((share * SHADES as f64).max(0.0) as usize).min(SHADES - 1)),
        }
    }

    /// A list that explains them.
    pub(super) fn legend(self) -> String {
        let end =
            |shade: usize| self.low * (self.high / self.low).powf(shade as f64 / SHADES as f64);
        let entry =
            |shade: usize| format!("<li><i class=\"b{shade}\"></i>{}</li>", number(end(shade), 2));
        let entries: String = (1..=SHADES).map(entry).collect();
        format!("<ol class=\"shades\"><li><i class=\"b0\"></i>0</li>{entries}</ol>\n")
    }
}

impl Heat {
    /// The SVG element.
    pub(super) fn draw(self) -> String {
        let height = ROW * self.rows.len() as f64;
        let mut paths = vec![String::new(); SHADES + 1];
        for (row, cells) in self.cells.iter().enumerate() {
            let top = ROW * row as f64 + 1.0;
            let mut first = 0;
            for same in cells.chunk_by(|a, b| self.shades.of(*a) == self.shades.of(*b)) {
                let [from, to] =
                    [first, first + same.len()].map(|edge| across(&self.x, self.edges[edge]));
                first += same.len();
                if let Some(shade) = self.shades.of(same[0]) {
                    let _ = write!(paths[shade], "M{from} {top}H{to}v{}H{from}z", ROW - 2.0);
                }
            }
        }
        let drawn = paths.iter().enumerate().filter(|(_, path)| !path.is_empty());
        let inside: String = drawn
            .map(|(shade, path)| format!("<path class=\"h{shade}\" d=\"{path}\"/>\n"))
            .collect();
        let levels =
            (0..).zip(self.rows).map(|(row, name)| (ROW * (f64::from(row) + 0.5), name)).collect();
        let Self { id, title, description, x, marks, .. } = self;
        let (class, y_label, column) = ("heat", String::new(), 0);
        Frame { id, title, description, class, height, x, y_label, levels, marks, column }
            .draw(&inside, "")
    }
}

#[cfg(test)]
mod tests {
    use super::{SHADES, Shades};

    #[test]
    fn values_have_shades_by_their_logarithm() {
        let shades = Shades { low: 1e-4, high: 1e-2 };
        assert_eq!(
            [0.0, 1e-6, 1e-4, 1.1e-3, 1e-2, 1.0].map(|value| shades.of(value)),
            [0, 1, 1, 5, SHADES, SHADES].map(Some)
        );
        assert_eq!(shades.of(f64::NAN), None);
    }
}
