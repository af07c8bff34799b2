//! One column of text of a Parquet file.
//!
//! Invariant: no footer is read with more than [`FOOTER`] bytes, [`COLUMNS`] columns or [`DEPTH`]
//! levels of groups, and no page that claims more than [`PAGE`] bytes or, in a delta encoding, more
//! than [`LENGTHS`] values, so that memory is bounded whatever the file says. Time is bounded by
//! [`ROWS`] and [`TEXT`].

use std::{
    fs::File,
    io::BufReader,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use parquet::{
    basic::{Compression, Encoding, Type},
    column::{
        page::{Page, PageMetadata, PageReader},
        reader::ColumnReaderImpl,
    },
    data_type::ByteArrayType,
    errors::{ParquetError, Result as Parquet},
    file::{
        metadata::ParquetMetaDataReader,
        reader::{ChunkReader, Length},
        serialized_reader::SerializedPageReader,
    },
};

use super::{At, Cutter};
use crate::{Error, disk};

/// The largest footer, which takes up to twenty times as much memory.
const FOOTER: usize = 16 << 20;

/// Most columns and groups of columns, and levels of groups: they are read recursively.
const COLUMNS: u64 = 1 << 16;
const DEPTH: usize = 64;

/// Most rows for each byte of a file, beyond a million: a run of nulls of any length takes a few
/// bytes.
const ROWS: u64 = 256;

/// Most bytes of text for each byte of a file, beyond [`PAGE`]: rows may share one text of a
/// dictionary.
const TEXT: u64 = 4096;

/// The largest page. A writer that checks sizes once in a thousand rows makes pages of
/// a hundred megabytes from books.
const PAGE: usize = 128 << 20;

/// Most values of a page in a delta encoding: eight bytes of lengths each are made before the first
/// is read.
const LENGTHS: u64 = PAGE as u64 / 8;

/// Each row is a document, but for null.
pub(super) fn read(path: &Arc<Path>, field: &str, cutter: &mut Cutter<'_>) -> Result<(), Error> {
    let refuse = |problem: String| Error::file(&**path, problem);
    let (file, size) = disk::open(path)?;
    let before = cutter.read.get();
    let file = Arc::new(Pages(file));
    let mut end = [0; 8];
    if size < 12 || disk::read_at(&file.0, size - 8, &mut end).is_err() || end[4..] != *b"PAR1" {
        return Err(refuse("is not a Parquet file, or was cut: its end is missing".to_owned()));
    }
    let footer = u32::from_le_bytes(end[..4].try_into().expect("four bytes"));
    if footer as usize > FOOTER {
        let limit = FOOTER >> 20;
        return Err(refuse(format!("its footer claims {footer} bytes, more than {limit} MiB")));
    }
    let start = size.checked_sub(8 + u64::from(footer));
    let mut metadata = vec![0; footer as usize];
    if start.is_none_or(|start| disk::read_at(&file.0, start, &mut metadata).is_err()) {
        return Err(refuse(format!("its footer claims {footer} bytes, more than it has")));
    }
    let damaged = |e| refuse(format!("its footer is damaged: {e}"));
    match extent(&metadata) {
        None => return Err(damaged(general("it cannot be read"))),
        Some((columns, levels)) if columns > COLUMNS || levels > DEPTH => {
            let limit = format!("expected at most {COLUMNS} in {DEPTH}");
            return Err(refuse(format!("has {columns} columns in {levels} levels, {limit}")));
        }
        Some(_) => {}
    }
    let about =
        guarded(|| ParquetMetaDataReader::new().parse_and_finish(&file.0)).map_err(damaged)?;
    let columns = about.file_metadata().schema_descr().columns();
    let Some(index) = columns.iter().position(|column| column.path().string() == field) else {
        let names: Vec<_> = columns.iter().map(|column| column.path().string()).collect();
        let problem = format!("has no column `{field}`, but {}", names.join(", "));
        return Err(refuse(problem + "; name one of text with --field"));
    };
    let column = &columns[index];
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        return Err(refuse(format!("its column `{field}` is not one of text")));
    }
    let told = about.file_metadata().num_rows();
    if told.unsigned_abs() > (1 << 20) + ROWS * size {
        return Err(refuse(format!("claims {told} rows in {size} bytes")));
    }
    let (mut row, mut left) = (0, PAGE as u64 + TEXT * size);
    for group in about.row_groups() {
        let failed = |row: i64, e: ParquetError| {
            let problem = e.to_string();
            refuse(format!("row {row}: {}", problem.trim_start_matches("Parquet error: ")))
        };
        let chunk = group.column(index);
        let codec = chunk.compression();
        if !matches!(codec, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_))
        {
            return Err(refuse(format!(
                "is compressed with {codec}, expected none, Snappy or Zstandard"
            )));
        }
        let count = group.num_rows() as usize;
        let pages = guarded(|| SerializedPageReader::new(Arc::clone(&file), chunk, count, None))
            .map_err(|e| failed(row + 1, e))?;
        let pages = Checked { pages, has_levels: column.max_def_level() > 0 };
        let mut reader =
            ColumnReaderImpl::<ByteArrayType>::new(Arc::clone(column), Box::new(pages));
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        loop {
            values.clear();
            levels.clear();
            // One by one: the values of a page may share their beginnings.
            let next = || reader.read_records(1, Some(&mut levels), None, &mut values);
            let (count, ..) = guarded(next).map_err(|e| failed(row + 1, e))?;
            if count == 0 || row > told {
                break;
            }
            row += 1;
            cutter.read.set(before + (size as f64 * (row as f64 / told as f64).min(1.0)) as u64);
            let Some(value) = values.first() else { continue };
            let Some(rest) = left.checked_sub(value.len() as u64) else {
                return Err(refuse(format!("row {row}: {TEXT} times as much text as bytes")));
            };
            left = rest;
            let text = std::str::from_utf8(value.data())
                .map_err(|e| refuse(format!("row {row}: is not UTF-8 text: {e}")))?;
            cutter.place(path, At::Row(row as u64));
            cutter.push(text)?;
            cutter.end()?;
        }
    }
    if row != told {
        let found = if row > told { "more" } else { &*row.to_string() };
        return Err(refuse(format!("holds {found} rows, but its footer says {told}")));
    }
    cutter.read.set(before + size);
    Ok(())
}

