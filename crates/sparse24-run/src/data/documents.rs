//! Reads the documents of a corpus of any size: text, JSON lines and Parquet, text and lines also
//! compressed with Zstandard.
//!
//! Invariant: memory is bounded, whatever the files hold. Batches, encoded one by one and in order,
//! give the tokens of the whole.

use std::{
    cell::Cell,
    fmt,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    mem::take,
    path::Path,
    rc::Rc,
    sync::Arc,
};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::{
    Tokenizer,
    files::{Format, check_text, format, list, no_text},
};
use crate::{Error, Result, disk};

#[cfg(feature = "parquet")]
mod parquet;

/// Bytes that are read at a time.
const BLOCK: usize = 1 << 16;
/// Bytes after which a batch ends at the next place where its text can be cut.
const BATCH: usize = 1 << 18;
/// The longest stretch of text that cannot be cut.
const UNCUT: usize = 1 << 20;
/// The longest line of a file of lines.
const LARGEST: usize = 64 << 20;

/// The files of a corpus, and how they are divided into documents.
#[derive(Debug)]
pub(super) struct Documents<'a> {
    files: Vec<(Arc<Path>, Format)>,
    /// Sizes of all files.
    pub(super) bytes: u64,
    separator: Option<&'a str>,
    field: &'a str,
    pub(super) is_divided: bool,
}

impl<'a> Documents<'a> {
    /// A file, or the files below a folder in the order of [`super::Corpus::open`].
    ///
    /// Text is divided at `separator`. Lines are objects and Parquet files tables, with a document
    /// in the member or column `field`. A corpus of plain text without a separator is one text,
    /// its files joined by a line feed; in any other, a document ends with its file at the latest.
    pub(super) fn open(path: &Path, separator: Option<&'a str>, field: &'a str) -> Result<Self> {
        if separator == Some("") {
            bail!(setting = "--separator", "is empty, expected text");
        }
        let expected = "a file of text, JSON lines or Parquet, or a folder of them";
        let kind =
            fs::metadata(path).map_err(|e| Error::io("read", path, e).expecting(expected))?;
        let mut paths = vec![path.to_owned()];
        if kind.is_dir() {
            paths.clear();
            list(path, &mut paths)?;
        }
        let (mut files, mut bytes) = (Vec::new(), 0);
        for path in paths {
            bytes += disk::open(&path)?.1;
            let format = format(&path).0;
            files.push((path.into(), format));
        }
        let has_fields = files.iter().any(|&(_, format)| format != Format::Text);
        if field != "text" && !has_fields && !files.is_empty() {
            bail!(
                setting = "--field",
                "found {field}, but {} has only plain text, without fields; expected .jsonl or \
                 .parquet",
                path.display()
            );
        }
        let is_divided = separator.is_some() || has_fields;
        Ok(Self { files, bytes, separator, field, is_divided })
    }

    /// Gives all text to `sink`, in batches that this tokenizer can encode one by one.
    pub(super) fn read(
        &self,
        tokenizer: &Tokenizer,
        sink: &mut dyn FnMut(Batch) -> Result,
    ) -> Result {
        let read = Rc::new(Cell::new(0));
        let mut cutter = Cutter { tokenizer, batch: Batch::default(), document: 0, read, sink };
        for (number, (path, format)) in self.files.iter().enumerate() {
            if number > 0 && !self.is_divided {
                cutter.push("\n")?;
            }
            match format {
                Format::Text => self.text(path, &mut cutter)?,
                Format::Lines => self.lines(path, &mut cutter)?,
                #[cfg(feature = "parquet")]
                Format::Parquet => parquet::read(path, self.field, &mut cutter)?,
                #[cfg(not(feature = "parquet"))]
                Format::Parquet => {
                    bail!(&**path, "needs a build with the feature `parquet`");
                }
            }
        }
        cutter.flush(cutter.batch.text.len())
    }

