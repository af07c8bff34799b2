//! From a file to pixels: 8 bits per channel, red, green and blue.

use std::{
    fs::File,
    io::{self, Cursor, Read},
    panic::catch_unwind,
    path::Path,
};

use image::{ImageFormat, ImageReader, Limits, RgbImage};

use crate::Error;

/// Most bytes of a file, and of the memory that it is decoded into.
const MOST_BYTES: u64 = 256 << 20;

/// Most bytes that one byte of a file stands for, beyond 32 MiB: as many as in the PNG that
/// deflates best, so that a lying header costs little.
const SPREAD: u64 = 1032;

/// Most pixels of a side.
const LONGEST: u32 = 1 << 15;

/// Whether a file is an image by its name.
pub(super) fn is_image(path: &Path) -> bool {
    let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    ["jpg", "jpeg", "png"].iter().any(|known| kind.eq_ignore_ascii_case(known))
}

/// The bytes of a file of bounded size.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a larger file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |e| Error::io("read", path, e);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(Error::file(path, "has more than 256 MiB, the most that an image may have"));
    }
    Ok(bytes)
}

/// Whether a JPEG has an end of image after its last scan, in whose data the two bytes cannot be.
/// The decoder makes up what a cut file lacks.
fn is_whole(bytes: &[u8]) -> bool {
    let last = |marker: [u8; 2]| bytes.windows(2).rposition(|pair| pair == marker);
    last([0xff, 0xd9]) > last([0xff, 0xda])
}

/// The image in the bytes of a file. Grey becomes red, green and blue alike, CMYK is converted, 16
/// bits are rounded to 8, transparency is left out.
///
/// # Errors
/// [`Error::File`] for what is neither a JPEG nor a PNG image, is damaged, or is larger than 2^15
/// pixels on a side or 256 MiB in memory, or than a file of its size can be.
pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<RgbImage, Error> {
    // A decoder that fails on a damaged file must not end the process.
    let decoded = catch_unwind(|| {
        let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
        if !matches!(reader.format(), Some(ImageFormat::Jpeg | ImageFormat::Png)) {
            return Ok(None);
        }
        if reader.format() == Some(ImageFormat::Jpeg) && !is_whole(bytes) {
            let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "the file is cut off");
            return Err(image::ImageError::IoError(cut));
        }
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(LONGEST), Some(LONGEST));
        let most = SPREAD * bytes.len() as u64 + (32 << 20);
        limits.max_alloc = Some(most.min(MOST_BYTES));
        reader.limits(limits);
        let image = reader.decode()?;
        let mut limits = Limits::default();
        limits.max_alloc = Some(MOST_BYTES);
        limits.reserve(3 * u64::from(image.width()) * u64::from(image.height()))?;
        Ok::<_, image::ImageError>(Some(image.into_rgb8()))
    });
    let advice = "replace it or take it out of the folder";
    let problem = match decoded {
        Ok(Ok(Some(image))) => return Ok(image),
        Ok(Ok(None)) => "is neither a JPEG nor a PNG image".to_owned(),
        Ok(Err(error)) => {
            let reason = error.to_string();
            format!("cannot be decoded ({})", reason.lines().next().unwrap_or("no reason given"))
        }
        Err(_) => "cannot be decoded (the decoder failed)".to_owned(),
    };
    Err(Error::file(path, format!("{problem}; {advice}")))
}
