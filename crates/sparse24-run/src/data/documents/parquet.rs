//! One column of text of a Parquet file.
//!
//! Invariant: no page is read that claims more than [`PAGE`] bytes or, in a delta encoding, more
//! than [`LENGTHS`] values, so that memory is bounded whatever the file says.

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

/// The largest page and footer. A writer that checks sizes once in a thousand rows makes pages of
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
    if footer as usize > PAGE {
        let limit = PAGE >> 20;
        return Err(refuse(format!("its footer claims {footer} bytes, more than {limit} MiB")));
    }
    let about = guarded(|| ParquetMetaDataReader::new().parse_and_finish(&file.0))
        .map_err(|e| refuse(format!("its footer is damaged: {e}")))?;
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
    let mut row = 0;
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
            if count == 0 {
                break;
            }
            row += 1;
            cutter.read.set(before + (size as f64 * (row as f64 / told as f64).min(1.0)) as u64);
            let Some(value) = values.first() else { continue };
            let text = std::str::from_utf8(value.data())
                .map_err(|e| refuse(format!("row {row}: is not UTF-8 text: {e}")))?;
            cutter.place(path, At::Row(row as u64));
            cutter.push(text)?;
            cutter.end()?;
        }
    }
    if row != told {
        return Err(refuse(format!("holds {row} rows, but its footer says {told}")));
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