/// A file whose pages are small enough.
struct Pages(File);

impl Length for Pages {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for Pages {
    type T = BufReader<File>;

    /// Called where the header of a page starts.
    fn get_read(&self, start: u64) -> Parquet<Self::T> {
        let mut head = [0; 32];
        let length = self.len().saturating_sub(start).min(32) as usize;
        disk::read_at(&self.0, start, &mut head[..length])?;
        let size = uncompressed(&head).ok_or_else(|| general("a damaged page header"))?;
        if size > PAGE as u64 {
            let limit = PAGE >> 20;
            let problem = format!(
                "a page of {size} bytes, more than {limit} MiB; write smaller ones, or .jsonl"
            );
            return Err(general(problem));
        }
        self.0.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Parquet<Bytes> {
        if length > PAGE {
            return Err(general(format!("a page of {length} compressed bytes")));
        }
        self.0.get_bytes(start, length)
    }
}

/// The pages of a column, none with too many lengths.
struct Checked<P> {
    pages: P,
    /// Whether values may be null.
    has_levels: bool,
}

impl<P: PageReader> Iterator for Checked<P> {
    type Item = Parquet<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl<P: PageReader> PageReader for Checked<P> {
    fn get_next_page(&mut self) -> Parquet<Option<Page>> {
        let page = self.pages.get_next_page()?;
        page.iter().try_for_each(|page| check_lengths(page, self.has_levels))?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Parquet<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Parquet<()> {
        self.pages.skip_next_page()
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

/// Takes a number in seven bits of each byte, the lowest first.
fn number(data: &mut &[u8]) -> Option<u64> {
    let length = data.iter().take(10).position(|byte| byte & 0x80 == 0)? + 1;
    let bytes = data.split_off(..length)?;
    Some(bytes.iter().rev().fold(0, |n: u64, byte| n << 7 | u64::from(byte & 0x7f)))
}

/// The columns and groups of the schema, the second member of a footer in Thrift's compact
/// protocol, and its levels; none if the footer is damaged.
fn extent(mut footer: &[u8]) -> Option<(u64, usize)> {
    let (mut columns, mut levels) = (0, 0);
    members(&mut footer, &mut |id, kind, data| {
        if (id, kind) != (2, LIST) {
            return skip(data, kind, DEPTH);
        }
        (columns, _) = list(data)?;
        // How many children each open group still lacks.
        let mut open = Vec::new();
        for _ in 0..columns {
            let mut children = 0;
            members(data, &mut |id, kind, data| match (id, kind) {
                (5, 5) => number(data).map(|count| children = count / 2),
                _ => skip(data, kind, DEPTH),
            })?;
            while open.pop_if(|left| *left == 0).is_some() {}
            open.last_mut().into_iter().for_each(|left| *left -= 1);
            open.push(children);
            levels = levels.max(open.len());
        }
        Some(())
    })?;
    Some((columns, levels))
}

/// Thrift's code of a list.
const LIST: u8 = 9;

type Member<'a> = dyn FnMut(u64, u8, &mut &[u8]) -> Option<()> + 'a;

/// Gives the id and the kind of each member of a struct to `take`, which takes its data.
fn members(data: &mut &[u8], take: &mut Member<'_>) -> Option<()> {
    let mut id = 0;
    loop {
        let head = *data.split_off_first()?;
        match head >> 4 {
            _ if head == 0 => return Some(()),
            0 => id = number(data)? / 2,
            step => id += u64::from(step),
        }
        take(id, head & 15, data)?;
    }
}

/// The length of a list and the kind of its elements.
fn list(data: &mut &[u8]) -> Option<(u64, u8)> {
    let head = *data.split_off_first()?;
    let count = if head >> 4 == 15 { number(data)? } else { u64::from(head >> 4) };
    Some((count, head & 15))
}

/// Skips a value of a kind that has at most `depth` levels.
fn skip(data: &mut &[u8], kind: u8, depth: usize) -> Option<()> {
    let depth = depth.checked_sub(1)?;
    match kind {
        // A member that is true or false is its kind.
        1 | 2 => {}
        3 => drop(data.split_off_first()?),
        4..=6 => drop(number(data)?),
        7 => drop(data.split_off(..8)?),
        8 => {
            let length = number(data)?;
            data.split_off(..usize::try_from(length).ok()?)?;
        }
        LIST | 10 => {
            let (count, kind) = list(data)?;
            for _ in 0..count {
                skip(data, if kind < 3 { 3 } else { kind }, depth)?;
            }
        }
        12 => members(data, &mut |_, kind, data| skip(data, kind, depth))?,
        _ => return None,
    }
    Some(())
}

/// The reader panics at some kinds of damage.
fn guarded<T>(read: impl FnOnce() -> Parquet<T>) -> Parquet<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(general("damaged data")))
}

fn general(problem: impl Into<String>) -> ParquetError {
    ParquetError::General(problem.into())
}

/// The size of a page, the second member of its header: in Thrift's compact protocol, each of the
/// first is a byte (one on from the member before it, of type i32) and a zigzag number.
fn uncompressed(mut head: &[u8]) -> Option<u64> {
    let mut size = 0;
    for _ in 0..2 {
        head = head.strip_prefix(&[0x15])?;
        size = number(&mut head)?;
    }
    (size & 1 == 0).then_some(size >> 1)
}

#[cfg(test)]
mod tests {
    use super::extent;

    /// A footer with groups of one column each, and then columns.
    fn footer(groups: u16, columns: u32) -> Vec<u8> {
        let count = u32::from(groups) + columns;
        let count =
            (0..3).map(|part| (count >> (7 * part)) as u8 & 0x7f | if part < 2 { 0x80 } else { 0 });
        let mut bytes = vec![0x15, 2, 0x19, 0xfc];
        bytes.extend(count);
        (0..groups).for_each(|_| bytes.extend([0x48, 1, b'g', 0x15, 2, 0]));
        (0..columns).for_each(|_| bytes.extend([0x15, 12, 0x38, 1, b'c', 0]));
        bytes.extend([0x16, 2, 0]);
        bytes
    }

    #[test]
    fn the_extent_of_a_schema() {
        for (groups, columns) in [(0, 3), (63, 1), (64, 1), (60_000, 1), (1, 70_000)] {
            let expected = (u64::from(groups) + u64::from(columns), usize::from(groups) + 1);
            assert_eq!(extent(&footer(groups, columns)), Some(expected));
        }
        let whole = footer(5, 1);
        for length in 0..whole.len() {
            assert_eq!(extent(&whole[..length]), None, "{length} bytes");
        }
    }
}
