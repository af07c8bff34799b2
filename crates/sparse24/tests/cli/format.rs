//! The checkpoint format from outside: the Python reader of `examples/`, and runs of version 1.

use std::{fmt::Write, fs, path::Path, process::Command};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::support::Place;

/// The expected output: file, name, shape and first value of each tensor.
fn listing(checkpoint: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for file in ["masks", "model", "optimizer"] {
        let bytes = fs::read(checkpoint.join(format!("{file}.safetensors"))).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let mut line = format!("{file} {name}");
            tensor.shape().iter().for_each(|length| write!(line, " {length}").unwrap());
            let data = tensor.data();
            let first = match tensor.dtype() {
                Dtype::U16 => f64::from(u16::from_le_bytes([data[0], data[1]])),
                Dtype::U32 => f64::from(u32::from_le_bytes(data[..4].try_into().unwrap())),
                _ => f64::from(f32::from_le_bytes(data[..4].try_into().unwrap())),
            };
            // Bits, since Rust and Python may format a number differently.
            lines.push(format!("{line} {:x}", first.to_bits()));
        }
    }
    lines.sort();
    lines
}

#[test]
fn the_python_reader_verifies_a_checkpoint_and_reads_the_same_bits() {
    let place = Place::trained("--set model.bias=true --set run.instrument_every=5");
    let checkpoint = place.path("run/checkpoints/step-00000010");
    let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/read_checkpoint.py");
    let read = || Command::new("python3").arg(&reader).arg(&checkpoint).output();
    let Ok(output) = read() else {
        println!("skipped: no python3");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bits = |line: &str| {
        let (line, value) = line.rsplit_once(' ').unwrap();
        format!("{line} {:x}", value.parse::<f64>().unwrap().to_bits())
    };
    let mut printed: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(bits).collect();
    printed.sort();
    assert_eq!(printed, listing(&checkpoint));
    for name in ["manifest.json", "state.json", "model.safetensors"] {
        let whole = fs::read(checkpoint.join(name)).unwrap();
        let mut damaged = whole.clone();
        damaged[50] ^= 1;
        fs::write(checkpoint.join(name), damaged).unwrap();
        let output = read().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{name}");
        assert!(error.contains(&format!("AssertionError: {name} is damaged")), "{error}");
        fs::write(checkpoint.join(name), whole).unwrap();
    }
}

/// The files of a run directory, with the old keys and method names of its configuration.
#[test]
fn a_run_of_version_1_resumes_as_it_would_have_continued() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/run-v1");
    let place = Place::new();
    place.write("text", fs::read(golden.join("text")).unwrap());
    for (run, ends) in [("bi-mask", "[]"), ("step", r#"[{"phase":0,"step":12}]"#)] {
        copy(&golden.join(run), &place.path(run));
        let (config, old) = (place.read(&format!("{run}/config.toml")), place.metrics(run));
        assert!(config.contains("ffn_width = 16"));
        let resumed = place.json(&format!("resume {run} --json"));
        assert_eq!((&resumed["trained"], &resumed["steps"]), (&Value::from(8), &Value::from(24)));
        for (old, new) in old.iter().zip(place.metrics(run)) {
            for key in ["loss", "grad_norm", "val_loss", "flip_rate"] {
                let (Some(old), Some(new)) = (old[key].as_f64(), new[key].as_f64()) else {
                    assert!(old[key].is_null() && new[key].is_null());
                    continue;
                };
                // The golden run has the rounding of AVX-512.
                assert!((old - new).abs() <= 1e-4 * old.abs(), "{run}: {key} {old} {new}");
            }
        }
        let state = place.value(&format!("{run}/checkpoints/step-00000024/state.json"));
        assert_eq!(state["phase_ends"].to_string(), ends);
        place.json(&format!("eval {run} --json"));
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(path, to).unwrap();
        }
    }
}
