//! RandAugment (Cubuk et al. 2019, arXiv 1909.13719) as timm's `rand-m9-mstd0.5-inc1` has it: two
//! operations of fifteen, each with probability 1/2, with magnitudes that grow with the level.
//!
//! An operation does what Pillow's does, on 8-bit channels: values between integers are cut, those
//! outside 0 to 255 are clipped.

use image::{Rgb, RgbImage};

use super::draws::Draws;

/// Mean of the channels of ImageNet, values being in `[0, 1]`.
pub(super) const MEAN: [f32; 3] = [0.485, 0.456, 0.406];

/// Operations per image.
const LAYERS: usize = 2;

/// The largest level.
const LEVELS: f64 = 10.0;

/// The operations, in the order in which they are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Operation {
    AutoContrast,
    Equalize,
    Invert,
    Rotate,
    Posterize,
    Solarize,
    SolarizeAdd,
    Color,
    Contrast,
    Brightness,
    Sharpness,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
}

impl Operation {
    const ALL: [Self; 15] = [
        Self::AutoContrast,
        Self::Equalize,
        Self::Invert,
        Self::Rotate,
        Self::Posterize,
        Self::Solarize,
        Self::SolarizeAdd,
        Self::Color,
        Self::Contrast,
        Self::Brightness,
        Self::Sharpness,
        Self::ShearX,
        Self::ShearY,
        Self::TranslateX,
        Self::TranslateY,
    ];

    /// Whether the magnitude has a sign, which is drawn.
    fn is_signed(self) -> bool {
        !matches!(
            self,
            Self::AutoContrast
                | Self::Equalize
                | Self::Invert
                | Self::Posterize
                | Self::Solarize
                | Self::SolarizeAdd
        )
    }

    /// The image after the operation at a level from -10 to 10, negative if the sign is.
    pub(super) fn apply(self, image: RgbImage, level: f64) -> RgbImage {
        let share = level / LEVELS;
        let (w, h) = (f64::from(image.width()), f64::from(image.height()));
        let enhanced = (1.0 + 0.9 * share).max(0.1) as f32;
        match self {
            Self::AutoContrast => by_channel(image, |histogram| {
                let used = |count: &u32| *count > 0;
                let low = histogram.iter().position(used).unwrap_or(0);
                let high = histogram.iter().rposition(used).unwrap_or(0);
                let scale = 255.0 / (high as f64 - low as f64);
                core::array::from_fn(|value| match high <= low {
                    true => value as u8,
                    false => (value as f64 * scale - low as f64 * scale) as u8,
                })
            }),
            Self::Equalize => by_channel(image, equalized),
            Self::Invert => by_value(image, |value| 255 - value),
            Self::Rotate => {
                let angle = -(30.0 * share).to_radians();
                let (sin, cos) = (libm::sin(angle), libm::cos(angle));
                let (x, y) = (w / 2.0, h / 2.0);
                let shift = [x - cos * x - sin * y, y + sin * x - cos * y];
                transform(&image, [[cos, sin, shift[0]], [-sin, cos, shift[1]]])
            }
            Self::Posterize => {
                let bits = 4 - (4.0 * share) as u32;
                by_value(image, |value| if bits == 0 { 0 } else { value & (0xff << (8 - bits)) })
            }
            Self::Solarize => {
                let threshold = 256 - ((256.0 * share) as i32).min(256);
                by_value(image, |value| match i32::from(value) < threshold {
                    true => value,
                    false => 255 - value,
                })
            }
            Self::SolarizeAdd => {
                let add = ((110.0 * share) as u8).min(128);
                by_value(image, |value| if value < 128 { value.saturating_add(add) } else { value })
            }
            Self::Color => {
                let grey = |image: &RgbImage, x, y| [luma(image.get_pixel(x, y)); 3];
                blended(&image, grey, enhanced)
            }
            Self::Contrast => {
                let sum: u64 = image.pixels().map(|pixel| u64::from(luma(pixel))).sum();
                let mean = (sum as f64 / (w * h) + 0.5) as u8;
                blended(&image, |_, _, _| [mean; 3], enhanced)
            }
            Self::Brightness => blended(&image, |_, _, _| [0; 3], enhanced),
            Self::Sharpness => blended(&image, smoothed, enhanced),
            Self::ShearX => transform(&image, [[1.0, 0.3 * share, 0.0], [0.0, 1.0, 0.0]]),
            Self::ShearY => transform(&image, [[1.0, 0.0, 0.0], [0.3 * share, 1.0, 0.0]]),
            Self::TranslateX => transform(&image, [[1.0, 0.0, 0.45 * share * w], [0.0, 1.0, 0.0]]),
            Self::TranslateY => transform(&image, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.45 * share * h]]),
        }
    }
}

