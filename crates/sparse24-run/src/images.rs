//! Classified images: folders of JPEG and PNG files, their augmentation, and batches.
//!
//! | step | type |
//! | --- | --- |
//! | a folder of class folders to lists of files | [`Images`] |
//! | a file to pixels | `decode` |
//! | the draws of an image | `draws`, a pure function of (seed, epoch, place) |
//! | pixels to the input of a model | [`Augmentation`], `rand_augment` |
//! | the batch of a step, and an evaluation | [`ImageBatches`], a pure function of (seed, step) |

mod augment;
mod batch;
mod decode;
mod draws;
mod folder;
mod rand_augment;

#[cfg(test)]
mod tests;

pub use augment::Augmentation;
pub use batch::ImageBatches;
pub use folder::{ImageSource, Images};
