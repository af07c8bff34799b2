//! One column of text of a Parquet file.
//!
//! Invariant: footers and the headers of pages are read here, in linear time and without recursion
//! beyond [`DEPTH`]; the library decodes only the values of a page. No footer has more than
//! [`FOOTER`] bytes, no page more than [`PAGE`], no dictionary more than [`ENTRIES`] texts and no
//! page in a delta encoding more than [`LENGTHS`] values, so that memory is bounded whatever the
//! file claims. Time is bounded by [`ROWS`] and [`TIMES`].

use std::{
    cell::Cell,
    fs::File,
    panic::{self, AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Once,
        mpsc::{Receiver, channel},
    },
};

use parquet::{
    basic::{Encoding, Type},
    column::{
        page::{Page, PageMetadata, PageReader},
        reader::ColumnReaderImpl,
    },
    data_type::ByteArrayType,
    errors::{ParquetError, Result as Parquet},
    schema::types::{ColumnDescriptor, ColumnPath, Type as Schema},
};
use snap::raw::Decoder as Snappy;

use self::thrift::{
    BYTES, DEPTH, LIST, Numbers, STRUCT, bytes, ignore, members, number, numbers, skip, structs,
};
use super::{At, Cutter};
use crate::{Error, disk};

mod thrift;

/// The largest footer.
const FOOTER: usize = 16 << 20;

/// Most rows for each byte of a file, beyond a million: a run of nulls of any length takes a few
/// bytes.
const ROWS: u64 = 256;

/// Most bytes of text, and of pages, for each byte of a file, beyond [`PAGE`]: rows may share one
/// text of a dictionary, row groups may share pages, and pages may be zeros.
const TIMES: u64 = 4096;

/// The largest page. A writer that checks sizes once in a thousand rows makes pages of
/// a hundred megabytes from books.
const PAGE: usize = 128 << 20;

/// Most values of a page in a delta encoding: eight bytes of lengths each are made before the first
/// is read.
const LENGTHS: u64 = PAGE as u64 / 8;

/// Most texts of a dictionary: each has a handle of 32 bytes.
const ENTRIES: usize = PAGE / 32;

/// Kinds of pages.
const DATA: u32 = 0;
const INDEX: u32 = 1;
const DICTIONARY: u32 = 2;
const DATA_V2: u32 = 3;

/// Names of the codecs, by number.
const CODECS: [&str; 8] =
    ["no codec", "Snappy", "gzip", "LZO", "Brotli", "LZ4", "Zstandard", "raw LZ4"];
const SNAPPY: u64 = 1;
const ZSTANDARD: u64 = 6;