/// Two drawn operations, each with probability 1/2, at a level drawn from a normal distribution
/// with this mean and standard deviation and clipped to 0 to 10.
pub(super) fn rand_augment(
    mut image: RgbImage,
    (magnitude, deviation): (f32, f32),
    draws: &mut Draws,
) -> RgbImage {
    let chosen = [(); LAYERS].map(|()| Operation::ALL[draws.below(Operation::ALL.len())]);
    for operation in chosen {
        if !draws.happens(0.5) {
            continue;
        }
        let level = f64::from(magnitude) + f64::from(deviation) * draws.normal();
        let level = level.clamp(0.0, LEVELS);
        let is_negative = operation.is_signed() && draws.happens(0.5);
        image = operation.apply(image, if is_negative { -level } else { level });
    }
    image
}

fn by_value(mut image: RgbImage, of: impl Fn(u8) -> u8) -> RgbImage {
    image.as_flat_samples_mut().samples.iter_mut().for_each(|value| *value = of(*value));
    image
}

/// Maps the values of each channel by a table made from its histogram.
fn by_channel(mut image: RgbImage, table: impl Fn(&[u32; 256]) -> [u8; 256]) -> RgbImage {
    let mut histograms = [[0; 256]; 3];
    for pixel in image.pixels() {
        (0..3).for_each(|channel| histograms[channel][usize::from(pixel[channel])] += 1);
    }
    let tables = histograms.each_ref().map(table);
    for pixel in image.pixels_mut() {
        (0..3).for_each(|channel| pixel[channel] = tables[channel][usize::from(pixel[channel])]);
    }
    image
}

/// Equal numbers of pixels below equal values: with a step of 1/255 of the pixels, but for those of
/// the largest value, value v becomes (step / 2 + pixels below v) / step.
fn equalized(histogram: &[u32; 256]) -> [u8; 256] {
    let largest = histogram.iter().rev().find(|&&count| count > 0).copied().unwrap_or(0);
    let step = (histogram.iter().sum::<u32>() - largest) / 255;
    let mut below = step / 2;
    core::array::from_fn(|value| {
        let mapped = below.checked_div(step).map_or(value as u8, |mapped| mapped.min(255) as u8);
        below += histogram[value];
        mapped
    })
}

/// ITU-R 601-2 luma, rounded.
fn luma(&Rgb([red, green, blue]): &Rgb<u8>) -> u8 {
    let [red, green, blue] = [red, green, blue].map(u32::from);
    ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16) as u8
}

/// other + factor (image - other).
fn blended(
    image: &RgbImage,
    other: impl Fn(&RgbImage, u32, u32) -> [u8; 3],
    factor: f32,
) -> RgbImage {
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let (pixel, other) = (image.get_pixel(x, y), other(image, x, y).map(f32::from));
        Rgb([0, 1, 2].map(|channel| {
            (other[channel] + factor * (f32::from(pixel[channel]) - other[channel])) as u8
        }))
    })
}

/// The mean of a pixel and its neighbours, with weight 5 of 13 for itself; the border is kept.
fn smoothed(image: &RgbImage, x: u32, y: u32) -> [u8; 3] {
    let pixel = image.get_pixel(x, y);
    if x == 0 || y == 0 || x + 1 == image.width() || y + 1 == image.height() {
        return pixel.0;
    }
    [0, 1, 2].map(|channel| {
        let around = (y - 1..y + 2).flat_map(|y| (x - 1..x + 2).map(move |x| (x, y)));
        let sum: u32 = around.map(|(x, y)| u32::from(image.get_pixel(x, y)[channel])).sum();
        ((sum + 4 * u32::from(pixel[channel])) as f32 / 13.0 + 0.5) as u8
    })
}

/// The pixel (x, y) is that at `m (x + 1/2, y + 1/2, 1)`, interpolated by cubics with a = -1; the
/// mean colour where that is outside.
fn transform(image: &RgbImage, m: [[f64; 3]; 2]) -> RgbImage {
    let (w, h) = (image.width(), image.height());
    let outside = Rgb(MEAN.map(|mean| (255.0 * mean).round() as u8));
    RgbImage::from_fn(w, h, |x, y| {
        let (x, y) = (f64::from(x) + 0.5, f64::from(y) + 0.5);
        let [x, y] = m.map(|[a, b, c]| a * x + b * y + c);
        if !(0.0..f64::from(w)).contains(&x) || !(0.0..f64::from(h)).contains(&y) {
            return outside;
        }
        let (x, y) = (x - 0.5, y - 0.5);
        let (left, top) = (x.floor(), y.floor());
        let clip = |at: f64, size: u32| (at.max(0.0) as u32).min(size - 1);
        let columns = [-1.0, 0.0, 1.0, 2.0].map(|offset| clip(left + offset, w));
        let rows = [-1.0, 0.0, 1.0, 2.0].map(|offset| clip(top + offset, h));
        Rgb([0, 1, 2].map(|channel| {
            let along = rows.map(|row| {
                let four = columns.map(|column| f64::from(image.get_pixel(column, row)[channel]));
                cubic(four, x - left)
            });
            cubic(along, y - top) as u8
        }))
    })
}

/// The cubic between the middle two of four values, with slopes (c - a) and (d - b) there.
fn cubic([a, b, c, d]: [f64; 4], t: f64) -> f64 {
    b + t * ((c - a) + t * ((2.0 * (a - b) + c - d) + t * (b - a + d - c)))
}

#[cfg(test)]
mod tests;
