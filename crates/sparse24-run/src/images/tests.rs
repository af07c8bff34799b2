//! Folders that are read and that are refused, the images of an epoch, and a run that is resumed in
//! the middle of one.

use std::{fs, num::NonZeroU32, path::Path};

use image::{ImageBuffer, Luma, Rgb, RgbImage};
use sparse24_train::{
    nn::BatchShape,
    objective::{Batch, Evaluation, Objective},
    schedule::GradientAccumulation,
};
use tempfile::TempDir;

use super::{
    folder::{HARMLESS, SPREAD},
    *,
};
use crate::{
    Error, checkpoint,
    config::Config,
    run::{Asked, Given, Observer, Resume, Run, StepMetrics, open_data},
};

const SIDE: u32 = 8;

/// Two classes of five images to train on and two to evaluate on, each of its own color.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (split, count) in [("train", 5), ("val", 2)] {
        for (class, name) in ["ants", "bees"].into_iter().enumerate() {
            let path = folder.path().join(split).join(name);
            fs::create_dir_all(&path).unwrap();
            for i in 0..count {
                let color = |x: u32, y: u32| [40 * i as u32, 90 * class as u32, 9 * x + 3 * y];
                let pixel = |x, y| Rgb(color(x, y).map(|value| value as u8));
                let image = RgbImage::from_fn(SIDE, SIDE, pixel);
                image.save(path.join(format!("{i}.png"))).unwrap();
            }
        }
    }
    folder
}

fn source(folder: &Path, augmentation: Augmentation) -> ImageSource {
    ImageSource { folder: folder.to_owned(), size: SIDE as usize, patch: 4, augmentation }
}

const ALL: Augmentation = Augmentation {
    repeats: 1,
    flip: 0.5,
    rand_augment: 9.0,
    rand_augment_deviation: 0.5,
    random_erasing: 0.5,
    mixup: 0.8,
    cutmix: 1.0,
};

fn batches(images: &Images, size: usize) -> ImageBatches<'_> {
    let accumulation = GradientAccumulation::constant(NonZeroU32::MIN);
    let shape = BatchShape { size, sequence_length: 5 };
    ImageBatches { images, seed: 3, shape, accumulation }
}

fn batch(batches: &ImageBatches<'_>, step: u32) -> Batch {
    let mut batch = Batch::default();
    Objective::fill(batches, step, 0, &mut batch).unwrap();
    batch
}

#[test]
fn a_batch_is_a_function_of_its_step() {
    let folder = folder();
    let images = Images::open(source(folder.path(), ALL)).unwrap();
    assert_eq!(
        (images.classes(), images.counts()),
        (&["ants", "bees"].map(String::from)[..], [10, 4])
    );
    let forward: Vec<Batch> = (1..6).map(|step| batch(&batches(&images, 4), step)).collect();
    let backward = (1..6).rev().map(|step| batch(&batches(&images, 4), step));
    assert!(backward.eq(forward.iter().rev().cloned()));
    for batch in &forward {
        assert_eq!((batch.pixels.len(), batch.targets.len(), batch.counted), (4 * 192, 20, 4));
        assert!(batch.pixels.iter().all(|value| value.is_finite()));
        let first: Vec<u32> = batch.targets.iter().step_by(5).copied().collect();
        let reversed: Vec<u32> = first.into_iter().rev().collect();
        assert_eq!((&batch.second_targets, batch.shares.len()), (&reversed, 4));
    }
}

/// Places of the images in one epoch, by their red value, which no augmentation changes here.
#[test]
fn an_epoch_has_every_image_once_or_its_share_repeatedly() {
    let folder = folder();
    for repeats in [0, 1, 3] {
        let plain = Augmentation { repeats, ..Augmentation::default() };
        let images = Images::open(source(folder.path(), plain)).unwrap();
        // The corner of an image may be padding, its middle never is.
        let middle = |patch: &[f32]| (patch[10] * 0.229 + 0.485) * 255.0;
        let batch = batch(&batches(&images, 20), 1);
        let kinds = batch.pixels.chunks(192).zip(batch.targets.chunks(5));
        let kinds: Vec<(u32, u32)> = kinds
            .map(|(image, targets)| {
                let most = image.chunks(48).map(middle).fold(0.0, f32::max);
                ((most / 40.0).round() as u32, targets[0])
            })
            .collect();
        for epoch in kinds.chunks(10) {
            match repeats {
                3 => assert!(epoch[..9].chunks(3).all(|same| same.iter().all(|k| *k == same[0]))),
                _ => {
                    let mut sorted = epoch.to_vec();
                    sorted.sort_unstable();
                    let all: Vec<_> = (0..5).flat_map(|i| [(i, 0), (i, 1)]).collect();
                    assert_eq!(sorted, all, "repeats {repeats}");
                }
            }
        }
        assert!(repeats == 3 || kinds[..10] != kinds[10..], "every epoch has its own order");
    }
}

