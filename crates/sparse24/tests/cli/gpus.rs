//! `train --backend cuda` where something of the GPU is missing, before a GPU computes: one
//! sentence, and never the CPU instead.
//!
//! What the machine does not have is made: a driver is compiled (`gpus/driver.c`) and put before
//! all others.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{Place, TINY};

/// A place with the driver in a folder of its own; none without a compiler.
fn place() -> Option<(Place, PathBuf)> {
    let place = Place::new();
    let folder = place.path("driver");
    compiled(&folder, "libcuda.so").then_some((place, folder))
}

/// Whether the driver could be compiled to a file of this name.
fn compiled(folder: &Path, name: &str) -> bool {
    std::fs::create_dir(folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/gpus/driver.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", source, "-o"]).arg(folder.join(name));
    match compiler.status() {
        Ok(status) => assert!(status.success(), "{compiler:?}"),
        Err(error) => {
            println!("skipped: no driver can be made without a C compiler: {error}");
            return false;
        }
    }
    true
}

/// The command with this driver, misbehaving as told, and with no other library of CUDA in a folder
/// that the environment names.
fn command(place: &Place, driver: &Path, faults: &[(&str, &str)], line: &str) -> Command {
    let mut command = place.command(line);
    command
        .env("LD_LIBRARY_PATH", driver)
        .env("SPARSE24_CUDA_LIBRARIES", driver)
        .envs(faults.iter().copied());
    command
}

fn train(place: &Place, driver: &Path, faults: &[(&str, &str)], more: &str) -> Command {
    command(place, driver, faults, &format!("train {TINY} --backend cuda {more} --out run"))
}

#[test]
fn what_is_missing_of_a_gpu_is_one_sentence() {
    let Some((place, driver)) = place() else { return };
    let occupied = |reason: &str| {
        format!(
            "GPU 0 cannot be opened: {reason}; wait for the other process, or choose another GPU"
        )
    };
    let alone = occupied("another process has exclusive use of it");
    let full = occupied("other processes hold its memory");
    for (faults, more, message) in [
        (
            ("FAKE_RELEASE", "12040"),
            "",
            "the driver supports CUDA 12.4, expected at least 13.0; install a newer driver",
        ),
        (("FAKE_INIT", "100"), "", "GPU 0 does not exist: the driver reports 0; *"),
        (
            ("FAKE_INIT", "803"),
            "",
            "initializing the driver: the CUDA driver reports CUDA_ERROR_SYSTEM_DRIVER_MISMATCH; *",
        ),
        (
            ("FAKE_GPUS", "2"),
            "--set backend.gpu=3",
            "GPU 3 does not exist: the driver reports 2; choose one of 0 to 1",
        ),
        (
            ("FAKE_CAPABILITY", "75"),
            "",
            "NVIDIA F1 has compute capability 7.5, expected one of sm_80, *, sm_121a; choose a newer GPU",
        ),
        (("FAKE_OPEN", "46"), "", &alone),
        (("FAKE_OPEN", "2"), "", &full),
        (
            ("FAKE_CAPABILITY", "130"),
            "",
            "NVIDIA F1 has compute capability 13.0, expected one of *; choose another GPU, or a newer release of sparse24",
        ),
        (("FAKE_MIB", "16"), "", "* needs 32 MiB of GPU memory for *; lower batch.sequences *"),
        (
            ("FAKE_OTHERS_MIB", "1000"),
            "",
            "* needs 32 MiB of GPU memory for *; wait for the other processes, or choose another GPU (backend.gpu)",
        ),
    ] {
        place.refuses_command(train(&place, &driver, &[faults], more), 6, message);
    }
}

#[test]
fn doctor_opens_the_gpu_that_is_named() {
    let Some((place, driver)) = place() else { return };
    let output =
        command(&place, &driver, &[("FAKE_GPUS", "2")], "doctor --json --gpu 5").output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let backends = report["backends"].as_array().unwrap();
    let cuda = backends.iter().find(|backend| backend["name"] == "cuda").unwrap();
    assert_eq!(
        cuda["problem"], "GPU 5 does not exist: the driver reports 2; choose one of 0 to 1",
        "{report}"
    );
}

/// The setting stands unless the argument is given.
#[test]
fn a_step_is_profiled_on_the_gpu_that_is_named() {
    let Some((place, driver)) = place() else { return };
    for (more, ordinal) in
        [("--set backend.gpu=3", 3), ("--gpu 4", 4), ("--set backend.gpu=1 --gpu 2", 2)]
    {
        let command = command(
            &place,
            &driver,
            &[("FAKE_GPUS", "2")],
            &format!("bench --step quickstart {more}"),
        );
        place.refuses_command(
            command,
            6,
            &format!("GPU {ordinal} does not exist: the driver reports 2; choose one of 0 to 1"),
        );
    }
}

#[test]
fn a_bench_that_breaks_off_tells_what_it_found() {
    let Some((place, driver)) = place() else { return };
    let bench = |more: &str| {
        let line =
            format!("bench --quick --size 128 --kernel flip_count --kernel geglu_forward {more}");
        let output = command(&place, &driver, &[("FAKE_COPIES", "1")], &line).output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{output:?}");
        let [out, err] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(
            err.contains("error: upload: the CUDA driver reports CUDA_ERROR_LAUNCH_FAILED; "),
            "{err}"
        );
        out
    };
    let table = bench("");
    assert!(
        table.contains("\nflip_count ") && table.contains("not run: upload needs more GPU memory"),
        "{table}"
    );
    let report: serde_json::Value = serde_json::from_str(&bench("--json")).unwrap();
    assert_eq!(report["cases"].as_array().map(Vec::len), Some(1), "{report}");
}

/// On any machine: what a kernel refuses is known without a GPU.
#[test]
fn what_no_kernel_serves_is_refused_before_a_gpu_is_looked_for() {
    let place = Place::new();
    for (settings, message) in [
        ("model.ffn_width=516", "model.ffn_width: expected a multiple of 8 on a GPU, found 516"),
        (
            "model.heads=32",
            "model.heads: expected heads whose width, model.width / model.heads, is a multiple of 8 up to 128 on a GPU, found 128 / 32 = 4",
        ),
        ("model.width=8256", "model.width: expected at most 8192 on a GPU, found 8256"),
    ] {
        place.refuses(&format!("train --backend cuda --set {settings} --out run"), 2, message);
        place.refuses(&format!("bench --step quickstart --set {settings}"), 2, message);
    }
    place.answer("config --set model.ffn_width=516");
}

/// By a setting of the run, and by an argument of `doctor` and `bench`.
#[test]
fn libraries_are_found_in_folders_that_are_named() {
    let Some((place, driver)) = place() else { return };
    let folder = place.path("libraries");
    assert!(compiled(&folder, "libcublasLt.so.13"));
    let (named, file) =
        (folder.display().to_string(), folder.join("libcublasLt.so.13").display().to_string());
    let found = |line: &str| {
        let libraries = place.json(line)["cuda"]["libraries"].take();
        let library = libraries
            .as_array()
            .unwrap()
            .iter()
            .find(|library| library["name"].as_str().unwrap().contains("cuBLASLt"));
        library.unwrap()["file"].as_str().map(str::to_owned)
    };
    assert_eq!(
        found(&format!("doctor --json --libraries /nowhere:{named}")).as_deref(),
        Some(file.as_str())
    );
    assert_ne!(found("doctor --json").as_deref(), Some(file.as_str()));
    let settings = format!("--set backend.libraries=/nowhere:{named}");
    let message = format!(
        "{file} is not the dense product library (cuBLASLt) of CUDA 13: it has no function cublasLtCreate; *"
    );
    place.refuses_command(train(&place, &driver, &[], &settings), 6, &message);
    let step =
        format!("bench --step quickstart --set backend.libraries=/nowhere --libraries {named}");
    place.refuses_command(command(&place, &driver, &[], &step), 6, &message);
    // Of kernels, it is known before the first.
    let bench = format!("bench --json --quick --size 128 --kernel flip_count --libraries {named}");
    let output = command(&place, &driver, &[], &bench).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        report["machine"]["cublaslt"]["problem"].as_str().unwrap().starts_with(&file),
        "{report}"
    );
}

