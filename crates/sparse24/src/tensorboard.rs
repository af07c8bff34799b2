//! TensorBoard event files: the numbers of `metrics.jsonl` as scalars, in `RUN/tensorboard`.
//!
//! A record is its length, the masked CRC-32C of the length, a protocol-buffer `Event`, and the
//! masked CRC-32C of its bytes. Each process writes a file of its own. It starts by invalidating
//! later steps of earlier files, so that steps repeated after a crash appear once. Durability is
//! left to `metrics.jsonl`.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use prost::Message;
use sparse24_run::{
    Error,
    disk::{self, As},
    run::{MetricsLog, StepMetrics},
};

/// `tensorflow.Event`; only the fields written here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// Only in the first event of a file.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    /// Only in the second event of a file that continues others.
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// `tensorflow.Summary.Value`.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    /// Member of a `oneof`, so that 0 is encoded too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// `tensorflow.SessionLog`; status START makes readers drop later steps of earlier files.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

const START: i32 = 1;
const VERSION: &str = "brain.Event:2";

/// The folder of event files in a run directory.
pub(crate) const FOLDER: &str = "tensorboard";

/// The event file of one process.
pub(crate) struct Events {
    file: File,
}

impl Events {
    /// Creates a file for the steps after `step`. The first file of a run also gets the earlier
    /// steps of `metrics.jsonl`.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub(crate) fn create(run: &Path, step: u32) -> Result<Self, String> {
        let folder = run.join(FOLDER);
        let refused = |error: io::Error| format!("cannot write to {}: {error}", folder.display());
        let unusable = |error: Error| error.to_string();
        if !disk::exists(&folder).map_err(unusable)? {
            disk::create_directory(&folder).map_err(unusable)?;
        }
        let names = disk::names(&folder).map_err(unusable)?;
        let is_first = names.is_empty();
        // Readers process the files in the order of their names, and clocks may go back.
        let seconds =
            |name: &std::ffi::OsString| name.to_str()?.split('.').nth(3)?.parse::<u64>().ok();
        let after =
            names.iter().filter_map(seconds).max().map_or(0, |newest| newest.saturating_add(1));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = (now.as_secs().max(after), now.subsec_nanos());
        let name = format!("events.out.tfevents.{seconds:010}.{nanoseconds:09}.sparse24");
        let file = disk::open_as(&folder.join(name), As::New).map_err(unusable)?;
        let mut events = Self { file };
        let version = Event { file_version: Some(VERSION.into()), ..Event::default() };
        events.write(version).map_err(refused)?;
        if !is_first {
            let session_log = Some(SessionLog { status: START });
            let start = Event { step: i64::from(step) + 1, session_log, ..Event::default() };
            events.write(start).map_err(refused)?;
        } else if step > 0 {
            for metrics in MetricsLog::steps(&run.join("metrics.jsonl")).map_err(unusable)? {
                events.append(&metrics.map_err(unusable)?).map_err(refused)?;
            }
        }
        Ok(events)
    }

    pub(crate) fn append(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let value = scalars(metrics)
            .map(|(tag, value)| Value { tag, simple_value: Some(value as f32) })
            .collect();
        let (step, summary) = (metrics.step.into(), Some(Summary { value }));
        self.write(Event { step, summary, ..Event::default() })
    }

    fn write(&mut self, event: Event) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let event = Event { wall_time: now.as_secs_f64(), ..event };
        // A single write, so that readers see whole records unless the machine crashes.
        self.file.write_all(&record(&event.encode_to_vec()))
    }
}

/// Tags and values of everything that was measured in a step.
fn scalars(metrics: &StepMetrics) -> impl Iterator<Item = (String, f64)> {
    let instruments = metrics.instruments.as_deref();
    let scalars = [
        ("loss", Some(metrics.loss.into())),
        ("lr", Some(metrics.lr.into())),
        ("grad_norm", Some(metrics.grad_norm.into())),
        ("tokens_per_s", Some(metrics.tokens_per_s)),
        ("val_loss", metrics.val_loss),
        ("flip_rate", metrics.flip_rate),
        ("kept", instruments.map(|sample| sample.kept)),
        ("flips_per_tile", instruments.map(|sample| sample.flips_per_tile)),
        ("mvue_variance", instruments.and_then(|sample| sample.mvue_variance)),
    ];
    let layers = metrics.flip_rate_per_layer.iter().flatten();
    let scores = metrics.scores.iter().map(|(name, &score)| (format!("score/{name}"), score));
    scalars
        .into_iter()
        .filter_map(|(tag, value)| Some((tag.to_owned(), value?)))
        .chain(layers.map(|(name, &rate)| (format!("flip_rate/{name}"), rate)))
        .chain(scores)
}

/// Frames the bytes of an event as a record.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), bytes, &masked_crc(bytes)].concat()
}

fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::{Event, Summary, Value, record};

    /// The expected bytes were written by TensorBoard's RecordWriter.
    #[test]
    fn a_record_has_the_bytes_that_tensorboard_writes() {
        let value = vec![Value { tag: "loss".into(), simple_value: Some(1.5) }];
        let event =
            Event { wall_time: 2.0, step: 3, summary: Some(Summary { value }), ..Event::default() };
        let expected =
            "1a00000000000000129bd82d09000000000000004010032a0d0a0b0a046c6f7373150000c03f22bc952a";
        let hexadecimal: String =
            record(&event.encode_to_vec()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hexadecimal, expected);
    }
}