#[test]
fn images_of_other_kinds_are_converted() {
    let folder = folder();
    let train = folder.path().join("train/ants");
    let grey = ImageBuffer::from_fn(9, 5, |x, _| Luma([x as u16 * 7000]));
    grey.save(train.join("grey16.PNG")).unwrap();
    fs::write(train.join("cmyk.jpeg"), include_bytes!("cmyk.jpg")).unwrap();
    fs::write(train.join("notes.txt"), "no image").unwrap();
    fs::write(train.join(".hidden.png"), "no image").unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(train.join("0.png"), train.join("link.png")).unwrap();
    let images = Images::open(source(folder.path(), Augmentation::default())).unwrap();
    assert_eq!(images.counts(), [if cfg!(unix) { 13 } else { 12 }, 4]);
    let mut of_val = Batch::default();
    let shape = BatchShape { size: 4, sequence_length: 5 };
    Evaluation::fill(&batches(&images, 4), 0, shape, &mut of_val).unwrap();
    // Red ink takes green and blue away.
    let red = decode::decode(Path::new("cmyk.jpg"), include_bytes!("cmyk.jpg")).unwrap();
    let Rgb([r, g, b]) = *red.get_pixel(4, 4);
    assert!(r > 200 && g < 60 && b < 60, "{r} {g} {b}");
}

/// Each folder is refused in one sentence that names the file.
#[test]
fn damaged_folders_are_refused() {
    let png = {
        let folder = folder();
        fs::read(folder.path().join("train/ants/0.png")).unwrap()
    };
    // A header of 40000 x 40000 pixels: width and height are bytes 16 to 23.
    let mut wide = png.clone();
    wide[16..24].copy_from_slice(&[0, 0, 0x9c, 0x40, 0, 0, 0x9c, 0x40]);
    let jpeg = include_bytes!("cmyk.jpg");
    // The same with more segments, as a progressive frame of these sides.
    let progressive = |segments: &[u8], sides: [u16; 2]| {
        let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
        let mut changed = jpeg.to_vec();
        changed[frame + 1] = 0xc2;
        changed[frame + 5..frame + 9].copy_from_slice(&sides.map(u16::to_be_bytes).concat());
        changed.splice(2..2, segments.iter().copied());
        changed
    };
    let comment = [&[0xff, 0xfe, 0xff, 0xff][..], &[b' '; 0xfffd]].concat().repeat(3);
    let photograph = progressive(&comment, [4000, 6000]);
    assert!(decode::decode(Path::new("photograph"), &photograph).is_ok());
    let (large, parts) = (
        progressive(&comment, [8000, 8000]),
        progressive(&[0xff, 0xe1, 0, 2].repeat(4097), [8, 8]),
    );
    let scans = [&[0xff, 0xfe, 0x40, 0x02][..], &[0xff, 0xda].repeat(0x2000)].concat();
    let scans = progressive(&scans, [3000, 3000]);
    for (file, contents, expected) in [
        ("train/ants/0.png", &b""[..], "0.png: is neither a JPEG nor a PNG image"),
        ("train/ants/0.png", b"GIF89a no image at all", "0.png: is neither a JPEG nor a PNG"),
        ("val/bees/1.png", &png[..png.len() / 2], "1.png: cannot be decoded ("),
        ("train/bees/x.jpg", &jpeg[..100], "x.jpg: cannot be decoded ("),
        ("train/bees/x.jpg", &jpeg[..jpeg.len() - 10], "(the file is cut off)"),
        ("train/bees/x.jpg", &large, "that may take more than 576 MiB of memory"),
        ("train/bees/x.jpg", &parts, "more than 4096 segments of metadata"),
        ("train/bees/x.jpg", &scans, "it has more scans than an image of its size"),
        ("train/bees/x.png", &wide, "x.png: cannot be decoded ("),
        ("train/cats/readme.txt", b"", "cats: holds no image (.jpg, .jpeg, .png)"),
        ("val/dogs/0.png", &png, "dogs: is a class without images to train on"),
    ] {
        let folder = folder();
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
        let error = Images::open(source(folder.path(), ALL)).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}, expected {expected}");
    }
    for (removed, expected) in [
        ("train", "is not a folder of images: expected train"),
        ("val", "is not a folder of images: expected train"),
        ("train/ants", "has 1 class folders, expected at least 2"),
    ] {
        let folder = folder();
        fs::remove_dir_all(folder.path().join(removed)).unwrap();
        let error = Images::open(source(folder.path(), ALL)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
}

#[test]
fn another_image_is_another_fingerprint() {
    let (one, other) = (folder(), folder());
    let of = |folder: &TempDir| Images::open(source(folder.path(), ALL)).unwrap().fingerprint();
    assert_eq!(of(&one), of(&other));
    fs::copy(other.path().join("val/ants/0.png"), other.path().join("val/ants/1.png")).unwrap();
    assert_ne!(of(&one), of(&other));
}

#[test]
fn accuracies_count_the_first_outputs() {
    let folder = folder();
    let images = Images::open(source(folder.path(), ALL)).unwrap();
    // Two ants, then two bees: right, a tie that the first output wins, wrong, not a number.
    let outputs = [1.0, 0.0, 2.0, 2.0, 1.0, -1.0, f32::NAN, 0.0];
    let ranks: Vec<f32> =
        outputs.chunks(2).enumerate().map(|(number, row)| images.rank(number, row)).collect();
    assert_eq!(ranks[..3], [0.0, 0.0, 1.0]);
    let scores = images.judge(&ranks).scores;
    assert_eq!((scores["acc@1"], scores["acc@5"]), (0.5, 1.0));
}

/// Stops after a step.
struct Until(u32, u32);

impl Observer for Until {
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.1 = metrics.step;
    }

    fn asked(&mut self) -> Asked {
        if self.1 == self.0 { Asked::Stop } else { Asked::Nothing }
    }
}