/// Each row is a document, but for null.
pub(super) fn read(path: &Arc<Path>, field: &str, cutter: &mut Cutter<'_>) -> Result<(), Error> {
    let refuse = |problem: String| Error::file(&**path, problem);
    let (file, size) = disk::open(path)?;
    let before = cutter.read.get();
    let mut end = [0; 8];
    if size < 12 || disk::read_at(&file, size - 8, &mut end).is_err() || end[4..] != *b"PAR1" {
        return Err(refuse("is not a Parquet file, or was cut: its end is missing".to_owned()));
    }
    let length = u32::from_le_bytes(end[..4].try_into().expect("four bytes"));
    if length as usize > FOOTER {
        let limit = FOOTER >> 20;
        return Err(refuse(format!("its footer claims {length} bytes, more than {limit} MiB")));
    }
    let start = size.checked_sub(8 + u64::from(length));
    let mut bytes = vec![0; length as usize];
    if start.is_none_or(|start| disk::read_at(&file, start, &mut bytes).is_err()) {
        return Err(refuse(format!("its footer claims {length} bytes, more than it has")));
    }
    let Some(footer) = Footer::read(&bytes, field) else {
        let problem = "its footer is damaged, or nests columns more than";
        return Err(refuse(format!("{problem} {DEPTH} deep")));
    };
    drop(bytes);
    let Some(Column { is_text, levels, .. }) = footer.column else {
        let names = footer.names;
        let problem = format!("has no column `{field}`, but {names}");
        return Err(refuse(problem + "; name one of text with --field"));
    };
    if !is_text {
        return Err(refuse(format!("its column `{field}` is not one of text")));
    }
    let told = footer.rows;
    if told.unsigned_abs() > ROWS.saturating_mul(size).saturating_add(1 << 20) {
        return Err(refuse(format!("claims {told} rows in {size} bytes")));
    }
    let mismatch = |found| refuse(format!("holds {found} rows, but its footer says {told}"));
    let schema = Schema::primitive_type_builder(field, Type::BYTE_ARRAY).build();
    let (schema, name) = (schema.expect("a column of bytes"), ColumnPath::from(field));
    let column = Arc::new(ColumnDescriptor::new(Arc::new(schema), levels, 0, name));
    let (mut row, mut left) = (0, TIMES.saturating_mul(size).saturating_add(PAGE as u64));
    let mut pages = Pages { file, left, has_levels: levels > 0 };
    let failed = |row: i64, e: ParquetError| {
        let problem = e.to_string();
        refuse(format!("row {row}: {}", problem.trim_start_matches("Parquet error: ")))
    };
    for mut chunk in footer.chunks {
        if !matches!(chunk.codec, 0 | SNAPPY | ZSTANDARD) {
            let codec = CODECS.get(chunk.codec as usize).unwrap_or(&"an unknown codec");
            return Err(refuse(format!(
                "is compressed with {codec}, expected none, Snappy or Zstandard"
            )));
        }
        let (queue, next) = channel();
        let column = Arc::clone(&column);
        let mut reader = ColumnReaderImpl::<ByteArrayType>::new(column, Box::new(Queue(next)));
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        while chunk.length > 0 {
            cutter.pause()?;
            let page = pages.next(&mut chunk).map_err(|e| failed(row + 1, e))?;
            let Some(page) = page else { continue };
            queue.send(page).expect("the reader has the other end");
            loop {
                values.clear();
                levels.clear();
                // One by one: the values of a page may share their beginnings.
                let next = || reader.read_records(1, Some(&mut levels), None, &mut values);
                let (count, ..) = guarded(next).map_err(|e| failed(row + 1, e))?;
                if count == 0 {
                    break;
                }
                if row >= told {
                    return Err(mismatch("more".to_owned()));
                }
                row += 1;
                let done = size as f64 * (row as f64 / told as f64);
                cutter.read.set(before + done as u64);
                if row % 0x1_0000 == 0 {
                    cutter.pause()?;
                }
                let Some(value) = values.first() else { continue };
                let Some(rest) = left.checked_sub(value.len() as u64) else {
                    return Err(refuse(format!("row {row}: {TIMES} times as much text as bytes")));
                };
                left = rest;
                let text = std::str::from_utf8(value.data())
                    .map_err(|e| refuse(format!("row {row}: is not UTF-8 text: {e}")))?;
                cutter.place(path, At::Row(row as u64));
                cutter.push(text)?;
                cutter.end()?;
            }
        }
    }
    if row != told {
        return Err(mismatch(row.to_string()));
    }
    cutter.read.set(before + size);
    Ok(())
}

/// The parts of a footer that matter for one column.
#[derive(Default)]
struct Footer {
    rows: i64,
    column: Option<Column>,
    /// Names of other columns, cut if they are many or long.
    names: String,
    /// The column in each row group.
    chunks: Vec<Chunk>,
}

struct Column {
    index: usize,
    is_text: bool,
    /// Maximum definition level.
    levels: i16,
}

/// The pages of a column in a row group that are still to be read.
struct Chunk {
    codec: u64,
    start: u64,
    length: u64,
}

