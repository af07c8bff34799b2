//! Reads and writes safetensors files tensor by tensor, so that a file of gigabytes is never in
//! memory twice; a model may have one file or several ([`shards`]).
//!
//! Invariant: whatever the bytes, opening a file allocates in proportion to its header, and reading
//! a tensor in proportion to that tensor, which lies inside the file.

mod container;
pub(crate) mod shards;

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

pub(crate) use container::{Entry, read as read_header};
use half::{bf16, f16};
use safetensors::Dtype;
pub(crate) use shards::{Shards, WEIGHTS};

use crate::{Error, Result, disk};

/// Bytes converted at a time.
const CHUNK: usize = 1 << 18;

/// A file whose header has been read and validated.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    file: File,
    /// In the order of their bytes, which end with the file.
    pub(crate) entries: Vec<Entry>,
    /// Bytes of the file.
    pub(crate) size: usize,
    /// Bytes before those of the first tensor.
    pub(crate) start: usize,
}

impl TensorFile {
    /// Reads and validates the header.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let (mut file, size) = disk::open(path)?;
        let (entries, start) = container::read(path, &mut file, size)?;
        Ok(Self { path: path.to_owned(), file, entries, size: size as usize, start })
    }

    /// The values of a float tensor, exactly, as f32; refused unless all are finite.
    pub(crate) fn floats(&self, entry: &Entry) -> Result<Vec<f32>> {
        let mut values = self.buffer(entry)?;
        self.float_pieces(entry, CHUNK / 4, |piece| values.extend_from_slice(piece))?;
        Ok(values)
    }

    /// An empty list with capacity for the values of a tensor.
    pub(crate) fn buffer<T>(&self, entry: &Entry) -> Result<Vec<T>> {
        disk::reserve(&self.path, entry.elements())
    }

    /// Like [`TensorFile::floats`], but hands the values to `take` in pieces of `length`; the last
    /// piece may be shorter.
    pub(crate) fn float_pieces(
        &self,
        entry: &Entry,
        length: usize,
        mut take: impl FnMut(&[f32]),
    ) -> Result {
        let width = match entry.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            _ => return Err(self.refuse(entry, "is expected to be F32, F16 or BF16")),
        };
        let length = length.min(entry.elements()).max(1);
        let (mut buffer, mut values) =
            (disk::reserve(&self.path, length * width)?, disk::reserve(&self.path, length)?);
        for start in entry.range.clone().step_by(length * width) {
            self.read(start..entry.range.end.min(start + length * width), &mut buffer)?;
            values.clear();
            match entry.dtype {
                Dtype::F32 => values.extend(decoded(&buffer, f32::from_le_bytes)),
                Dtype::F16 => {
                    values.extend(decoded(&buffer, |b| f16::from_le_bytes(b).to_f32()));
                }
                _ => values.extend(decoded(&buffer, |b| bf16::from_le_bytes(b).to_f32())),
            }
            if let Some(at) = first_non_finite(&values) {
                let (value, offset) = (values[at], start + at * width);
                let element = (offset - entry.range.start) / width;
                let problem = format!(
                    "holds {value} at element {element} (byte {offset}); only finite values are \
                        read"
                );
                return Err(self.refuse(entry, &problem));
            }
            take(&values);
        }
        Ok(())
    }

    /// The values of an integer tensor of this type, which has `W` bytes per element.
    pub(crate) fn integers<T, const W: usize>(
        &self,
        entry: &Entry,
        dtype: Dtype,
        value: fn([u8; W]) -> T,
    ) -> Result<Vec<T>> {
        if entry.dtype != dtype {
            return Err(self.refuse(entry, &format!("is expected to be {dtype}")));
        }
        let mut values = self.buffer(entry)?;
        let mut buffer = Vec::with_capacity(entry.range.len().min(CHUNK));
        for start in entry.range.clone().step_by(CHUNK) {
            self.read(start..entry.range.end.min(start + CHUNK), &mut buffer)?;
            values.extend(decoded(&buffer, value));
        }
        Ok(values)
    }

    /// An error that names this file and this tensor.
    pub(crate) fn refuse(&self, entry: &Entry, problem: &str) -> Error {
        Error::file(
            &self.path,
            format!("tensor {:?} ({} {:?}) {problem}", entry.name, entry.dtype, entry.shape),
        )
    }

    /// Fills `buffer` with these bytes of the file.
    pub(crate) fn read(&self, range: Range<usize>, buffer: &mut Vec<u8>) -> Result {
        buffer.resize(range.len(), 0);
        disk::read_at(&self.file, range.start as u64, buffer)
            .map_err(|e| Error::io("read", &self.path, e))
    }
}