    fn text(&self, path: &Arc<Path>, cutter: &mut Cutter<'_>) -> Result {
        let mut source = open(path, &cutter.read)?;
        // The offset of `bytes` in the text, and whether what was read ends with a whole line.
        let (mut offset, mut bytes) = (0, Vec::new());
        let (mut at_line, mut after_line) = (true, false);
        loop {
            cutter.pause()?;
            let kept = bytes.len();
            bytes.resize(kept + BLOCK, 0);
            let count = fill(path, &mut source, &mut bytes[kept..])?;
            bytes.truncate(kept + count);
            if offset == 0 {
                check_text(path, &bytes)?;
            }
            let valid = match std::str::from_utf8(&bytes) {
                Err(e) if e.error_len().is_none() && count > 0 => e.valid_up_to(),
                Err(e) => return Err(no_text(path, &bytes, offset, e)),
                Ok(_) => bytes.len(),
            };
            let text = std::str::from_utf8(&bytes[..valid]).expect("valid up to here");
            let mut done = 0;
            // A separator on a line of its own takes the end of that line along.
            if take(&mut after_line) && text.starts_with('\n') {
                done = 1;
            }
            while let Some((separator, at)) = self
                .separator
                .and_then(|separator| Some((separator, text[done..].find(separator)?)))
            {
                cutter.place(path, At::Byte(offset + done));
                let document = &text[done..done + at];
                cutter.push(document)?;
                cutter.end()?;
                let was_line = if at == 0 { at_line } else { document.ends_with('\n') };
                done += at + separator.len();
                match text[done..].chars().next() {
                    Some('\n') if was_line => done += 1,
                    Some(_) => {}
                    None => after_line = was_line,
                }
                at_line = true;
            }
            // The start of a separator may be at the end.
            let mut until = text.len();
            if let Some(separator) = self.separator.filter(|_| count > 0) {
                until = done.max(until.saturating_sub(separator.len() - 1));
                while !text.is_char_boundary(until) {
                    until -= 1;
                }
            }
            let rest = &text[done..until];
            if !rest.is_empty() {
                cutter.place(path, At::Byte(offset + done));
                cutter.push(rest)?;
                at_line = rest.ends_with('\n');
            }
            offset += until;
            bytes.drain(..until);
            if count == 0 {
                return if self.is_divided { cutter.end() } else { Ok(()) };
            }
        }
    }

    fn lines(&self, path: &Arc<Path>, cutter: &mut Cutter<'_>) -> Result {
        let mut source = BufReader::with_capacity(BLOCK, open(path, &cutter.read)?);
        let mut line = Vec::new();
        let mut passed = 0;
        for number in 1.. {
            passed += 1 + line.len();
            if passed > BATCH {
                passed = 0;
                cutter.pause()?;
            }
            line.clear();
            let refuse = |problem| Err(Error::file(&**path, format!("line {number}: {problem}")));
            match (&mut source).take(LARGEST as u64 + 1).read_until(b'\n', &mut line) {
                Ok(0) => break,
                Ok(_) if line.len() > LARGEST => {
                    return refuse(format!("is longer than {} MiB", LARGEST >> 20));
                }
                Ok(_) => {}
                Err(e) => return refuse(e.to_string()),
            }
            let mark = line.strip_prefix(b"\xef\xbb\xbf").filter(|_| number == 1);
            let line = mark.unwrap_or(&line).trim_ascii_end();
            if line.trim_ascii_start().is_empty() {
                continue;
            }
            let mut json = serde_json::Deserializer::from_slice(line);
            let found = Member(self.field).deserialize(&mut json);
            match found.and_then(|found| json.end().map(|()| found)) {
                Ok(Some(text)) => {
                    cutter.place(path, At::Line(number));
                    cutter.push(&text)?;
                    cutter.end()?;
                }
                Ok(None) => {
                    let field = self.field;
                    return refuse(format!("has no field `{field}`; name another with --field"));
                }
                // serde_json counts lines too, of which there is one.
                Err(e) => return refuse(e.to_string().replace(" line 1", "")),
            }
        }
        Ok(())
    }
}