/// A group of columns whose children follow.
#[derive(Clone, Copy)]
struct Group {
    /// How many children are still to come.
    left: i64,
    /// Length of its path.
    path: usize,
    levels: i16,
    is_repeated: bool,
}

impl Footer {
    fn read(mut data: &[u8], field: &str) -> Option<Self> {
        let mut footer = Self::default();
        let own = numbers(&mut data, &mut |id, kind, data| match (id, kind) {
            (2, LIST) => footer.schema(data, field),
            (4, LIST) => structs(data, &mut |data| footer.group(data)),
            (2 | 4, _) => None,
            _ => skip(data, kind, DEPTH),
        })?;
        footer.rows = own[3]?;
        (footer.column.is_some() || !footer.names.is_empty()).then_some(footer)
    }

    /// Finds the column `field` among the elements of a schema, in which children follow their
    /// group.
    fn schema(&mut self, data: &mut &[u8], field: &str) -> Option<()> {
        let (mut path, mut index) = (String::new(), 0);
        let mut open = vec![Group { left: 1, path: 0, levels: 0, is_repeated: false }];
        structs(data, &mut |data| {
            let mut name = None;
            let own = numbers(data, &mut |id, kind, data| match (id, kind) {
                (4, BYTES) => bytes(data).map(|bytes| name = Some(bytes.to_vec())),
                _ => skip(data, kind, DEPTH),
            })?;
            while open.pop_if(|group| group.left == 0).is_some() {}
            let parent = open.last_mut()?;
            parent.left = parent.left.checked_sub(1)?;
            let mut group = Group { left: own[5].unwrap_or(0), ..*parent };
            // Names and levels start below the root.
            if open.len() > 1 {
                path.truncate(group.path);
                path.push_str(if path.is_empty() { "" } else { "." });
                path.push_str(&String::from_utf8(name?).ok()?);
                let repetition = own[3]?;
                group.path = path.len();
                group.levels += i16::from(repetition != 0);
                group.is_repeated |= repetition == 2;
            }
            if group.left != 0 || own[1].is_none() {
                open.push(group);
                return (open.len() <= DEPTH).then_some(());
            }
            if path == field {
                let is_text = own[1] == Some(Type::BYTE_ARRAY as i64) && !group.is_repeated;
                self.column.get_or_insert(Column { index, is_text, levels: group.levels });
            } else if self.names.len() < 1000 {
                self.names += if self.names.is_empty() { "" } else { ", " };
                self.names.extend(path.chars().take(100));
            }
            index += 1;
            Some(())
        })?;
        open.iter().all(|group| group.left == 0).then_some(())
    }

    /// Finds the column in a row group.
    fn group(&mut self, data: &mut &[u8]) -> Option<()> {
        let Some(Column { index, .. }) = self.column else { return skip(data, STRUCT, DEPTH) };
        let (mut number, mut chunk) = (0, None);
        numbers(data, &mut |id, kind, data| match (id, kind) {
            (1, LIST) => structs(data, &mut |data| {
                members(data, &mut |id, kind, data| match (id, kind) {
                    (3, STRUCT) if number == index => {
                        chunk = Some(numbers(data, &mut ignore)?);
                        Some(())
                    }
                    _ => skip(data, kind, DEPTH),
                })?;
                number += 1;
                Some(())
            }),
            _ => skip(data, kind, DEPTH),
        })?;
        let own = chunk?;
        // Some writers have a dictionary at 0 where there is none.
        let start = own[11].filter(|&at| at > 0).or(own[9]);
        let [codec, start, length] = [own[4], start, own[7]].map(|n| u64::try_from(n?).ok());
        self.chunks.push(Chunk { codec: codec?, start: start?, length: length? });
        Some(())
    }
}

/// Reads the pages of a file, within a budget.
struct Pages {
    file: File,
    /// How many bytes may still be read and decompressed.
    left: u64,
    /// Whether values may be null.
    has_levels: bool,
}

