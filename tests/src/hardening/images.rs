//! JPEG and PNG images in class folders.

use std::num::NonZeroU32;

use sparse24_run::images::{Augmentation, ImageBatches, ImageSource, Images};
use sparse24_train::{
    nn::BatchShape,
    objective::{Batch, Objective},
    schedule::GradientAccumulation,
};

use super::{Files, file, path, refused};

const PNG: &[u8] = include_bytes!("rgb.png");
const JPEG: &[u8] = include_bytes!("../../../crates/sparse24-run/src/images/cmyk.jpg");

/// An image among sound ones; its name says that it is a JPEG, whatever it is.
pub(super) fn image(bytes: &[u8]) -> bool {
    for split in ["train", "val"] {
        file(&format!("images/{split}/a/sound.png"), PNG);
        file(&format!("images/{split}/b/sound.jpg"), JPEG);
    }
    file("images/train/b/image.jpg", bytes);
    let augmentation = Augmentation { flip: 0.5, ..Augmentation::default() };
    let source = ImageSource { folder: path("images"), size: 8, patch: 4, augmentation };
    let images = match Images::open(source) {
        Ok(images) => images,
        Err(error) => return refused(&error, "image.jpg"),
    };
    let shape = BatchShape { size: 3, sequence_length: 5 };
    let single = GradientAccumulation::constant(NonZeroU32::MIN);
    let (batches, mut batch) =
        (ImageBatches { images: &images, seed: 1, shape, accumulation: single }, Batch::default());
    Objective::fill(&batches, 1, 0, &mut batch).expect("held in memory");
    assert_eq!((batch.pixels.len(), batch.targets.len(), batch.counted), (3 * 192, 15, 3));
    assert!(batch.pixels.iter().all(|value| value.is_finite()));
    true
}

pub(super) fn image_seeds() -> Files {
    vec![PNG.to_vec(), JPEG.to_vec(), Vec::new(), b"GIF89a".to_vec(), b"\xff\xd8\xff".to_vec()]
}

/// Each byte of the header of a PNG, and of the segments of a JPEG, at its extremes.
pub(super) fn image_variants() -> Files {
    let changed = |sound: &'static [u8], range: std::ops::Range<usize>| {
        range.flat_map(move |at| {
            [0, 1, 0x7f, 0xff].map(|value| {
                let mut bytes = sound.to_vec();
                bytes[at] = value;
                bytes
            })
        })
    };
    changed(PNG, 0..33).chain(changed(JPEG, 0..JPEG.len().min(200))).collect()
}
