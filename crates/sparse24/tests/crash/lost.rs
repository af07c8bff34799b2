//! A run whose GPU is lost or lacks memory, by a Vulkan driver (`lost.c`) that stops working at a
//! chosen submission or wait, or refuses large allocations.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use crate::support::{Place, SAVED, TINY, is_like};

/// The file by which Vulkan finds the driver, which is compiled once.
static DRIVER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/crash/lost.c");
    let library = folder.join("liblost.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", source, "-o"]).arg(&library);
    assert!(compiler.status().expect("a C compiler, which Rust needs for linking").success());
    let manifest = serde_json::json!({
        "file_format_version": "1.0.0",
        "ICD": { "library_path": library, "api_version": "1.1.0" },
    });
    fs::write(folder.join("lost.json"), manifest.to_string()).unwrap();
    folder.join("lost.json")
});

/// The output of a command, which is killed if it has not ended after two minutes.
fn ended(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// The first 64 MiB are one allocation; activations need more.
#[test]
fn memory_that_is_refused_is_named_by_its_tensor() {
    let place = Place::new();
    let line = format!("train {TINY} --set batch.size=9000 --backend wgpu --out run");
    let mut command = place.command(&line);
    command.env("VK_ICD_FILENAMES", &*DRIVER).env_remove("VK_DRIVER_FILES");
    let refused = ended(command.env("LOST_ABOVE", (64 << 20).to_string()));
    let said = String::from_utf8_lossy(&refused.stderr);
    if said.contains("no GPU adapter") && env::var_os("SPARSE24_REQUIRE_WGPU").is_none() {
        return println!("skipped: {said}");
    }
    let expected = "error: out of GPU memory: h.*bytes are already allocated; lower batch.size";
    assert!(refused.status.code() == Some(6) && is_like(&said, expected), "{said}");
}

#[test]
fn a_run_whose_gpu_is_lost_resumes_to_the_same_bits() {
    let place = Place::new();
    let command = |line: &str| {
        let mut command = place.command(line);
        command.env("VK_ICD_FILENAMES", &*DRIVER).env_remove("VK_DRIVER_FILES");
        command
    };
    let train = format!("train {TINY} {SAVED} --backend wgpu --out");
    let output = command(&format!("{train} whole")).env("LOST_TRACE", place.path("trace")).output();
    let said = String::from_utf8(output.unwrap().stderr).unwrap();
    if said.contains("no GPU adapter") && env::var_os("SPARSE24_REQUIRE_WGPU").is_none() {
        return println!("skipped: {said}");
    }
    let saved = place.checkpoints("whole");
    assert_eq!(saved.len(), 4, "{said}");
    let end = |run| (place.saved(run, 12), place.timeless(run));
    let events = place.read("trace").len();
    let lose = |at: usize, out: &str| {
        let lost = ended(command(&format!("{train} {out}")).env("LOST_AT", at.to_string()));
        let said = String::from_utf8_lossy(&lost.stderr);
        let error = said.lines().last().unwrap_or_default();
        let expected = "error: the GPU was lost*a smaller batch.size";
        assert!(lost.status.code() == Some(6) && is_like(error, expected), "{at}: {said}");
        error.to_owned()
    };
    // The self-test has these.
    for at in 0..10 {
        let error = lose(at, &format!("unopened-{at}"));
        assert!(!error.contains("resume"), "{error}");
    }
    let mut kept = Vec::new();
    for at in (1..6).map(|part| events * part / 6) {
        let error = lose(at, "run");
        let [is_begun, is_saved] =
            ["run/config.toml", "run/checkpoints"].map(|name| place.path(name).exists());
        let left = if is_saved { place.checkpoints("run") } else { Vec::new() };
        let advice = "; a resume continues from the checkpoint of step ";
        let told = error.split_once(advice).map(|(_, step)| format!("step-{step:0>8}"));
        assert_eq!(told.as_ref(), left.last(), "{at}: {error}");
        for name in &left {
            let [found, whole] =
                ["run", "whole"].map(|run| place.tree(&format!("{run}/checkpoints/{name}")));
            assert!(found == whole, "{at}: {name} is not that of the whole run");
        }
        let next = if is_begun { "resume run".to_owned() } else { format!("{train} run") };
        let resumed = command(&next).output().unwrap();
        let said = String::from_utf8_lossy(&resumed.stderr);
        assert!(resumed.status.success(), "{at}: {said}");
        assert!(end("run") == end("whole"), "{at}: the resumed run ends elsewhere");
        fs::remove_dir_all(place.path("run")).unwrap();
        kept.push(left.len());
    }
    println!("lost at 5 of {events} submissions and waits, with {kept:?} checkpoints");
    assert!(kept.iter().any(|&kept| 0 < kept && kept < saved.len()), "{kept:?}");
}
