//! Reading and writing safetensors files tensor by tensor, so that a file of gigabytes is never in memory twice.
//!
//! Invariant: whatever the bytes, opening a file allocates in proportion to its header (at most [`HEADER_LIMIT`]), reading a
//! tensor in proportion to that tensor, which lies inside the file; names are unique and the tensors cover the data exactly.
//! Deliberately absent: which tensors a file should hold.

use std::{
    collections::HashSet,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use serde::de;

use crate::Error;

/// The longest header that is read: some 50,000 tensors.
const HEADER_LIMIT: u64 = 8 << 20;

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 18;

/// How elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    F32,
    F16,
    Bf16,
    U16,
    /// A type that is skipped, never read: its name and bytes an element.
    Other(&'static str, u64),
}

const OTHERS: [Stored; 12] = [
    Stored::Other("BOOL", 1),
    Stored::Other("U8", 1),
    Stored::Other("I8", 1),
    Stored::Other("F8_E4M3", 1),
    Stored::Other("F8_E5M2", 1),
    Stored::Other("I16", 2),
    Stored::Other("I32", 4),
    Stored::Other("U32", 4),
    Stored::Other("I64", 8),
    Stored::Other("U64", 8),
    Stored::Other("F64", 8),
    Stored::Other("C64", 8),
];

impl Stored {
    /// The name in the header.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::U16 => "U16",
            Self::Other(name, _) => name,
        }
    }

    /// Bytes an element.
    pub(crate) fn width(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 | Self::U16 => 2,
            Self::Other(_, width) => width,
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16, Self::U16].into_iter().chain(OTHERS).find(|stored| stored.name() == name)
    }

    /// The value as it will be read back.
    pub(crate) fn round(self, value: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}

/// One tensor of a file; `begin` and `end` are byte offsets from the start of the data.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) stored: Stored,
    pub(crate) shape: Vec<usize>,
    begin: u64,
    end: u64,
}

impl Entry {
    /// How many elements; fits, for the file holds them.
    fn elements(&self) -> usize {
        ((self.end - self.begin) / self.stored.width()) as usize
    }
}

/// A file whose header has been read and validated.
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    /// By offset.
    pub(crate) entries: Vec<Entry>,
}

impl TensorFile {
    /// Reads and validates the header.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let read_error = |e| Error::io("read", path, e);
        let mut file = File::open(path).map_err(read_error)?;
        let size = file.metadata().map_err(read_error)?.len();
        if size < 8 {
            return Err(Error::file(path, format!("is no safetensors file: it holds {size} bytes, the header's length alone takes 8")));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(read_error)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_LIMIT.min(size - 8) {
            return Err(Error::file(
                path,
                format!("is no safetensors file: bytes 0..8 announce a header of {length} bytes, the file holds {size}"),
            ));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(read_error)?;
        let Header(entries) = serde_json::from_slice(&text)
            .map_err(|e| Error::file(path, format!("the safetensors header (bytes 8..{}) is broken: {e}", 8 + length)))?;
        let entries = validate(entries, size - 8 - length).map_err(|problem| Error::file(path, problem))?;
        Ok(Self { path: path.to_owned(), file, data_start: 8 + length, entries })
    }

    /// The values of a float tensor, exactly, as f32; refused unless all are finite.
    pub(crate) fn floats(&mut self, entry: &Entry) -> Result<Vec<f32>, Error> {
        let mut values = Vec::with_capacity(entry.elements());
        match entry.stored {
            Stored::F32 => self.chunks(entry, |bytes| {
                values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))));
            })?,
            Stored::F16 => self.chunks(entry, |bytes| values.extend(halves(bytes).map(|bits| f16::from_bits(bits).to_f32())))?,
            Stored::Bf16 => self.chunks(entry, |bytes| values.extend(halves(bytes).map(|bits| bf16::from_bits(bits).to_f32())))?,
            Stored::U16 | Stored::Other(..) => return Err(self.refuse(entry, "is expected to be F32, F16 or BF16")),
        }
        match first_non_finite(&values) {
            None => Ok(values),
            Some(at) => {
                let offset = self.data_start + entry.begin + at as u64 * entry.stored.width();
                Err(self.refuse(entry, &format!("holds {} at element {at} (byte {offset}); only finite values are read", values[at])))
            }
        }
    }

    /// The values of a u16 tensor.
    pub(crate) fn tiles(&mut self, entry: &Entry) -> Result<Vec<u16>, Error> {
        if entry.stored != Stored::U16 {
            return Err(self.refuse(entry, "is expected to be U16"));
        }
        let mut tiles = Vec::with_capacity(entry.elements());
        self.chunks(entry, |bytes| tiles.extend(halves(bytes)))?;
        Ok(tiles)
    }

    /// An error that names this file and this tensor.
    pub(crate) fn refuse(&self, entry: &Entry, problem: &str) -> Error {
        Error::file(&self.path, format!("tensor {:?} ({} {:?}) {problem}", entry.name, entry.stored.name(), entry.shape))
    }

    fn chunks(&mut self, entry: &Entry, mut take: impl FnMut(&[u8])) -> Result<(), Error> {
        let mut read = || {
            self.file.seek(SeekFrom::Start(self.data_start + entry.begin))?;
            let mut left = entry.end - entry.begin;
            let mut buffer = vec![0; left.min(CHUNK as u64) as usize];
            while left > 0 {
                let now = left.min(CHUNK as u64) as usize;
                self.file.read_exact(&mut buffer[..now])?;
                take(&buffer[..now]);
                left -= now as u64;
            }
            Ok(())
        };
        read().map_err(|e| Error::io("read", &self.path, e))
    }
}

