//! The header of a safetensors file.
//!
//! Invariant: entries are in the order of their bytes, cover the data without gap or overlap, and
//! each holds exactly its shape. The library parses one entry at a time, so that an error names the
//! tensor and a hostile header costs at most five times its own size in memory. Offsets in errors
//! are those of the header: they count from the first byte of data.

use std::{collections::BTreeMap, fmt, io::Read, ops::Range, path::Path};

use safetensors::{Dtype, tensor::TensorInfo};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::{Error, Result};

/// One tensor.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub(crate) range: Range<usize>,
}

impl Entry {
    /// Number of elements; the bytes hold them exactly.
    pub(crate) fn elements(&self) -> usize {
        self.range.len() * 8 / self.dtype.bitsize()
    }
}

/// Longest header of any file, enough for more than 100,000 tensors. A longer one, up to the 100 MB
/// of the format, may take an eighth of its file, so that memory stays below that of the file.
const HEADER_LIMIT: u64 = 1 << 24;
const LONGEST_HEADER: u64 = 100_000_000;

/// The most bytes of headers that files of so many bytes may have.
pub(super) fn header_limit(size: u64) -> u64 {
    HEADER_LIMIT.max(LONGEST_HEADER.min(size / 8))
}

/// Longest name, and longest entry, in bytes: a shape of some hundred dimensions.
const ENTRY_LIMIT: usize = 4096;

/// Reads the entries of a file of `size` bytes, and no more of it than its header; `path` names it
/// in errors. Also returns the offset of the data.
pub(crate) fn read(path: &Path, file: &mut impl Read, size: u64) -> Result<(Vec<Entry>, usize)> {
    let refuse =
        |problem: String| Error::file(path, format!("not a valid safetensors file: {problem}"));
    let failed = |e| Error::io("read", path, e);
    let Some(rest) = size.checked_sub(8) else {
        return Err(refuse(format!("{size} bytes cannot hold the 8 of a header length")));
    };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    let limit = header_limit(size);
    if length > limit {
        return Err(refuse(format!("header length {length} exceeds the limit of {limit} bytes")));
    }
    if length > rest {
        return Err(refuse(format!("header length {length} exceeds the {rest} bytes after it")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(failed)?;
    let size = usize::try_from(size)
        .map_err(|_| refuse(format!("{size} bytes are more than this machine can address")))?;
    let start = 8 + header.len();
    Ok((parse(&header, size - start).map_err(refuse)?, start))
}

/// The entries of a file with this header and `size` bytes of data.
fn parse(header: &[u8], size: usize) -> Result<Vec<Entry>, String> {
    let Header(mut entries) =
        serde_json::from_slice(header).map_err(|e| format!("malformed header: {e}"))?;
    // All in place: one list of 100,000 entries is enough.
    entries.sort_unstable_by(|a, b| {
        (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name))
    });
    let mut end = 0;
    for Entry { name, dtype, shape, range } in &mut entries {
        let (from, to) = (range.start, range.end);
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &length| bits.checked_mul(length));
        let Some(bytes) = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8) else {
            return Err(format!("tensor `{name}` cannot have the shape {shape:?}"));
        };
        if from != end {
            return Err(format!("tensor `{name}` starts at offset {from}, expected {end}"));
        }
        let found = to as i128 - from as i128;
        if found != bytes as i128 {
            return Err(format!(
                "tensor `{name}` {dtype} {shape:?} takes {bytes} bytes, its offsets {from} to \
                    {to} hold {found}"
            ));
        }
        if to > size {
            return Err(format!("tensor `{name}` ends at offset {to}, the data at {size}"));
        }
        *range = range.start + 8 + header.len()..to + 8 + header.len();
        end = to;
    }
    if end != size {
        return Err(format!("its tensors end at offset {end}, the data at {size}"));
    }
    let mut names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(entries),
        Some(pair) => Err(format!("its header names the tensor `{}` twice", pair[0])),
    }
}

/// The entries in the order of the header, with ranges counted from its end.
struct Header(Vec<Entry>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > ENTRY_LIMIT {
                        let length = name.len();
                        return Err(A::Error::custom(format_args!(
                            "a name of {length} bytes, expected at most {ENTRY_LIMIT}"
                        )));
                    }
                    // Names are printed on terminals.
                    if name.contains(char::is_control) {
                        return Err(A::Error::custom(format_args!(
                            "the name {name:?} has control characters, expected none"
                        )));
                    }
                    if name == "__metadata__" {
                        let text = map.next_value::<&RawValue>()?.get();
                        serde_json::from_str::<Option<BTreeMap<Text, Text>>>(text).map_err(
                            |e| A::Error::custom(format_args!("`{name}` expects strings: {e}")),
                        )?;
                        continue;
                    }
                    let entry = info(map.next_value::<&RawValue>()?.get()).map_err(|problem| {
                        A::Error::custom(format_args!("tensor `{name}`: {problem}"))
                    })?;
                    let TensorInfo { dtype, mut shape, data_offsets: (start, end) } = entry;
                    shape.shrink_to_fit();
                    entries.push(Entry { name, dtype, shape, range: start..end });
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// Any string. All are equal, so that a map of them stays small.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(from = "String")]
struct Text;

impl From<String> for Text {
    fn from(_: String) -> Self {
        Self
    }
}

/// Parses one entry. A JSON array is refused, which the library would take for the fields in order
/// and which needs a quarter of the bytes.
fn info(text: &str) -> Result<TensorInfo, String> {
    if text.len() > ENTRY_LIMIT {
        return Err(format!("an entry of {} bytes, expected at most {ENTRY_LIMIT}", text.len()));
    }
    if !text.starts_with('{') {
        return Err("expected an object".to_owned());
    }
    serde_json::from_str(text).map_err(|e| e.to_string())
}
