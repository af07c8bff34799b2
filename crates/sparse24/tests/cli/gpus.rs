//! `--backend cuda` where a part of the GPU is missing, before a GPU computes: refused, never
//! replaced by the CPU. The missing parts are simulated by a driver that is compiled from
//! `gpus/driver.c` and loaded before all others.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use serde_json::Value;

use crate::support::{Place, TINY, is_like};

/// The folder of the compiled driver; none without a C compiler. It is not below a [`Place`]:
/// folders in memory may not hold programs.
static DRIVER: LazyLock<Option<PathBuf>> = LazyLock::new(|| compiled("driver", &[]));

fn compiled(name: &str, flags: &[&str]) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/gpus/driver.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", source]).args(flags).arg("-o");
    match compiler.arg(folder.join("libcuda.so")).status() {
        Ok(status) => assert!(status.success(), "{compiler:?}"),
        Err(error) => {
            println!("skipped: the driver needs a C compiler: {error}");
            return None;
        }
    }
    Some(folder)
}

/// The folder of a copy of the driver with this name.
fn copied(name: &str) -> Option<PathBuf> {
    let driver = DRIVER.as_ref()?;
    let folder = driver.with_file_name(format!("with-{name}"));
    fs::create_dir_all(&folder).unwrap();
    fs::copy(driver.join("libcuda.so"), folder.join(name)).unwrap();
    Some(folder)
}

/// The command with the driver and its faults, and no other CUDA library in a folder that the
/// environment names; none without a driver.
fn command(place: &Place, faults: &[(&str, &str)], line: &str) -> Option<Command> {
    let driver = DRIVER.as_ref()?;
    let mut command = place.command(line);
    command
        .env("LD_LIBRARY_PATH", driver)
        .env("SPARSE24_CUDA_LIBRARIES", driver)
        .envs(faults.iter().copied());
    Some(command)
}

/// [`Place::refuses`], with the exit code of a device.
fn refuses(place: &Place, faults: &[(&str, &str)], line: &str, pattern: &str) {
    if let Some(command) = command(place, faults, line) {
        place.refuses_command(command, 6, pattern);
    }
}

fn json(mut command: Command) -> Value {
    serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
}

#[test]
fn a_missing_part_of_a_gpu_is_named() {
    let place = Place::new();
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
        let line = format!("train {TINY} --backend cuda {more} --out run");
        refuses(&place, &[faults], &line, pattern);
    }
}

/// As in a stub of the driver.
#[test]
fn a_missing_function_of_the_driver_is_named() {
    let place = Place::new();
    let Some(folder) = compiled("incomplete-driver", &["-DcuDeviceGet=otherwise"]) else { return };
    let folder = folder.to_str().unwrap();
    let line = format!("train {TINY} --backend cuda --out run");
    let pattern = "libcuda.so is not*no function cuDeviceGet; *release 580";
    refuses(&place, &[("LD_LIBRARY_PATH", folder)], &line, pattern);
}

#[test]
fn a_gpu_is_selected_by_its_index() {
    let place = Place::new();
    let faults = [("FAKE_GPUS", "2")];
    let Some(doctor) = command(&place, &faults, "doctor --json --gpu 5") else { return };
    let report = json(doctor);
    let backends = report["backends"].as_array().unwrap();
    let cuda = backends.iter().find(|backend| backend["name"] == "cuda").unwrap();
    assert!(cuda["problem"].as_str().unwrap().contains("GPU 5 does not exist"), "{report}");
    for (more, index) in
        [("--set backend.gpu=3", 3), ("--gpu 4", 4), ("--set backend.gpu=1 --gpu 2", 2)]
    {
        let line = format!("bench --step quickstart {more}");
        refuses(&place, &faults, &line, &format!("GPU {index} does not exist"));
    }
}

#[test]
fn doctor_survives_a_driver_that_crashes() {
    let place = Place::new();
    let Some(mut doctor) = command(&place, &[("FAKE_SIGNAL", "11")], "doctor") else { return };
    let output = doctor.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "backend cpu   ready*backend cuda  crashed: *SIGSEGV*runs can be written";
    assert!(output.status.success() && is_like(&text, expected), "{text}");
}

