//! `train --backend cuda` where something of the GPU is missing, before a GPU computes: one sentence, and never the CPU instead.
//!
//! What the machine does not have is made: a driver is compiled (`gpus/driver.c`) and put before all others.

use std::{path::PathBuf, process::Command};

use crate::support::{Place, TINY};

/// The name under which the bindings ask for the driver: a library that is loaded under it is what they get.
const ASKED_FOR: &str = "-Wl,-soname,libcuda.so";

/// A place with the driver in a folder of its own; none without a compiler.
fn place() -> Option<(Place, PathBuf)> {
    let place = Place::new();
    let folder = place.path("driver");
    std::fs::create_dir(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/gpus/driver.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", ASKED_FOR, source, "-o"]).arg(folder.join("libcuda.so.1"));
    match compiler.status() {
        Ok(status) => assert!(status.success(), "{compiler:?}"),
        Err(error) => {
            println!("skipped: no driver can be made without a C compiler: {error}");
            return None;
        }
    }
    Some((place, folder))
}

/// The command with this driver, misbehaving as told.
fn train(place: &Place, driver: &PathBuf, faults: &[(&str, &str)], more: &str) -> Command {
    let mut command = place.command(&format!("train {TINY} --backend cuda {more} --out run"));
    command.env("SPARSE24_CUDA_LIBRARIES", driver).envs(faults.iter().copied());
    command
}

#[test]
fn what_is_missing_of_a_gpu_is_one_sentence() {
    let Some((place, driver)) = place() else { return };
    let occupied = |reason: &str| format!("GPU 0 cannot be opened: {reason}; wait for the other process, or choose another GPU");
    let alone = occupied("it serves one process alone, and another has it");
    let full = occupied("other processes hold its memory");
    for (faults, more, message) in [
        (("FAKE_RELEASE", "12040"), "", "the CUDA driver serves CUDA 12.4, and kernels need 13.0: install a newer driver"),
        (("FAKE_INIT", "100"), "", "there is no GPU 0: the driver sees 0"),
        (("FAKE_INIT", "803"), "", "starting the driver: the CUDA driver says CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (("FAKE_GPUS", "2"), "--set backend.gpu=3", "there is no GPU 3: the driver sees 2"),
        (
            ("FAKE_CAPABILITY", "75"),
            "",
            "NVIDIA F1 has compute capability 7.5: kernels exist for sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a",
        ),
        (("FAKE_OPEN", "46"), "", &alone),
        (("FAKE_OPEN", "2"), "", &full),
        (("FAKE_MIB", "16"), "", "* needs 32 MiB of GPU memory for *; lower batch.sequences *"),
    ] {
        place.refuses_command(train(&place, &driver, &[faults], more), 6, message);
    }
}

/// By a setting of the run, and by an argument of `doctor`.
#[test]
fn libraries_are_found_in_folders_that_are_named() {
    let Some((place, driver)) = place() else { return };
    let [folder, file] = [driver.display().to_string(), driver.join("libcuda.so.1").display().to_string()];
    let found = |line: &str| place.json(line)["cuda"]["libraries"][0]["file"].take();
    assert_eq!(found(&format!("doctor --json --libraries /nowhere:{folder}")), file.as_str());
    assert_ne!(found("doctor --json"), file.as_str());
    let mut command = place.command(&format!("train {TINY} --backend cuda --set backend.libraries=/nowhere:{folder} --out run"));
    command.env("FAKE_RELEASE", "12040");
    place.refuses_command(command, 6, "the CUDA driver serves CUDA 12.4, and kernels need 13.0: install a newer driver");
}

/// On a machine that lacks it.
#[test]
fn a_library_that_is_missing_is_one_sentence() {
    let place = Place::new();
    let here = |name: &str| {
        let libraries = place.json("doctor --json")["cuda"]["libraries"].take();
        libraries.as_array().unwrap().iter().any(|library| library["name"].as_str().unwrap().contains(name) && library["file"].is_string())
    };
    if here("driver") {
        println!("skipped: this machine has a driver");
    } else {
        let message = "the CUDA driver was not found: tried *libcuda.so.1, libcuda.so*; install NVIDIA's driver, release 580 or later";
        place.refuses(&format!("train {TINY} --backend cuda --out run"), 6, message);
    }
    let Some((place, driver)) = self::place().filter(|_| !here("cuBLASLt")) else { return };
    let message =
        "the library of dense products (cuBLASLt) was not found: tried *libcublasLt.so.13, libcublasLt.so*; install CUDA 13, or *";
    place.refuses_command(train(&place, &driver, &[], ""), 6, message);
}
