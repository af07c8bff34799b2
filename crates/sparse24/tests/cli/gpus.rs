//! `--backend cuda` where a part of the GPU is missing, before a GPU computes: refused, never
//! replaced by the CPU. The missing parts are simulated by a driver that is compiled from
//! `gpus/driver.c` and loaded before all others.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::support::{Place, TINY};

/// A place with the driver in a folder of its own; none without a C compiler.
fn place() -> Option<(Place, PathBuf)> {
    let place = Place::new();
    let folder = place.path("driver");
    compile(&folder, "libcuda.so").then_some((place, folder))
}

/// Compiles the driver to a file of this name; false without a C compiler.
fn compile(folder: &Path, name: &str) -> bool {
    std::fs::create_dir(folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/gpus/driver.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", source, "-o"]).arg(folder.join(name));
    match compiler.status() {
        Ok(status) => assert!(status.success(), "{compiler:?}"),
        Err(error) => {
            println!("skipped: the driver needs a C compiler: {error}");
            return false;
        }
    }
    true
}

/// The command with this driver and its faults, and no other CUDA library in a folder that the
/// environment names.
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

fn json(mut command: Command) -> Value {
    serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
}

#[test]
fn a_missing_part_of_a_gpu_is_named() {
    let Some((place, driver)) = place() else { return };
    for (faults, more, pattern) in [
        (("FAKE_RELEASE", "12040"), "", "12.4*13.0*newer driver"),
        (("FAKE_INIT", "100"), "", "GPU 0 does not exist*reports 0"),
        (("FAKE_INIT", "803"), "", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (("FAKE_GPUS", "2"), "--set backend.gpu=3", "GPU 3 does not exist*2*0 to 1"),
        (("FAKE_CAPABILITY", "75"), "", "NVIDIA F1*7.5*sm_80*sm_121a"),
        (("FAKE_CAPABILITY", "130"), "", "NVIDIA F1*13.0*sm_80*newer release"),
        (("FAKE_OPEN", "46"), "", "GPU 0*process*another GPU"),
        (("FAKE_OPEN", "2"), "", "GPU 0*memory*another GPU"),
        (("FAKE_MIB", "16"), "", "32 MiB of GPU memory*batch.size"),
        (("FAKE_OTHERS_MIB", "1000"), "", "32 MiB of GPU memory*other processes*backend.gpu"),
    ] {
        place.refuses_command(train(&place, &driver, &[faults], more), 6, pattern);
    }
}

#[test]
fn a_gpu_is_selected_by_its_index() {
    let Some((place, driver)) = place() else { return };
    let faults = [("FAKE_GPUS", "2")];
    let report = json(command(&place, &driver, &faults, "doctor --json --gpu 5"));
    let backends = report["backends"].as_array().unwrap();
    let cuda = backends.iter().find(|backend| backend["name"] == "cuda").unwrap();
    assert!(cuda["problem"].as_str().unwrap().contains("GPU 5 does not exist"), "{report}");
    for (more, index) in
        [("--set backend.gpu=3", 3), ("--gpu 4", 4), ("--set backend.gpu=1 --gpu 2", 2)]
    {
        let line = format!("bench --step quickstart {more}");
        let pattern = format!("GPU {index} does not exist");
        place.refuses_command(command(&place, &driver, &faults, &line), 6, &pattern);
    }
}

#[test]
fn a_bench_that_fails_prints_its_results() {
    let Some((place, driver)) = place() else { return };
    let bench = |more: &str| {
        let line =
            format!("bench --quick --size 128 --kernel flip_count --kernel geglu_forward {more}");
        let output = command(&place, &driver, &[("FAKE_COPIES", "1")], &line).output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{output:?}");
        let [out, err] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(
            err.contains("error: upload: ") && err.contains("CUDA_ERROR_LAUNCH_FAILED"),
            "{err}"
        );
        out
    };
    let table = bench("");
    assert!(table.contains("\nflip_count ") && table.contains("not run: upload"), "{table}");
    let report: Value = serde_json::from_str(&bench("--json")).unwrap();
    assert_eq!(report["cases"].as_array().map(Vec::len), Some(1), "{report}");
}

/// Needs no driver: the limits of the kernels are checked first.
#[test]
fn a_shape_that_no_kernel_supports_is_refused_before_a_gpu_is_opened() {
    let place = Place::new();
    for (settings, pattern) in [
        ("model.d_ff=516", "model.d_ff: *multiple of 8*cuda*516"),
        ("model.heads=32", "model.heads: *multiple of 8*at most 128*cuda*found 4"),
        ("model.d_model=8256", "model.d_model: *at most 8192*cuda*8256"),
    ] {
        place.refuses(&format!("train --backend cuda --set {settings} --out run"), 2, pattern);
        place.refuses(&format!("bench --step quickstart --set {settings}"), 2, pattern);
    }
    place.answer("config --set model.d_ff=516");
}

#[test]
fn libraries_are_found_in_the_folders_of_the_environment_alone() {
    let Some((place, driver)) = place() else { return };
    let folder = place.path("libraries");
    assert!(compile(&folder, "libcublasLt.so.13"));
    let file = folder.join("libcublasLt.so.13").display().to_string();
    let named = format!("/nowhere:{}", folder.display());
    let named = [("SPARSE24_CUDA_LIBRARIES", named.as_str())];
    let report = json(command(&place, &driver, &named, "doctor --json"));
    let libraries = report["cuda"]["libraries"].as_array().unwrap();
    let is_cublaslt = |library: &&Value| library["name"].as_str().unwrap().contains("cuBLASLt");
    assert_eq!(libraries.iter().find(is_cublaslt).unwrap()["file"], file.as_str());
    let pattern = format!("{file}*cublasLtCreate*cuBLASLt*CUDA 13");
    place.refuses_command(train(&place, &driver, &named, ""), 6, &pattern);
    // A bench of kernels reports the library before the first kernel.
    let bench = "bench --json --quick --size 128 --kernel flip_count";
    let report = json(command(&place, &driver, &named, bench));
    let problem = report["machine"]["cublaslt"]["problem"].as_str().unwrap();
    assert!(problem.starts_with(&file), "{report}");

    // Configurations and run directories come from others, so they name no code.
    let setting = format!("--set backend.libraries={}", folder.display());
    let train = format!("train {TINY} --out run");
    place.refuses(&format!("{train} {setting}"), 2, "backend.libraries*SPARSE24_CUDA_LIBRARIES");
    place.answer(&train);
    let config = place.path("run/config.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let named = format!("[backend]\nlibraries = {:?}\n", folder.display().to_string());
    std::fs::write(&config, text.replace("[backend]\n", &named).replace("\"cpu\"", "\"cuda\""))
        .unwrap();
    let refused = command(&place, &driver, &[], "resume run").output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(
        refused.status.code().is_some_and(|code| code != 0) && !error.contains(&file),
        "{error}"
    );
}

/// The CUDA bindings use the driver that the loader finds, so folders of libraries are not
/// searched for another one.
#[test]
fn doctor_reports_the_driver_that_is_used() {
    let Some((place, driver)) = place() else { return };
    let elsewhere = place.path("elsewhere");
    assert!(compile(&elsewhere, "libcuda.so.1"));
    let elsewhere = elsewhere.display().to_string();
    let faults = [
        ("FAKE_GPUS", "3"),
        ("FAKE_CAPABILITY", "75"),
        ("SPARSE24_CUDA_LIBRARIES", elsewhere.as_str()),
    ];
    let report = json(command(&place, &driver, &faults, "doctor --json"));
    assert_eq!(report["cuda"]["libraries"][0]["file"], "libcuda.so", "{report}");
    assert_eq!(report["cuda"]["gpus"].as_array().map(Vec::len), Some(3), "{report}");
}

/// Each half runs only on a machine without the library.
#[test]
fn a_missing_or_damaged_library_is_named() {
    let place = Place::new();
    let exists = |name: &str| {
        let libraries = place.json("doctor --json")["cuda"]["libraries"].take();
        libraries.as_array().unwrap().iter().any(|library| {
            library["name"].as_str().unwrap().contains(name) && library["file"].is_string()
        })
    };
    if exists("driver") {
        println!("skipped: this machine has a driver");
    } else {
        let pattern = "driver*libcuda.so, libcuda.so.1*580";
        place.refuses(&format!("train {TINY} --backend cuda --out run"), 6, pattern);
    }
    let Some((place, driver)) = self::place().filter(|_| !exists("cuBLASLt")) else { return };
    let file = driver.join("libcublasLt.so.13");
    std::fs::write(&file, "no library").unwrap();
    let train = || train(&place, &driver, &[], "");
    place.refuses_command(train(), 6, "cuBLASLt*libcublasLt.so.13*file too short");
    std::fs::remove_file(&file).unwrap();
    place.refuses_command(train(), 6, "cuBLASLt*libcublasLt.so.13*/usr/local/cuda/lib64*CUDA 13");
}