#[test]
fn a_bench_that_fails_prints_its_results() {
    let place = Place::new();
    for more in ["", "--json"] {
        let line = format!("bench --quick --size 128 --kernel spmm24_mma {more}");
        let Some(mut bench) = command(&place, &[("FAKE_COPIES", "1")], &line) else { return };
        let output = bench.output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{output:?}");
        let [out, err] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(is_like(&err, "error: upload: *CUDA_ERROR_LAUNCH_FAILED"), "{err}");
        if more.is_empty() {
            assert!(is_like(&out, "\nspmm24_mma_transposed *not run: upload"), "{out}");
        } else {
            let report: Value = serde_json::from_str(&out).unwrap();
            assert_eq!(report["cases"].as_array().map(Vec::len), Some(1), "{report}");
        }
    }
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
    let place = Place::new();
    let Some(folder) = copied("libcublasLt.so.13") else { return };
    let file = folder.join("libcublasLt.so.13").display().to_string();
    let named = format!("/nowhere:{}", folder.display());
    let named = [("SPARSE24_CUDA_LIBRARIES", named.as_str())];
    let report = json(command(&place, &named, "doctor --json").unwrap());
    let libraries = report["cuda"]["libraries"].as_array().unwrap();
    let is_cublaslt = |library: &&Value| library["name"].as_str().unwrap().contains("cuBLASLt");
    assert_eq!(libraries.iter().find(is_cublaslt).unwrap()["file"], file.as_str());
    let line = format!("train {TINY} --backend cuda --out run");
    refuses(&place, &named, &line, &format!("{file}*cublasLtCreate*cuBLASLt*CUDA 13"));
    // A bench of kernels reports the library before the first kernel.
    let bench = "bench --json --quick --size 128 --kernel spmm24_mma";
    let report = json(command(&place, &named, bench).unwrap());
    let problem = report["machine"]["cublaslt"]["problem"].as_str().unwrap();
    assert!(problem.starts_with(&file), "{report}");

    // Configurations and run directories come from others, so they name no code.
    let setting = format!("--set backend.libraries={}", folder.display());
    let train = format!("train {TINY} --out run");
    place.refuses(&format!("{train} {setting}"), 2, "backend.libraries*SPARSE24_CUDA_LIBRARIES");
    place.answer(&train);
    let config = place.path("run/config.toml");
    let text = fs::read_to_string(&config).unwrap();
    let named = format!("[backend]\nlibraries = {:?}\n", folder.display().to_string());
    fs::write(&config, text.replace("[backend]\n", &named).replace("\"cpu\"", "\"cuda\"")).unwrap();
    let refused = command(&place, &[], "resume run").unwrap().output().unwrap();
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
    let place = Place::new();
    let Some(elsewhere) = copied("libcuda.so.1") else { return };
    let elsewhere = elsewhere.display().to_string();
    let faults = [
        ("FAKE_GPUS", "3"),
        ("FAKE_CAPABILITY", "75"),
        ("SPARSE24_CUDA_LIBRARIES", elsewhere.as_str()),
    ];
    let report = json(command(&place, &faults, "doctor --json").unwrap());
    assert_eq!(report["cuda"]["libraries"][0]["file"], "libcuda.so", "{report}");
    assert_eq!(report["cuda"]["gpus"].as_array().map(Vec::len), Some(3), "{report}");
}

/// Each half runs only on a machine without the library.
#[test]
fn a_missing_or_damaged_library_is_named() {
    let place = Place::new();
    let libraries = place.json("doctor --json")["cuda"]["libraries"].take();
    let exists = |name: &str| {
        libraries.as_array().unwrap().iter().any(|library| {
            library["name"].as_str().unwrap().contains(name) && library["file"].is_string()
        })
    };
    let line = format!("train {TINY} --backend cuda --out run");
    if exists("driver") {
        println!("skipped: this machine has a driver");
    } else {
        place.refuses(&line, 6, "driver*libcuda.so, libcuda.so.1*580");
    }
    if exists("cuBLASLt") {
        println!("skipped: this machine has cuBLASLt");
        return;
    }
    refuses(&place, &[], &line, "cuBLASLt*libcublasLt.so.13*/usr/local/cuda/lib64*CUDA 13");
    place.write("libcublasLt.so.13", "no library");
    let folder = place.path("").display().to_string();
    let named = [("SPARSE24_CUDA_LIBRARIES", folder.as_str())];
    refuses(&place, &named, &line, "cuBLASLt*libcublasLt.so.13*file too short");
}