impl Pages {
    fn charge(&mut self, bytes: u64) -> Parquet<()> {
        let problem = || general(format!("pages of over {TIMES} times the size of the file"));
        self.left = self.left.checked_sub(bytes).ok_or_else(problem)?;
        Ok(())
    }

    fn bytes(&mut self, start: u64, length: u64) -> Parquet<Vec<u8>> {
        self.charge(length)?;
        let mut bytes = vec![0; length as usize];
        disk::read_at(&self.file, start, &mut bytes)?;
        Ok(bytes)
    }

    /// The next page of a chunk; `None` for an index page.
    fn next(&mut self, chunk: &mut Chunk) -> Parquet<Option<Page>> {
        let damaged = || general("a damaged page header");
        // Headers with statistics may be long.
        let mut most = 1 << 12;
        let (outer, (id, inner), header) = loop {
            let bytes = self.bytes(chunk.start, chunk.length.min(most))?;
            let (mut rest, mut inner) = (&bytes[..], (0, Numbers::default()));
            let outer = numbers(&mut rest, &mut |id, kind, data| match (id, kind) {
                (5 | 7 | 8, STRUCT) => numbers(data, &mut ignore).map(|own| inner = (id, own)),
                _ => skip(data, kind, DEPTH),
            });
            if let Some(outer) = outer {
                break (outer, inner, (bytes.len() - rest.len()) as u64);
            }
            if chunk.length <= most || most > FOOTER as u64 {
                return Err(damaged());
            }
            most *= 4;
        };
        let number = |of: &Numbers, id: usize| {
            of[id].and_then(|n| u32::try_from(n).ok()).ok_or_else(damaged)
        };
        let own = |id| number(&inner, id);
        let encoding = |id: usize| {
            let find = |n| Encoding::VARIANTS.iter().copied().find(|&known| known as i64 == n);
            inner[id].and_then(find).ok_or_else(damaged)
        };
        let (size, length) = (number(&outer, 2)? as usize, number(&outer, 3)? as usize);
        if size.max(length) > PAGE {
            let (size, limit) = (size.max(length), PAGE >> 20);
            let problem = format!("a page of {size} bytes, more than {limit} MiB");
            return Err(general(problem + "; write smaller ones, or .jsonl"));
        }
        let start = chunk.start + header;
        chunk.length = chunk.length.checked_sub(header + length as u64).ok_or_else(damaged)?;
        chunk.start = start + length as u64;
        let (mut codec, mut levels) = (chunk.codec, 0);
        match (number(&outer, 1)?, id) {
            (INDEX, _) => return Ok(None),
            (DATA, 5) => {}
            (DICTIONARY, 7) => {
                let (count, most) = (own(1)?, ENTRIES.min(size / 4));
                if count as usize > most {
                    let problem = format!("a dictionary of {count} texts in {size} bytes");
                    return Err(general(problem));
                }
            }
            (DATA_V2, 8) => {
                levels = own(5)? as usize + own(6)? as usize;
                if inner[7] == Some(0) {
                    codec = 0;
                }
            }
            _ => return Err(damaged()),
        }
        let mut data = self.bytes(start, length as u64)?;
        if codec != 0 {
            self.charge(size as u64)?;
            let damaged = || general(format!("a page without the {size} bytes it claims"));
            let packed = data.split_off(levels.min(length));
            data.resize(size, 0);
            let rest = data.get_mut(levels..).ok_or_else(damaged)?;
            let count = match codec {
                _ if rest.is_empty() => 0,
                SNAPPY => Snappy::new().decompress(&packed, rest).map_err(|_| damaged())?,
                _ => zstd::bulk::decompress_to_buffer(&packed, rest).map_err(|_| damaged())?,
            };
            if count != rest.len() {
                return Err(damaged());
            }
        }
        let buf = data.into();
        let page = match id {
            5 => Page::DataPage {
                buf,
                num_values: own(1)?,
                encoding: encoding(2)?,
                def_level_encoding: encoding(3)?,
                rep_level_encoding: encoding(4)?,
                statistics: None,
            },
            7 => Page::DictionaryPage {
                buf,
                num_values: own(1)?,
                encoding: encoding(2)?,
                is_sorted: false,
            },
            _ => Page::DataPageV2 {
                buf,
                num_values: own(1)?,
                encoding: encoding(4)?,
                num_nulls: own(2)?,
                num_rows: own(3)?,
                def_levels_byte_len: own(5)?,
                rep_levels_byte_len: own(6)?,
                is_compressed: false,
                statistics: None,
            },
        };
        check_lengths(&page, self.has_levels)?;
        Ok(Some(page))
    }
}

