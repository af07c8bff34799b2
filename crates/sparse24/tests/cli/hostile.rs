//! Run directories that somebody else made: nothing outside of them is written, and nothing in them
//! blocks a command.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::support::{Place, SAVED, Tree};

/// Every command that opens a run.
const COMMANDS: [&str; 6] = [
    "resume run --tensorboard",
    "eval run",
    "sample run --tokens 1",
    "export run exported",
    "report run",
    "report --figure quickstart run --out figure.svg",
];

/// Names that a command might write, besides those of a finished run.
const WRITTEN: [&str; 8] = [
    "tensorboard",
    "plans.json",
    "data.json",
    "metrics.1.jsonl",
    ".tmp-metrics.jsonl",
    ".tmp-provenance.json",
    ".tmp-report.html",
    "checkpoints/.tmp-step-00000012",
];

/// Makes `run` anew, without its last checkpoint.
fn reset(place: &Place, whole: &Tree) {
    let run = place.path("run");
    let _ = fs::remove_dir_all(&run);
    fs::create_dir(&run).unwrap();
    for (name, contents) in whole {
        match contents {
            None => fs::create_dir(run.join(name)).unwrap(),
            Some(bytes) => fs::write(run.join(name), bytes).unwrap(),
        }
    }
    place.rewind("run", [12]);
}

fn hostile_run() -> (Place, Tree, Vec<PathBuf>) {
    let place = Place::trained(SAVED);
    let whole = place.tree("run");
    let last = Path::new("checkpoints/step-00000012");
    let names = whole.keys().filter(|name| !name.starts_with(last)).cloned();
    let names = names.chain(["lock"].into_iter().chain(WRITTEN).map(PathBuf::from)).collect();
    (place, whole, names)
}

/// Runs a command, which must end by itself within a minute.
fn ends(place: &Place, line: &str, case: &str) {
    let mut child = place.command(line).stdout(null()).stderr(null()).spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{line} hangs with {case}");
        }
        thread::sleep(Duration::from_millis(2));
    };
    assert!(status.code().is_some_and(|code| code < 100), "{line} with {case}: {status}");
}

fn null() -> std::process::Stdio {
    std::process::Stdio::null()
}

/// Each file and folder of a run is a link to one outside, which is a good one or does not exist.
#[test]
fn no_link_leads_out_of_a_run() {
    let (place, whole, names) = hostile_run();
    for name in &names {
        for exists in [true, false] {
            for line in COMMANDS {
                reset(&place, &whole);
                let _ = fs::remove_dir_all(place.path("outside"));
                let _ = fs::remove_dir_all(place.path("exported"));
                fs::create_dir(place.path("outside")).unwrap();
                let (inner, outer) = (place.path("run").join(name), place.path("outside/victim"));
                if exists && inner.exists() {
                    fs::rename(&inner, &outer).unwrap();
                } else {
                    let _ = fs::remove_file(&inner);
                    let _ = fs::remove_dir_all(&inner);
                    if exists {
                        fs::write(&outer, "precious").unwrap();
                    }
                }
                symlink(&outer, &inner).unwrap();
                let before = place.tree("outside");
                let case = format!("{} as a link (exists: {exists})", name.display());
                ends(&place, line, &case);
                assert!(place.tree("outside") == before, "{line} with {case} writes outside");
            }
        }
    }
}

/// Each file of a run is a pipe, or a link to a device that never ends.
#[test]
fn pipes_and_devices_do_not_block() {
    let (place, whole, names) = hostile_run();
    for name in &names {
        for is_pipe in [true, false] {
            for line in COMMANDS {
                reset(&place, &whole);
                let _ = fs::remove_dir_all(place.path("exported"));
                let inner = place.path("run").join(name);
                let _ = fs::remove_file(&inner);
                let _ = fs::remove_dir_all(&inner);
                if is_pipe {
                    assert!(Command::new("mkfifo").arg(&inner).status().unwrap().success());
                } else {
                    symlink("/dev/zero", &inner).unwrap();
                }
                ends(&place, line, &format!("{} as a pipe or device", name.display()));
            }
        }
    }
}

/// Another process exchanges the folder of checkpoints, and files of the run, with links outside
/// while commands run.
#[test]
fn what_is_exchanged_meanwhile_leads_nowhere() {
    let (place, whole, _) = hostile_run();
    fs::create_dir(place.path("outside")).unwrap();
    let stop = AtomicBool::new(false);
    for (name, kind) in [("checkpoints", true), ("log.txt", false), ("metrics.jsonl", false)] {
        for _ in 0..4 {
            reset(&place, &whole);
            let (inner, aside, victim) =
                (place.path("run").join(name), place.path("aside"), place.path("outside/victim"));
            let _ = fs::remove_dir_all(place.path("outside"));
            fs::create_dir(place.path("outside")).unwrap();
            if kind {
                fs::create_dir(&victim).unwrap();
            } else {
                fs::write(&victim, "precious").unwrap();
            }
            let before = place.tree("outside");
            stop.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        if fs::rename(&inner, &aside).is_ok() {
                            let _ = symlink(&victim, &inner);
                            let _ = fs::remove_file(&inner);
                            let _ = fs::rename(&aside, &inner);
                        }
                    }
                });
                ends(&place, "resume run", name);
                stop.store(true, Ordering::Relaxed);
            });
            assert!(place.tree("outside") == before, "{name} leads outside");
            for left in [place.path("aside"), place.path("run")] {
                let _ = fs::remove_dir_all(&left);
                let _ = fs::remove_file(&left);
            }
        }
    }
}
