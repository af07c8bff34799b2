//! A folder of class folders.
//!
//! ```text
//! train/CLASS/...     what to train on
//! val/CLASS/...       what to evaluate on: val, validation or test, the first that exists
//! ```
//!
//! Classes are the folders of `train`, sorted by name as bytes. All files below one that end in
//! .jpg, .jpeg or .png are its images, sorted by path; other files are left out.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use blake3::Hash;
use image::RgbImage;
use rayon::prelude::*;

use sparse24_train::objective::Batch;

use super::{augment::Augmentation, decode};
use crate::{Error, Result, data, data::Ahead, disk, task::Judgement};

/// Files of at most this many bytes in all are read at the start: their contents identify them.
const READ: u64 = 256 << 20;

/// Their images are kept while they have at most this many bytes.
const KEPT: u64 = 1 << 30;

/// Bytes of kept images for each byte of the files, as photographs have, beyond some that any
/// folder may have.
pub(super) const SPREAD: u64 = 32;
pub(super) const HARMLESS: u64 = 64 << 20;

const TRAIN: &str = "train";
const VALIDATION: [&str; 3] = ["val", "validation", "test"];

/// Where images are, and what is made of them.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSource {
    /// The folder.
    pub folder: PathBuf,
    /// Pixels of a side of an input.
    pub size: usize,
    /// Pixels of a side of a patch.
    pub patch: usize,
    /// The variation of training images.
    pub augmentation: Augmentation,
}

/// The images of a run.
#[derive(Debug, Clone)]
pub struct Images(pub(super) Arc<Shared>);

/// The parts that are shared with a thread that reads ahead.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) source: ImageSource,
    pub(super) classes: Vec<String>,
    /// To train on, and to evaluate on.
    pub(super) splits: [Vec<Entry>; 2],
    fingerprint: Hash,
    /// The order of an epoch.
    pub(super) order: Mutex<Option<(Epoch, Arc<Vec<u32>>)>>,
    pub(super) ahead: Ahead<Number, Batch>,
    /// Threads that decode and augment.
    pub(super) loaders: rayon::ThreadPool,
}

/// The number of a micro-batch in a run of this seed, and its images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Number {
    pub(super) seed: u64,
    pub(super) number: u64,
    pub(super) size: usize,
}

/// Seed and number of an epoch.
pub(super) type Epoch = (u64, u32);

/// An image.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    pub(super) class: u32,
    pub(super) kept: Option<RgbImage>,
}

impl Entry {
    /// Its pixels.
    pub(super) fn image(&self) -> Result<std::borrow::Cow<'_, RgbImage>> {
        use std::borrow::Cow;
        match &self.kept {
            Some(image) => Ok(Cow::Borrowed(image)),
            None => Ok(Cow::Owned(decode::decode(&self.path, &decode::read(&self.path)?)?)),
        }
    }
}

impl Images {
    /// Lists the images; reads them all if they are few.
    ///
    /// # Errors
    /// [`Error::File`] for a folder without class folders, a class without images, a class to
    /// evaluate on that is not trained on, and an image that cannot be decoded; [`Error::Io`].
    pub fn open(source: ImageSource) -> Result<Self> {
        let folder = &source.folder;
        let expected = "train with a folder of images for each class, and val, validation or \
                        test with the same";
        let is_split = |name: &&&str| disk::is_folder(&folder.join(name));
        let validation = disk::first(&VALIDATION, is_split)?;
        let (true, Some(validation)) = (is_split(&&TRAIN)?, validation) else {
            bail!(folder, "is not a folder of images: expected {expected}");
        };
        let train = class_folders(&folder.join(TRAIN))?;
        let classes: Vec<String> = train.keys().cloned().collect();
        if classes.len() < 2 {
            bail!(folder.join(TRAIN), "has {} class folders, expected at least 2", classes.len());
        }
        let mut splits = [train, class_folders(&folder.join(validation))?].map(|of| {
            of.into_iter().map(|(name, (path, files))| (name, path, files)).collect::<Vec<_>>()
        });
        for (name, path, files) in splits.iter().flatten() {
            if !classes.contains(name) {
                bail!(path, "is a class without images to train on");
            }
            if files.is_empty() {
                bail!(path, "holds no image (.jpg, .jpeg, .png); add some or remove the folder");
            }
        }
        if splits[1].is_empty() {
            bail!(folder.join(validation), "holds no class folders");
        }
        let class_of = |name: &str| classes.iter().position(|class| class == name);
        let mut entries = || {
            splits.each_mut().map(|split| {
                let entries = split.drain(..).flat_map(|(name, _, files)| {
                    let class = class_of(&name).expect("it was looked up") as u32;
                    files.into_iter().map(move |path| Entry { path, class, kept: None })
                });
                entries.collect::<Vec<_>>()
            })
        };
        let mut splits = entries();
        let fingerprint = identify(folder, &classes, &mut splits)?;
        let loaders = rayon::ThreadPoolBuilder::new().thread_name(|_| "images".to_owned());
        let loaders = loaders.build().map_err(|error| {
            Error::setting("data.path", format!("no threads can load images: {error}"))
        })?;
        let (order, ahead) = (Mutex::new(None), Ahead::default());
        let shared = Shared { source, classes, splits, fingerprint, order, ahead, loaders };
        Ok(Self(Arc::new(shared)))
    }