/// The index of the first value that is NaN or infinite.
pub(crate) fn first_non_finite(values: &[f32]) -> Option<usize> {
    // Whole chunks first: the inner loop has no exit and is vectorised.
    let bad = values.chunks(4096).position(|chunk| !chunk.iter().fold(true, |finite, v| finite & v.is_finite()))?;
    values[bad * 4096..].iter().position(|v| !v.is_finite()).map(|at| bad * 4096 + at)
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

/// What a file to be written will hold, in this order.
pub(crate) struct Layout {
    pub(crate) name: String,
    pub(crate) stored: Stored,
    pub(crate) shape: Vec<usize>,
}

/// The bytes before the data: length, JSON, padding to 8. The data of each tensor then follows in the order of the layout.
pub(crate) fn header(metadata: &[(&str, &str)], layout: &[Layout]) -> Vec<u8> {
    let quote = |text: &str| serde_json::Value::from(text).to_string();
    let mut fields = Vec::with_capacity(layout.len() + 1);
    if !metadata.is_empty() {
        let pairs: Vec<_> = metadata.iter().map(|(key, value)| format!("{}:{}", quote(key), quote(value))).collect();
        fields.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut offset = 0;
    for Layout { name, stored, shape } in layout {
        let begin = offset;
        offset += shape.iter().product::<usize>() as u64 * stored.width();
        let shape: Vec<_> = shape.iter().map(usize::to_string).collect();
        fields.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{begin},{offset}]}}",
            quote(name),
            stored.name(),
            shape.join(",")
        ));
    }
    let mut json = format!("{{{}}}", fields.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    bytes
}

/// Hands the stored bytes of `values` to `write`, a chunk at a time; f16 and bf16 round to nearest, ties to even.
///
/// # Panics
/// For a type that holds no floats.
pub(crate) fn write_floats(values: &[f32], stored: Stored, mut write: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    let mut buffer = Vec::with_capacity(CHUNK);
    for chunk in values.chunks(CHUNK / 4) {
        buffer.clear();
        match stored {
            Stored::F32 => buffer.extend(chunk.iter().flat_map(|v| v.to_le_bytes())),
            Stored::F16 => buffer.extend(chunk.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes())),
            Stored::Bf16 => buffer.extend(chunk.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes())),
            Stored::U16 | Stored::Other(..) => panic!("floats are stored as F32, F16 or BF16, not {}", stored.name()),
        }
        write(&buffer)?;
    }
    Ok(())
}

/// Hands the stored bytes of `tiles` to `write`, a chunk at a time.
pub(crate) fn write_tiles(tiles: &[u16], mut write: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    for chunk in tiles.chunks(CHUNK / 2) {
        let bytes: Vec<u8> = chunk.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        write(&bytes)?;
    }
    Ok(())
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The JSON object of a header: a map would hide a name that stands twice.
struct Header(Vec<(String, RawEntry)>);

impl<'de> de::Deserialize<'de> for Header {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Header;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with one entry a tensor")
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let (mut entries, mut seen) = (Vec::new(), HashSet::new());
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("{name:?} stands twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// Types known, extents right, data covered without gap or overlap.
fn validate(raw: Vec<(String, RawEntry)>, data: u64) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::with_capacity(raw.len());
    for (name, RawEntry { dtype, shape, data_offsets: [begin, end] }) in raw {
        let stored = Stored::from_name(&dtype).ok_or_else(|| format!("tensor {name:?}: the type {dtype:?} is unknown"))?;
        let extent = shape.iter().try_fold(stored.width(), |bytes, &length| bytes.checked_mul(length));
        if begin > end || end > data || extent != Some(end - begin) {
            return Err(format!("tensor {name:?}: {dtype} {shape:?} does not fit bytes {begin}..{end} of the {data} bytes of data"));
        }
        let shape = shape.into_iter().map(|length| length as usize).collect();
        entries.push(Entry { name, stored, shape, begin, end });
    }
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    let mut covered = 0;
    for Entry { name, begin, end, .. } in &entries {
        if *begin != covered {
            return Err(format!("tensor {name:?} begins at byte {begin} of the data, expected {covered}"));
        }
        covered = *end;
    }
    if covered == data { Ok(entries) } else { Err(format!("the tensors end at byte {covered} of {data} bytes of data")) }
}