/// Ten images, and eight in a step: every interruption is in the middle of an epoch.
#[test]
fn a_run_resumes_in_the_middle_of_an_epoch() {
    let folder = folder();
    let settings = format!(
        "steps=6 model.layers=2 model.d_model=8 model.heads=2 model.d_ff=16 model.image_size=8 \
            model.drop_path=0.5 augmentation.mixup=0.8 augmentation.cutmix=1.0 \
            augmentation.rand_augment=9.0 augmentation.repeats=3 batch.size=4 \
            batch.gradient_accumulation_steps=2 data.path={:?}",
        folder.path()
    );
    let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
    let config = Config::resolve(Some("deit-cifar-cpu"), None, &settings).unwrap();
    assert_eq!(config.model.sequence_length, 5);
    let runs = tempfile::tempdir().unwrap();
    let finish = |name: &str, stops: &[u32]| {
        let path = runs.path().join(name);
        let data = open_data(&config).unwrap();
        let mut run = Run::start(config.clone(), data, Given::default(), &path).unwrap();
        for &stop in stops {
            run.train(&mut Until(stop, 0)).unwrap();
            drop(run);
            run = Run::resume(&path, &Resume::default()).unwrap();
        }
        run.train(&mut Until(u32::MAX, 0)).unwrap();
        drop(run);
        let last = checkpoint::latest(&path.join("checkpoints")).unwrap().checkpoint.unwrap();
        checkpoint::load(&last).unwrap()
    };
    let whole = finish("whole", &[]);
    let resumed = finish("resumed", &[1, 2, 4]);
    assert!(whole.weights == resumed.weights && whole.first_moments == resumed.first_moments);
}

/// Flat pictures of 16 million pixels in files of some kilobytes.
#[test]
fn the_images_that_are_kept_are_few_for_small_files() {
    let folder = folder();
    for name in ["ants", "bees"] {
        let path = folder.path().join("train").join(name).join("flat.png");
        RgbImage::new(4096, 4096).save(path).unwrap();
    }
    let images = Images::open(source(folder.path(), ALL)).unwrap();
    let kept = images.0.splits.iter().flatten().filter_map(|entry| entry.kept.as_ref());
    let sizes: Vec<u64> = kept.map(|image| image.as_raw().len() as u64).collect();
    assert!(sizes.iter().sum::<u64>() <= HARMLESS + SPREAD * (1 << 20), "{sizes:?}");
    assert!(sizes.len() >= 15, "{} of 16 are kept", sizes.len());
}
