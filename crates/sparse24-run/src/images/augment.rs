//! From an image to the input of a model, in training and in an evaluation.
//!
//! Invariant: a training input is a pure function of the image, the settings and its draws.

use image::{
    Rgb, RgbImage,
    imageops::{FilterType, crop_imm, flip_horizontal, resize},
};
use serde::{Deserialize, Serialize};

use super::{
    draws::Draws,
    rand_augment::{MEAN, rand_augment},
};

/// Standard deviation of the channels of ImageNet, values being in `[0, 1]`.
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// The largest side of inputs for which images are padded and cropped, and not resized.
const SMALL: usize = 32;
const PADDING: u32 = 4;

/// Attempts to find a rectangle of a drawn area and shape.
const ATTEMPTS: usize = 10;

/// How training images are varied, and mixed with one another. Zero leaves a part out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Augmentation {
    /// Variants of an image in succession: repeated augmentation (Hoffer et al. 2020); 0 and 1 are
    /// one.
    pub repeats: u32,
    /// Probability of a horizontal flip.
    pub flip: f32,
    /// Mean level of the operations of RandAugment, from 0 to 10.
    pub rand_augment: f32,
    /// Standard deviation of that level.
    pub rand_augment_deviation: f32,
    /// Probability that a rectangle is replaced by noise (Zhong et al. 2017).
    pub random_erasing: f32,
    /// alpha of mixup (Zhang et al. 2017), from 0 to 2.
    pub mixup: f32,
    /// alpha of CutMix (Yun et al. 2019), from 0 to 2; a batch has it or mixup, with probability
    /// 1/2 each.
    pub cutmix: f32,
}

/// An input: `[3, size, size]`, normalized.
pub(super) type Input = Vec<f32>;

/// The training input of an image.
pub(super) fn training(
    image: &RgbImage,
    size: usize,
    rules: &Augmentation,
    draws: &mut Draws,
) -> Input {
    let side = size as u32;
    let mut image = if size <= SMALL {
        let padded = RgbImage::from_fn(side + 2 * PADDING, side + 2 * PADDING, |_, _| Rgb([0; 3]));
        let (mut padded, whole) = (padded, squeezed(image, side));
        image::imageops::replace(&mut padded, &whole, PADDING.into(), PADDING.into());
        let [x, y] = [(); 2].map(|()| draws.below(2 * PADDING as usize + 1) as u32);
        crop_imm(&padded, x, y, side, side).to_image()
    } else {
        let [x, y, w, h] = rectangle(image, draws);
        let part = crop_imm(image, x, y, w, h).to_image();
        resize(&part, side, side, FilterType::CatmullRom)
    };
    if draws.happens(rules.flip) {
        image = flip_horizontal(&image);
    }
    if rules.rand_augment > 0.0 {
        let level = (rules.rand_augment, rules.rand_augment_deviation);
        image = rand_augment(image, level, draws);
    }
    let mut input = normalized(&image);
    if rules.random_erasing > 0.0 && draws.happens(rules.random_erasing) {
        erase(&mut input, size, draws);
    }
    input
}

/// The evaluation input of an image: resized to size / 0.875 along its shorter side, and the middle
/// of that; up to 32 pixels the whole image.
pub(super) fn evaluation(image: &RgbImage, size: usize) -> Input {
    let side = size as u32;
    if size <= SMALL {
        return normalized(&squeezed(image, side));
    }
    // The ends of a very long image have no part in the middle, and would need much memory.
    let (w, h) = image.dimensions();
    let [wide, high] = [w, h].map(|of| of.min(w.min(h).saturating_mul(2)));
    let image = crop_imm(image, (w - wide) / 2, (h - high) / 2, wide, high).to_image();
    let shorter = size as u64 * 256 / 224;
    let [wide, high] =
        [wide, high].map(|of| (shorter * u64::from(of) / u64::from(w.min(h))) as u32);
    let resized = resize(&image, wide, high, FilterType::CatmullRom);
    let [x, y] = [resized.width(), resized.height()]
        .map(|of| (f64::from(of - side) / 2.0).round_ties_even() as u32);
    normalized(&crop_imm(&resized, x, y, side, side).to_image())
}

/// The image, resized unless it has this size.
fn squeezed(image: &RgbImage, side: u32) -> RgbImage {
    if image.dimensions() == (side, side) {
        return image.clone();
    }
    resize(image, side, side, FilterType::CatmullRom)
}

