//! The checkpoint format, read by the Python example in `examples/`.

use std::{fmt::Write, fs, path::Path, process::Command};

use safetensors::{Dtype, SafeTensors};

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
    let place = Place::new();
    place.train("run", "--set model.bias=true");
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
    for (name, at) in [
        ("manifest.json", 50),
        ("state.json", 50),
        ("model.safetensors", 50),
        ("masks.safetensors", 1000),
    ] {
        let whole = fs::read(checkpoint.join(name)).unwrap();
        let mut damaged = whole.clone();
        let at = at.min(whole.len() - 1);
        damaged[at] ^= 1;
        fs::write(checkpoint.join(name), damaged).unwrap();
        let output = read().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{name}");
        assert!(error.contains(&format!("AssertionError: {name} is damaged")), "{error}");
        fs::write(checkpoint.join(name), whole).unwrap();
    }
}