/// At most one page: [`read`] sends each page as it is needed.
struct Queue(Receiver<Page>);

impl Iterator for Queue {
    type Item = Parquet<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Queue {
    fn get_next_page(&mut self) -> Parquet<Option<Page>> {
        Ok(self.0.try_recv().ok())
    }

    fn peek_next_page(&mut self) -> Parquet<Option<PageMetadata>> {
        Ok(None)
    }

    fn skip_next_page(&mut self) -> Parquet<()> {
        Ok(())
    }
}

/// Refuses a page with more than [`LENGTHS`] values in a delta encoding.
fn check_lengths(page: &Page, has_levels: bool) -> Parquet<()> {
    let kinds = match page.encoding() {
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        Encoding::DELTA_BYTE_ARRAY => 2,
        _ => return Ok(()),
    };
    let mut data = &page.buffer()[..];
    let levels = match page {
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            Some(*def_levels_byte_len as usize + *rep_levels_byte_len as usize)
        }
        Page::DataPage { def_level_encoding: Encoding::RLE, .. } if has_levels => {
            let length = data.split_off(..4).and_then(|length| length.try_into().ok());
            length.map(|length| u32::from_le_bytes(length) as usize)
        }
        _ => (!has_levels).then_some(0),
    };
    let damaged = || general("damaged lengths");
    levels.and_then(|levels| data.split_off(..levels)).ok_or_else(damaged)?;
    for _ in 0..kinds {
        let count = skip_deltas(&mut data).ok_or_else(damaged)?;
        if count > LENGTHS {
            return Err(general(format!("a page of {count} values, more than {LENGTHS}")));
        }
    }
    Ok(())
}

/// Skips numbers in the encoding DELTA_BINARY_PACKED, unless they are too many. Returns how many
/// they are.
fn skip_deltas(data: &mut &[u8]) -> Option<u64> {
    let (block, parts, count) = (number(data)?, number(data)?, number(data)?);
    number(data)?;
    if count > LENGTHS {
        return Some(count);
    }
    let part = block.checked_div(parts).filter(|&part| part > 0)?;
    let mut left = count.saturating_sub(1);
    while left > 0 {
        number(data)?;
        for &width in data.split_off(..usize::try_from(parts).ok()?)? {
            if left == 0 {
                break;
            }
            let bytes = u64::from(width).checked_mul(part)? / 8;
            data.split_off(..usize::try_from(bytes).ok()?)?;
            left = left.saturating_sub(part);
        }
    }
    Some(count)
}

/// Turns a panic of the reader on damaged data into an error, silently.
fn guarded<T>(read: impl FnOnce() -> Parquet<T>) -> Parquet<T> {
    thread_local!(static IS_GUARDED: Cell<bool> = const { Cell::new(false) });
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                hook(panic)
            }
        }));
    });
    IS_GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(read));
    IS_GUARDED.set(false);
    result.unwrap_or_else(|_| Err(general("damaged data")))
}

fn general(problem: impl Into<String>) -> ParquetError {
    ParquetError::General(problem.into())
}

#[cfg(test)]
mod tests;