/// One string of an object; an absent one is `None`, null is empty.
struct Member<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Member<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Member<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text in its field `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 && found.is_some() {
                return Err(A::Error::custom(format_args!("two fields `{key}`, expected one")));
            } else if key == self.0 {
                found = Some(map.next_value::<Option<String>>()?.unwrap_or_default());
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Counts the bytes that are read.
struct Counted(io::Take<File>, Rc<Cell<u64>>);

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(bytes)?;
        self.1.set(self.1.get() + count as u64);
        Ok(count)
    }
}

/// Opens a file, decompressed if its name ends in `.zst`. A window beyond 128 MiB is refused.
fn open(path: &Path, read: &Rc<Cell<u64>>) -> Result<Box<dyn Read>> {
    let (file, size) = disk::open(path)?;
    let file = Counted(file.take(size), Rc::clone(read));
    if !format(path).1 {
        return Ok(Box::new(file));
    }
    let decoder = zstd::Decoder::new(file).map_err(|e| Error::io("read", path, e))?;
    Ok(Box::new(decoder))
}

/// Reads until `bytes` are full or the file ends; returns how many were read.
fn fill(path: &Path, source: &mut dyn Read, bytes: &mut [u8]) -> Result<usize> {
    let mut count = 0;
    while count < bytes.len() {
        match source.read(&mut bytes[count..]) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // Of a plain file, an error is one of the device; else the contents are at fault.
            Err(e) if e.raw_os_error().is_some() => return Err(Error::io("read", path, e)),
            Err(e) => return Err(Error::file(path, format!("cannot be decompressed: {e}"))),
        }
    }
    Ok(count)
}

/// Text to be encoded on its own, and the documents that end in it.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) text: String,
    /// Where documents end, for a tokenizer that has a token for it.
    ends: Vec<usize>,
    places: Vec<Place>,
    /// Bytes of the files that were read so far.
    pub(super) read: u64,
}

/// Origin of the text of a batch from `start` on.
struct Place {
    start: usize,
    file: Arc<Path>,
    at: At,
}

#[derive(Clone, Copy)]
enum At {
    Byte(usize),
    Line(u64),
    #[cfg(feature = "parquet")]
    Row(u64),
}

impl Batch {
    /// The ids of the text, with one at the end of each document.
    pub(super) fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let (mut ids, mut start) = (Vec::new(), 0);
        let encode = |start: usize, end: usize| {
            let encoded = tokenizer.encode(&self.text[start..end]);
            encoded.map_err(|e| self.located(e.moved(start)))
        };
        for &end in &self.ends {
            ids.append(&mut encode(start, end)?);
            ids.extend(tokenizer.end_of_document());
            start = end;
        }
        ids.append(&mut encode(start, self.text.len())?);
        Ok(ids)
    }

    /// The text, with a line feed where a document ends.
    #[cfg(feature = "tokenizers")]
    pub(super) fn lines(&self) -> String {
        let bounds = [0].into_iter().chain(self.ends.iter().copied());
        let ends = self.ends.iter().copied().chain([self.text.len()]);
        let documents: Vec<&str> = bounds.zip(ends).map(|(a, b)| &self.text[a..b]).collect();
        documents.join("\n")
    }

    /// The same error with its file and place.
    fn located(&self, error: Error) -> Error {
        let (Error::UnknownCharacter { offset, .. }
        | Error::LongWhiteSpace { offset, .. }
        | Error::LongWord { offset, .. }) = error
        else {
            return error;
        };
        let Some(Place { start, file, at }) =
            self.places.iter().rev().find(|place| place.start <= offset)
        else {
            return error;
        };
        let problem = match at {
            At::Byte(byte) => error.moved(byte.wrapping_sub(*start)).to_string(),
            At::Line(line) => format!("line {line}: {}", error.moved(start.wrapping_neg())),
            #[cfg(feature = "parquet")]
            At::Row(row) => format!("row {row}: {}", error.moved(start.wrapping_neg())),
        };
        Error::file(&**file, problem)
    }
}

/// Collects text into batches.
struct Cutter<'a> {
    tokenizer: &'a Tokenizer,
    batch: Batch,
    /// Bytes of the present document.
    document: usize,
    read: Rc<Cell<u64>>,
    sink: &'a mut dyn FnMut(Batch) -> Result,
}

impl Cutter<'_> {
    /// The text that follows is from here.
    fn place(&mut self, file: &Arc<Path>, at: At) {
        let start = self.batch.text.len();
        // Without text after it, a place is of no use, and empty documents may be many.
        self.batch.places.pop_if(|place| place.start == start);
        self.batch.places.push(Place { start, file: Arc::clone(file), at });
    }

    fn push(&mut self, mut text: &str) -> Result {
        self.document += text.len();
        while !text.is_empty() {
            let end = (0..=text.len().min(BLOCK)).rev().find(|&at| text.is_char_boundary(at));
            let (head, rest) = text.split_at(end.expect("0 is one"));
            self.batch.text.push_str(head);
            text = rest;
            let start = self.batch.ends.last().copied().unwrap_or(0);
            let open = &self.batch.text[start..];
            let size = BATCH.saturating_sub(start);
            let mut border = self.tokenizer.border(open, size);
            if border.is_none() && open.len() > UNCUT {
                border = self.tokenizer.last_border(open);
                if border.is_none() {
                    // `located` finds the place by this offset.
                    return Err(self
                        .batch
                        .located(Error::LongWord { longest: UNCUT, offset: start }));
                }
            }
            if let Some(border) = border {
                self.flush(start + border)?;
            }
        }
        Ok(())
    }

    /// Ends a document; one without text is left out.
    fn end(&mut self) -> Result {
        if take(&mut self.document) == 0 {
            return Ok(());
        }
        match self.tokenizer.end_of_document() {
            Some(_) => self.batch.ends.push(self.batch.text.len()),
            None => self.batch.text.push('\n'),
        }
        if self.batch.text.len() >= BATCH { self.flush(self.batch.text.len()) } else { Ok(()) }
    }

    /// Passes an empty batch to the sink, whose error ends a file without text.
    fn pause(&mut self) -> Result {
        (self.sink)(Batch { read: self.read.get(), ..Batch::default() })
    }

    /// Gives away the text up to here.
    fn flush(&mut self, at: usize) -> Result {
        let rest = self.batch.text.split_off(at);
        let last = self.batch.places.last();
        let places =
            last.filter(|_| !rest.is_empty()).map(|&Place { start, ref file, at: from }| {
                let from = match from {
                    At::Byte(byte) => At::Byte(byte.wrapping_add(at).wrapping_sub(start)),
                    other => other,
                };
                Place { start: 0, file: Arc::clone(file), at: from }
            });
        let next = Batch { text: rest, places: places.into_iter().collect(), ..Batch::default() };
        let full = std::mem::replace(&mut self.batch, next);
        (self.sink)(Batch { read: self.read.get(), ..full })
    }
}

#[cfg(test)]
mod tests;
