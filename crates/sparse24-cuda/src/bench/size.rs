//! Sizes of cases: a layer of a model, or a matrix.

use std::{fmt, str::FromStr};

use super::TOKENS;
use crate::norm::MAX_WIDTH;

/// Names a set of shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// A layer with this d_model, and 16 sequences of 1024 tokens.
    Width(usize),
    /// A weight or activations of this shape; cases that need more are left out.
    Matrix([usize; 2]),
}

/// The sizes of GPT-2, under the names of presets, and their widths.
const NAMED: [(&str, usize); 4] =
    [("gpt2-124m", 768), ("gpt2-350m", 1024), ("gpt2-774m", 1280), ("gpt2-1558m", 1600)];

/// Widths beyond GPT-2 that are measured by default.
const BEYOND: [usize; 2] = [2048, 4096];

impl Size {
    /// The default sizes.
    #[must_use]
    pub fn all() -> Vec<Self> {
        NAMED.iter().map(|(_, width)| *width).chain(BEYOND).map(Self::Width).collect()
    }

    /// Shape of the up layer's weight.
    #[must_use]
    pub const fn weights(self) -> [usize; 2] {
        match self {
            Self::Width(d) => [4 * d, d],
            Self::Matrix(shape) => shape,
        }
    }

    /// Shape of the activations between the layers.
    #[must_use]
    pub const fn hidden(self) -> [usize; 2] {
        match self {
            Self::Width(d) => [TOKENS, 4 * d],
            Self::Matrix(shape) => shape,
        }
    }

    /// Shape of the residual stream.
    #[must_use]
    pub const fn stream(self) -> [usize; 2] {
        match self {
            Self::Width(d) => [TOKENS, d],
            Self::Matrix(shape) => shape,
        }
    }

    /// d_model, if the size is a layer.
    #[must_use]
    pub const fn width(self) -> Option<usize> {
        match self {
            Self::Width(d) => Some(d),
            Self::Matrix(_) => None,
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Width(width) => match NAMED.iter().find(|(_, named)| named == width) {
                Some((name, _)) => f.write_str(name),
                None => write!(f, "{width}"),
            },
            Self::Matrix([rows, columns]) => write!(f, "{rows}x{columns}"),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    /// Reads a model's name, a width, or `ROWSxCOLUMNS`.
    fn from_str(text: &str) -> Result<Self, String> {
        const MOST: usize = 1 << 16;
        let named =
            NAMED.iter().find(|(name, _)| *name == text).map(|(_, width)| Self::Width(*width));
        let matrix = || {
            let (rows, columns) = text.split_once('x')?;
            let shape = [rows.parse().ok()?, columns.parse().ok()?];
            shape
                .iter()
                .all(|length| (8..=MOST).contains(length) && length % 8 == 0)
                .then_some(Self::Matrix(shape))
        };
        let width = || {
            text.parse()
                .ok()
                .filter(|width| (64..=MAX_WIDTH).contains(width) && width % 64 == 0)
                .map(Self::Width)
        };
        named.or_else(width).or_else(matrix).ok_or_else(|| {
            let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
            format!(
                "expected {}, a width that is a multiple of 64 from 64 to {MAX_WIDTH}, or \
                 ROWSxCOLUMNS in multiples of 8 up to {MOST}",
                names.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_trip_through_text() {
        for size in Size::all().into_iter().chain([Size::Width(128), Size::Matrix([5120, 1280])]) {
            assert_eq!(size.to_string().parse(), Ok(size));
        }
        assert_eq!("768".parse(), Ok(Size::Width(768)));
        for text in [
            "", "gpt2", "0", "100", "16384", "768x", "x768", "12x12", "0x8", "8x131072", "-64",
            "64.0", "8x8x8",
        ] {
            let problem = text.parse::<Size>().expect_err(text);
            assert!(
                problem.starts_with("expected gpt2-124m, ") && problem.contains("ROWSxCOLUMNS"),
                "{problem}"
            );
        }
    }
}