/// What the loader finds, and nothing that a folder of libraries holds: the bindings would call the
/// former.
#[test]
fn the_driver_that_is_named_is_the_one_that_is_used() {
    let Some((place, driver)) = place() else { return };
    let elsewhere = place.path("elsewhere");
    assert!(compiled(&elsewhere, "libcuda.so.1"));
    let line = format!("doctor --json --libraries {}", elsewhere.display());
    let output = command(&place, &driver, &[("FAKE_GPUS", "3"), ("FAKE_CAPABILITY", "75")], &line)
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["cuda"]["libraries"][0]["file"], "libcuda.so", "{report}");
    assert_eq!(report["cuda"]["gpus"].as_array().map(Vec::len), Some(3), "{report}");
}

/// On a machine that lacks it.
#[test]
fn a_library_that_is_missing_is_one_sentence() {
    let place = Place::new();
    let here = |name: &str| {
        let libraries = place.json("doctor --json")["cuda"]["libraries"].take();
        libraries.as_array().unwrap().iter().any(|library| {
            library["name"].as_str().unwrap().contains(name) && library["file"].is_string()
        })
    };
    if here("driver") {
        println!("skipped: this machine has a driver");
    } else {
        let message = "the CUDA driver was not found: tried libcuda.so, libcuda.so.1; install the NVIDIA driver, release 580 or later";
        place.refuses(&format!("train {TINY} --backend cuda --out run"), 6, message);
    }
    let Some((place, driver)) = self::place().filter(|_| !here("cuBLASLt")) else { return };
    let file = driver.join("libcublasLt.so.13");
    std::fs::write(&file, "no library").unwrap();
    let message = "the dense product library (cuBLASLt) does not load: *libcublasLt.so.13: the loader reports *file too short*; *";
    place.refuses_command(train(&place, &driver, &[], ""), 6, message);
    std::fs::remove_file(&file).unwrap();
    let message = "the dense product library (cuBLASLt) was not found: tried *libcublasLt.so.13, libcublasLt.so*, searched */usr/local/cuda/lib64*; install CUDA 13, or *";
    place.refuses_command(train(&place, &driver, &[], ""), 6, message);
}