/// A rectangle of 8 % to 100 % of an image with sides in a ratio of 3/4 to 4/3; after ten attempts
/// in vain the largest one in the middle. x, y, width and height.
fn rectangle(image: &RgbImage, draws: &mut Draws) -> [u32; 4] {
    let (w, h) = image.dimensions();
    let area = f64::from(w) * f64::from(h);
    let found = sides(area, [0.08, 1.0], 4.0 / 3.0, draws, |wide, high| {
        (1..=w as usize).contains(&wide) && (1..=h as usize).contains(&high)
    });
    if let Some([wide, high]) = found {
        let y = draws.below(h as usize - high + 1) as u32;
        let x = draws.below(w as usize - wide + 1) as u32;
        return [x, y, wide as u32, high as u32];
    }
    let at_most = |of: u32, other: u32| {
        let most = (f64::from(other) * 4.0 / 3.0).round_ties_even() as u32;
        of.min(most.max(1))
    };
    let (wide, high) = (at_most(w, h), at_most(h, w));
    [(w - wide) / 2, (h - high) / 2, wide, high]
}

/// Sides of a rectangle whose share of `area` is uniform in `shares` and whose ratio of width and
/// height is log-uniform from 1 / `ratio` to `ratio`, rounded; the first of ten that `fits`.
fn sides(
    area: f64,
    shares: [f64; 2],
    ratio: f64,
    draws: &mut Draws,
    fits: impl Fn(usize, usize) -> bool,
) -> Option<[usize; 2]> {
    let logarithm = libm::log(ratio);
    (0..ATTEMPTS).find_map(|_| {
        let area = area * draws.between(shares);
        let ratio = libm::exp(draws.between([-logarithm, logarithm]));
        let [wide, high] = [area * ratio, area / ratio]
            .map(|square| libm::sqrt(square).round_ties_even() as usize);
        fits(wide, high).then_some([wide, high])
    })
}

/// (value / 255 - mean) / deviation.
fn normalized(image: &RgbImage) -> Input {
    let channel = |channel: usize| {
        let (mean, deviation) = (MEAN[channel], DEVIATION[channel]);
        image.pixels().map(move |pixel| (f32::from(pixel[channel]) / 255.0 - mean) / deviation)
    };
    (0..3).flat_map(channel).collect()
}

/// Replaces a rectangle of 2 % to a third of the area, with sides in a ratio of 0.3 to 1 / 0.3, by
/// standard normals.
fn erase(input: &mut [f32], size: usize, draws: &mut Draws) {
    let area = (size * size) as f64;
    let found =
        sides(area, [0.02, 1.0 / 3.0], 1.0 / 0.3, draws, |wide, high| wide < size && high < size);
    let Some([wide, high]) = found else { return };
    let (top, left) = (draws.below(size - high + 1), draws.below(size - wide + 1));
    for channel in input.chunks_exact_mut(size * size) {
        for row in channel.chunks_exact_mut(size).skip(top).take(high) {
            row[left..left + wide].iter_mut().for_each(|value| *value = draws.normal() as f32);
        }
    }
}

/// Mixes a batch of inputs with itself in reverse order, if the rules say so: all by one share, or
/// with one rectangle cut out. The share that is left of each input.
pub(super) fn mix(
    inputs: &mut [Input],
    size: usize,
    rules: &Augmentation,
    draws: &mut Draws,
) -> Option<f32> {
    let cuts = match (rules.mixup > 0.0, rules.cutmix > 0.0) {
        (false, false) => return None,
        (true, true) => draws.happens(0.5),
        (_, cuts) => cuts,
    };
    let share = draws.beta(if cuts { rules.cutmix } else { rules.mixup });
    // Half of the batch is mixed with the other half, and the one in the middle with itself.
    let pairs = |inputs: &mut [Input], each: &mut dyn FnMut(&mut f32, &mut f32, usize)| {
        let half = inputs.len() / 2;
        let (first, rest) = inputs.split_at_mut(half);
        for (a, b) in first.iter_mut().zip(rest.iter_mut().rev()) {
            a.iter_mut().zip(b).enumerate().for_each(|(at, (a, b))| each(a, b, at));
        }
    };
    if !cuts {
        let share = share as f32;
        pairs(inputs, &mut |a, b, _| {
            (*a, *b) = (*a * share + *b * (1.0 - share), *b * share + *a * (1.0 - share));
        });
        return Some(share);
    }
    let side = (size as f64 * libm::sqrt(1.0 - share)) as usize;
    let [rows, columns] = [(); 2].map(|()| {
        let middle = draws.below(size);
        middle.saturating_sub(side / 2)..(middle + side / 2).min(size)
    });
    pairs(inputs, &mut |a, b, at| {
        if rows.contains(&(at / size % size)) && columns.contains(&(at % size)) {
            std::mem::swap(a, b);
        }
    });
    Some(1.0 - (rows.len() * columns.len()) as f32 / (size * size) as f32)
}