    /// Where they are, and what is made of them.
    #[must_use]
    pub fn source(&self) -> &ImageSource {
        &self.0.source
    }

    /// Names of the classes, in order.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.0.classes
    }

    /// Images to train on and to evaluate on.
    #[must_use]
    pub fn counts(&self) -> [usize; 2] {
        self.0.splits.each_ref().map(Vec::len)
    }

    /// A hash of classes, and of paths and sizes of all files; of few files of their contents too.
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.0.fingerprint
    }

    /// The number of classes whose outputs for an image to evaluate on are larger than that of its
    /// own class; of equal outputs the first is larger.
    ///
    /// # Panics
    /// Unless there is such an image, and an output for each class.
    #[must_use]
    pub fn rank(&self, number: usize, outputs: &[f32]) -> f32 {
        let class = self.0.splits[1][number].class as usize;
        let above = |&(at, output): &(usize, &f32)| {
            output.total_cmp(&outputs[class]).is_gt() || at < class && *output == outputs[class]
        };
        outputs.iter().enumerate().filter(above).count() as f32
    }

    /// The shares of images to evaluate on whose class is the first, and is among the first five,
    /// by the [rank](Self::rank) of each.
    #[must_use]
    pub fn judge(&self, ranks: &[f32]) -> Judgement {
        let share = |k: f32| {
            let right = ranks.iter().filter(|&&rank| rank < k).count();
            right as f64 / ranks.len() as f64
        };
        let scores = [("acc@1", 1.0), ("acc@5", 5.0)].map(|(name, k)| (name.to_owned(), share(k)));
        Judgement { scores: scores.into(), ..Judgement::default() }
    }
}

/// Class folders by name, with their images.
type ClassFolders = BTreeMap<String, (PathBuf, Vec<PathBuf>)>;

/// The folders of a split. A link to a folder is one; a name that begins with a dot is none.
fn class_folders(split: &Path) -> Result<ClassFolders> {
    let failed = |error| Error::io("list", split, error);
    let mut found = ClassFolders::new();
    for entry in fs::read_dir(split).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default();
        if name.as_encoded_bytes().starts_with(b".") || !disk::is_folder(&path)? {
            continue;
        }
        let Some(name) = name.to_str().map(str::to_owned) else {
            bail!(path, "has a name that is not UTF-8, expected a class");
        };
        let mut files = Vec::new();
        data::list_files(&path, &mut files)?;
        files.retain(|file| decode::is_image(file));
        found.insert(name, (path, files));
    }
    Ok(found)
}

/// The fingerprint; reads the images and keeps them if they are few.
fn identify(folder: &Path, classes: &[String], splits: &mut [Vec<Entry>; 2]) -> Result<Hash> {
    let mut hasher = blake3::Hasher::new();
    let mut update = |text: &[u8]| {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text);
    };
    update(b"sparse24 images");
    classes.iter().for_each(|class| update(class.as_bytes()));
    let mut total = 0;
    for split in splits.iter() {
        update(&(split.len() as u64).to_le_bytes());
        for Entry { path, .. } in split {
            let size = fs::metadata(path).map_err(|error| Error::io("read", path, error))?.len();
            total += size;
            let relative = path.strip_prefix(folder).unwrap_or(path);
            update(relative.as_os_str().as_encoded_bytes());
            update(&size.to_le_bytes());
        }
    }
    if total > READ {
        return Ok(hasher.finalize());
    }
    let (held, most) = (AtomicU64::new(0), KEPT.min(HARMLESS + SPREAD * total));
    let contents = |entry: &mut Entry| {
        let bytes = decode::read(&entry.path)?;
        let image = decode::decode(&entry.path, &bytes)?;
        let size = image.as_raw().len() as u64;
        let add = |held: u64| (held + size <= most).then_some(held + size);
        let added = held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        entry.kept = added.is_ok().then_some(image);
        Ok(blake3::hash(&bytes))
    };
    for split in splits.iter_mut() {
        let hashes = split.par_iter_mut().map(contents).collect::<Vec<Result<Hash>>>();
        for hash in hashes {
            update(hash?.as_bytes());
        }
    }
    Ok(hasher.finalize())
}
