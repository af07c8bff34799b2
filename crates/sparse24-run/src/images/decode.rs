//! From a file to pixels: 8 bits per channel, red, green and blue.

use std::{
    io::{self, Cursor},
    panic::catch_unwind,
    path::Path,
};

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};

use crate::{Error, Result, disk};

/// Most bytes of a file.
const LARGEST: u64 = 128 << 20;

/// Most bytes of decoded pixels.
const MOST_BYTES: u64 = 256 << 20;

/// Most bytes that are held at a time, besides tables and a few rows of pixels.
const MOST_HELD: u64 = 576 << 20;

/// Most bytes that one byte of a file stands for, beyond [`HARMLESS`]: as many as in the PNG that
/// deflates best, so that a lying header costs little.
const SPREAD: u64 = 1032;

/// Bytes that any file may take.
const HARMLESS: u64 = 32 << 20;

/// Most pixels of a side.
const LONGEST: u32 = 1 << 15;

/// Most segments of metadata in a JPEG: the decoder sorts its list of them again for each one.
const SEGMENTS: usize = 4096;

/// Most pixels that the scans of a JPEG may touch in all, beyond [`SPREAD`]: each takes about a
/// nanosecond, even where a scan has nothing for it.
const SCANNED: u64 = 1 << 29;

/// Whether a file is an image by its name.
pub(super) fn is_image(path: &Path) -> bool {
    let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    ["jpg", "jpeg", "png"].iter().any(|known| kind.eq_ignore_ascii_case(known))
}

/// The bytes of a file of bounded size.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a larger file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    disk::read_small(path, LARGEST)
}

/// Whether a JPEG has an end of image after its last scan, in whose data the two bytes cannot be.
/// The decoder makes up what a cut file lacks.
fn is_whole(bytes: &[u8]) -> bool {
    let last = |marker: [u8; 2]| bytes.windows(2).rposition(|pair| pair == marker);
    last([0xff, 0xd9]) > last([0xff, 0xda])
}

/// Bytes per pixel of the coefficients that the decoder buffers: two per component if the JPEG is
/// progressive or a scan omits a component, else 0. May be too high, as bytes that look like a
/// marker and those of a thumbnail or a second image count, but entropy-coded data never does.
fn coefficients(bytes: &[u8]) -> u64 {
    let (mut is_progressive, mut scanned, mut most) = (false, u8::MAX, 0);
    for at in bytes.windows(10) {
        match *at {
            [0xff, 0xc0..=0xc2, .., count] => {
                is_progressive |= at[1] == 0xc2;
                most = count.max(most);
            }
            [0xff, 0xda, _, _, count, ..] => scanned = count.min(scanned),
            _ => {}
        }
    }
    if is_progressive || scanned < most { 2 * u64::from(most.min(4)) } else { 0 }
}

/// Most bytes that are held while a JPEG of this many pixels is decoded.
fn held(bytes: &[u8], pixels: u64, is_grey: bool) -> u64 {
    let each_pixel = match is_grey {
        // The grey image, plus the larger of its coefficients (2) and its RGB copy (3).
        true => 1 + 3,
        false => 3 + coefficients(bytes),
    };
    // The file, the decoder's copy of it, and its metadata twice: in segments and joined.
    4 * bytes.len() as u64 + each_pixel * pixels
}

/// The image in the bytes of a file. Grey becomes red, green and blue alike, CMYK is converted, 16
/// bits are rounded to 8, transparency is left out.
///
/// # Errors
/// [`Error::File`] for what is neither a JPEG nor a PNG image, is damaged, or is larger than 2^15
/// pixels on a side or 256 MiB in memory, or than a file of its size can be; and for a JPEG
/// whose decoding may take more than 576 MiB, or whose scans take long for the size of its file.
pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<RgbImage> {
    let refuse = |problem| Err(image::ImageError::IoError(io::Error::other(problem)));
    // A decoder that fails on a damaged file must not end the process.
    let decoded = catch_unwind(|| {
        let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
        let is_jpeg = reader.format() == Some(ImageFormat::Jpeg);
        if !is_jpeg && reader.format() != Some(ImageFormat::Png) {
            return Ok(None);
        }
        if is_jpeg && !is_whole(bytes) {
            return refuse("the file is cut off");
        }
        let mut segments = bytes.windows(2).filter(|at| matches!(at, [0xff, 0xe1 | 0xe2]));
        if is_jpeg && segments.nth(SEGMENTS).is_some() {
            return refuse("it has more than 4096 segments of metadata");
        }
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(LONGEST), Some(LONGEST));
        // Limits what the PNG decoder allocates besides the pixels.
        limits.max_alloc = Some(HARMLESS);
        reader.limits(limits);
        let decoder = reader.into_decoder()?;
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        let most = MOST_BYTES.min(SPREAD * bytes.len() as u64 + HARMLESS);
        if decoder.total_bytes() > most || 3 * pixels > MOST_BYTES {
            return refuse(
                "its pixels take more than 256 MiB, or more than a file of its size can hold",
            );
        }
        let is_grey = !decoder.color_type().has_color();
        let scans = || bytes.windows(2).filter(|pair| *pair == [0xff, 0xda]).count() as u64;
        if is_jpeg && scans().saturating_mul(pixels) > SCANNED + SPREAD * bytes.len() as u64 {
            return refuse("it has more scans than an image of its size needs");
        }
        if is_jpeg && held(bytes, pixels, is_grey) > MOST_HELD {
            return refuse("that may take more than 576 MiB of memory");
        }
        Ok::<_, image::ImageError>(Some(DynamicImage::from_decoder(decoder)?.into_rgb8()))
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
