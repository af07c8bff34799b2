//! The table of contents of a safetensors file.
//!
//! Invariant: entries are in the order of their bytes, cover the data without gap or overlap, and each holds exactly its shape.
//! Read here and not by the library of that name, so that an error can say which tensor, and a hostile header costs no more memory than
//! its own size a few times.

use std::{fmt, io::Read, ops::Range, path::Path};

use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use crate::Error;

/// One tensor.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub(crate) range: Range<usize>,
}

/// The longest header that is read: more than a hundred thousand tensors take. The format would allow 100 MB, of which most could be parsed
/// into several times as much.
pub(super) const HEADER_LIMIT: u64 = 1 << 24;
/// More than any library makes.
const MOST_DIMENSIONS: usize = 64;

/// The entries of a file of `size` bytes, of which no more is read than its header; `path` names it in errors.
pub(crate) fn read(path: &Path, file: &mut impl Read, size: u64) -> Result<Vec<Entry>, Error> {
    let refuse = |problem: String| Error::file(path, format!("is no sound safetensors file: {problem}"));
    let failed = |e| Error::io("read", path, e);
    let Some(rest) = size.checked_sub(8) else {
        return Err(refuse(format!("it holds {size} bytes, its first 8 should be the length of its header")));
    };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT {
        return Err(refuse(format!("it claims a header of {length} bytes, expected at most {HEADER_LIMIT}")));
    }
    if length > rest {
        return Err(refuse(format!("it claims a header of {length} bytes, but holds only {rest} after the first 8")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(failed)?;
    let size = usize::try_from(size).map_err(|_| refuse(format!("it holds {size} bytes, more than this machine can address")))?;
    parse(&header, size).map_err(refuse)
}

/// The entries of a file of `size` bytes that begins with the length of this header and the header.
fn parse(header: &[u8], size: usize) -> Result<Vec<Entry>, String> {
    let Header(mut tensors) = serde_json::from_slice(header).map_err(|e| format!("its header is malformed: {e}"))?;
    tensors.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let start = 8 + header.len();
    let mut end = start;
    let entries = tensors
        .into_iter()
        .map(|(name, Info { dtype, shape, data_offsets: [from, to] })| {
            let (from, to) = (from.saturating_add(start as u64), to.saturating_add(start as u64));
            let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &length| bits.checked_mul(length));
            let Some(bytes) = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8) else {
                return Err(format!("tensor `{name}` cannot have the shape {shape:?}"));
            };
            if from != end as u64 {
                return Err(format!("tensor `{name}` begins at offset {from}, expected {end}, where the data before it ends"));
            }
            let found = i128::from(to) - i128::from(from);
            if found != bytes as i128 {
                return Err(format!("tensor `{name}` {dtype} {shape:?} takes {bytes} bytes, but its offsets {from} to {to} hold {found}"));
            }
            if to > size as u64 {
                return Err(format!("tensor `{name}` ends at offset {to}, but the file at {size}"));
            }
            let range = end..to as usize;
            end = range.end;
            Ok(Entry { name, dtype, shape, range })
        })
        .collect::<Result<Vec<_>, _>>()?;
    if end != size {
        return Err(format!("its tensors end at offset {end}, but the file at {size}"));
    }
    let mut names: Vec<_> = entries.iter().map(|entry| &entry.name).collect();
    names.sort();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(entries),
        Some(pair) => Err(format!("its header names the tensor `{}` twice", pair[0])),
    }
}

struct Header(Vec<(String, Info)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Dtype,
    #[serde(deserialize_with = "shape")]
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let info = map.next_value().map_err(|e| A::Error::custom(format_args!("tensor `{name}`: {e}")))?;
                        tensors.push((name, info));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct Lengths;
    impl<'de> Visitor<'de> for Lengths {
        type Value = Vec<usize>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a shape of at most {MOST_DIMENSIONS} lengths")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut lengths: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(length) = lengths.next_element()? {
                if shape.len() == MOST_DIMENSIONS {
                    return Err(A::Error::invalid_length(MOST_DIMENSIONS + 1, &self));
                }
                shape.push(length);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Lengths)
}
