//! One column of text of a Parquet file.
//!
//! Invariant: no page is read that claims more than [`PAGE`] bytes, so that memory is bounded
//! whatever the file says.

use std::{
    fs::File,
    io::BufReader,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use parquet::{
    basic::{Compression, Type},
    column::reader::ColumnReaderImpl,
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
    let mut number = 0;
    for _ in 0..2 {
        head = head.strip_prefix(&[0x15])?;
        let length = head.iter().take(5).position(|byte| byte & 0x80 == 0)? + 1;
        number =
            head[..length].iter().rev().fold(0, |n: u64, byte| n << 7 | u64::from(byte & 0x7f));
        head = &head[length..];
    }
    (number & 1 == 0).then_some(number >> 1)
}
