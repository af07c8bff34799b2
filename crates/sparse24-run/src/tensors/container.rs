//! The table of contents of a safetensors file.
//!
//! Invariant: entries are in the order of their bytes, cover the data without gap or overlap, and
//! each holds exactly its shape. Read here and not by the library of that name, so that an error
//! can say which tensor, and a hostile header costs no more memory than its own size a few times.

use std::{fmt, io::Read, marker::PhantomData, ops::Range, path::Path};

use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
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

impl Entry {
    /// How many; the bytes hold them exactly.
    pub(crate) fn elements(&self) -> usize {
        self.range.len() * 8 / self.dtype.bitsize()
    }
}

/// The longest header that is read: more than a hundred thousand tensors take. The format would
/// allow 100 MB, of which most could be parsed into several times as much.
pub(super) const HEADER_LIMIT: u64 = 1 << 24;
/// More than any library makes.
const MOST_DIMENSIONS: usize = 64;
/// In bytes; no module nests that deep.
const LONGEST_NAME: usize = 4096;

/// The entries of a file of `size` bytes, of which no more is read than its header; `path` names it
/// in errors.
pub(crate) fn read(path: &Path, file: &mut impl Read, size: u64) -> Result<Vec<Entry>, Error> {
    let refuse =
        |problem: String| Error::file(path, format!("is no sound safetensors file: {problem}"));
    let failed = |e| Error::io("read", path, e);
    let Some(rest) = size.checked_sub(8) else {
        return Err(refuse(format!(
            "it holds {size} bytes, its first 8 should be the length of its header"
        )));
    };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT {
        return Err(refuse(format!(
            "it claims a header of {length} bytes, expected at most {HEADER_LIMIT}"
        )));
    }
    if length > rest {
        return Err(refuse(format!(
            "it claims a header of {length} bytes, but holds only {rest} after the first 8"
        )));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(failed)?;
    let size = usize::try_from(size).map_err(|_| {
        refuse(format!("it holds {size} bytes, more than this machine can address"))
    })?;
    parse(&header, size).map_err(refuse)
}

/// The entries of a file of `size` bytes that begins with the length of this header and the header.
fn parse(header: &[u8], size: usize) -> Result<Vec<Entry>, String> {
    let Header(mut entries) =
        serde_json::from_slice(header).map_err(|e| format!("its header is malformed: {e}"))?;
    // In place, as all that follows: of a hundred thousand entries one list is enough.
    entries.sort_unstable_by(|a, b| {
        (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name))
    });
    let start = 8 + header.len();
    let mut end = start;
    for Entry { name, dtype, shape, range } in &mut entries {
        let (from, to) = (range.start.saturating_add(start), range.end.saturating_add(start));
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &length| bits.checked_mul(length));
        let Some(bytes) = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8) else {
            return Err(format!("tensor `{name}` cannot have the shape {shape:?}"));
        };
        if from != end {
            return Err(format!(
                "tensor `{name}` begins at offset {from}, expected {end}, where the data before it ends"
            ));
        }
        let found = to as i128 - from as i128;
        if found != bytes as i128 {
            return Err(format!(
                "tensor `{name}` {dtype} {shape:?} takes {bytes} bytes, but its offsets {from} to {to} hold {found}"
            ));
        }
        if to > size {
            return Err(format!("tensor `{name}` ends at offset {to}, but the file at {size}"));
        }
        *range = end..to;
        end = to;
    }
    if end != size {
        return Err(format!("its tensors end at offset {end}, but the file at {size}"));
    }
    let mut names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(entries),
        Some(pair) => Err(format!("its header names the tensor `{}` twice", pair[0])),
    }
}

/// The entries in the order of the header, their ranges counted from its end.
struct Header(Vec<Entry>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Dtype,
    #[serde(deserialize_with = "shape")]
    shape: Vec<usize>,
    data_offsets: [usize; 2],
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
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > LONGEST_NAME {
                        return Err(A::Error::custom(format_args!(
                            "a name of {} bytes, expected at most {LONGEST_NAME}",
                            name.len()
                        )));
                    }
                    // Names are listed on terminals.
                    if name.contains(char::is_control) {
                        return Err(A::Error::custom(format_args!(
                            "the name {name:?} has control characters, expected none"
                        )));
                    }
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let Object(Info { dtype, shape, data_offsets: [start, end] }) = map
                            .next_value()
                            .map_err(|e| A::Error::custom(format_args!("tensor `{name}`: {e}")))?;
                        entries.push(Entry { name, dtype, shape, range: start..end });
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// What is written as an object; derived, it could be a list of the values alone too, a quarter as
/// long.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
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
            shape.shrink_to_fit();
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Lengths)
}
