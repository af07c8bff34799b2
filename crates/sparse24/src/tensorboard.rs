//! Event files for TensorBoard: the numbers of `metrics.jsonl` as scalars, in `RUN/tensorboard`.
//!
//! A record is its length, the masked CRC-32C of the length, the bytes of a protocol-buffer
//! `Event`, and their masked CRC-32C. Each start has a file of its own, which begins by declaring
//! void what an earlier one told of the same steps: those done again after a crash are there once.
//! Deliberately absent: everything of the format that scalars do not need; and durability, since
//! `metrics.jsonl` has it.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use prost::Message;
use sparse24_run::{
    Error,
    run::{MetricsLog, StepMetrics},
};

/// `tensorflow.Event`, as far as it is written here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// Of the first event of a file alone.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    /// Of the second event of a file that continues others.
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
    /// One of several kinds of values, so that 0 is written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// `tensorflow.SessionLog`; its status START makes readers forget later steps of earlier files.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

const START: i32 = 1;
const VERSION: &str = "brain.Event:2";

/// The folder of a run's event files.
pub(crate) const FOLDER: &str = "tensorboard";

/// The event file of one start.
pub(crate) struct Events {
    file: File,
}

impl Events {
    /// Begins a file for the steps after `step`. The first file of a run also tells what its
    /// metrics have up to there.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub(crate) fn begin(run: &Path, step: u32) -> Result<Self, String> {
        let folder = run.join(FOLDER);
        let refused = |error: io::Error| format!("cannot write to {}: {error}", folder.display());
        fs::create_dir_all(&folder).map_err(refused)?;
        let is_first = fs::read_dir(&folder).map_err(refused)?.next().is_none();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Readers go through the files in the order of their names.
        let name =
            format!("events.out.tfevents.{:010}.{:09}.sparse24", now.as_secs(), now.subsec_nanos());
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(folder.join(name))
            .map_err(refused)?;
        let mut events = Self { file };
        events
            .write(&Event { file_version: Some(VERSION.into()), ..Event::default() })
            .map_err(refused)?;
        if !is_first {
            let session_log = Some(SessionLog { status: START });
            events
                .write(&Event { step: i64::from(step) + 1, session_log, ..Event::default() })
                .map_err(refused)?;
        } else if step > 0 {
            let told = |error: Error| error.to_string();
            for metrics in MetricsLog::steps(&run.join("metrics.jsonl")).map_err(told)? {
                events.append(&metrics.map_err(told)?).map_err(refused)?;
            }
        }
        Ok(events)
    }

    /// Tells a step.
    pub(crate) fn append(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let value = scalars(metrics)
            .into_iter()
            .map(|(tag, value)| Value { tag, simple_value: Some(value as f32) })
            .collect();
        self.write(&Event {
            step: metrics.step.into(),
            summary: Some(Summary { value }),
            ..Event::default()
        })
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let event = Event { wall_time: now.as_secs_f64(), ..event.clone() };
        // One write, so that a reader meets whole records unless the machine dies.
        self.file.write_all(&record(&event.encode_to_vec()))
    }
}

/// Names and values of all that a step measured.
fn scalars(metrics: &StepMetrics) -> Vec<(String, f64)> {
    let always = [
        ("loss", metrics.loss.into()),
        ("lr", metrics.lr.into()),
        ("grad_norm", metrics.grad_norm.into()),
        ("tokens_per_s", metrics.tokens_per_s),
    ];
    let instruments = metrics.instruments.as_deref();
    let sampled = [
        ("val_loss", metrics.val_loss),
        ("flip_rate", metrics.flip_rate),
        ("kept", instruments.map(|sample| sample.kept)),
        ("flips_per_tile", instruments.map(|sample| sample.flips_per_tile)),
        ("mvue_variance", instruments.and_then(|sample| sample.mvue_variance)),
    ];
    let sampled = sampled.into_iter().filter_map(|(tag, value)| Some((tag, value?)));
    let layers = metrics
        .flip_rate_per_layer
        .iter()
        .flatten()
        .map(|(name, rate)| (format!("flip_rate/{name}"), *rate));
    always
        .into_iter()
        .chain(sampled)
        .map(|(tag, value)| (tag.to_owned(), value))
        .chain(layers)
        .collect()
}

/// The bytes in the frame of a record.
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

    /// TensorBoard's own RecordWriter wrote these bytes of the same event.
    #[test]
    fn a_record_is_what_tensorboard_writes() {
        let value = vec![Value { tag: "loss".into(), simple_value: Some(1.5) }];
        let event =
            Event { wall_time: 2.0, step: 3, summary: Some(Summary { value }), ..Event::default() };
        let expected =
            "1a00000000000000129bd82d09000000000000004010032a0d0a0b0a046c6f7373150000c03f22bc952a";
        let hexadecimal: String =
            record(&event.encode_to_vec()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hexadecimal, expected);
    }
    #[test]
    fn zero_is_a_value() {
        let value = Value { tag: "x".into(), simple_value: Some(0.0) };
        assert_eq!(value.encode_to_vec(), [0x0a, 1, b'x', 0x15, 0, 0, 0, 0]);
    }
}