fn decoded<T, const W: usize>(
    bytes: &[u8],
    value: impl Fn([u8; W]) -> T,
) -> impl Iterator<Item = T> {
    let (values, _) = bytes.as_chunks();
    values.iter().map(move |&bytes| value(bytes))
}

/// The index of the first value that is NaN or infinite.
pub(crate) fn first_non_finite(values: &[f32]) -> Option<usize> {
    // Whole chunks first: the inner loop has no exit and is vectorized.
    let bad = values
        .chunks(4096)
        .position(|chunk| !chunk.iter().fold(true, |finite, v| finite & v.is_finite()))?;
    values[bad * 4096..].iter().position(|v| !v.is_finite()).map(|at| bad * 4096 + at)
}

/// A tensor of a file to be written.
pub(crate) struct Layout {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

/// The bytes before the data: length, JSON, padding to 8. The data of the tensors then follow in
/// the order of the layout.
pub(crate) fn header(metadata: &[(&str, &str)], layout: &[Layout]) -> Vec<u8> {
    let quote = |text: &str| serde_json::Value::from(text).to_string();
    let mut fields = Vec::with_capacity(layout.len() + 1);
    if !metadata.is_empty() {
        let pairs: Vec<_> = metadata
            .iter()
            .map(|(key, value)| format!("{}:{}", quote(key), quote(value)))
            .collect();
        fields.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut offset = 0;
    for Layout { name, dtype, shape } in layout {
        let begin = offset;
        offset += shape.iter().product::<usize>() * (dtype.bitsize() / 8);
        let shape: Vec<_> = shape.iter().map(usize::to_string).collect();
        let shape = shape.join(",");
        fields.push(format!(
            "{}:{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{begin},{offset}]}}",
            quote(name)
        ));
    }
    let mut json = format!("{{{}}}", fields.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    bytes
}

/// The value as it is read back after [`write_floats`].
pub(crate) fn round(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Hands the stored bytes of `values` to `write`, a chunk at a time; f16 and bf16 round to nearest,
/// ties to even.
///
/// # Panics
/// For a type other than F32, F16 and BF16.
pub(crate) fn write_floats(
    values: &[f32],
    dtype: Dtype,
    sink: impl FnMut(&[u8]) -> Result,
) -> Result {
    match dtype {
        Dtype::F32 => write(values, f32::to_le_bytes, sink),
        Dtype::F16 => write(values, |v| f16::from_f32(v).to_le_bytes(), sink),
        Dtype::BF16 => write(values, |v| bf16::from_f32(v).to_le_bytes(), sink),
        _ => panic!("floats are stored as F32, F16 or BF16, not {dtype}"),
    }
}

/// Hands the bytes of `values` to `sink`, a chunk at a time.
pub(crate) fn write<T: Copy, const W: usize>(
    values: &[T],
    bytes: impl Fn(T) -> [u8; W],
    mut sink: impl FnMut(&[u8]) -> Result,
) -> Result {
    let mut buffer = Vec::new();
    for chunk in values.chunks(CHUNK / W) {
        // A loop without growth is vectorized.
        buffer.resize(W * chunk.len(), 0);
        let (places, _) = buffer.as_chunks_mut();
        for (place, &value) in places.iter_mut().zip(chunk) {
            *place = bytes(value);
        }
        sink(&buffer)?;
    }
    Ok(())
}
