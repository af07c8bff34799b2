//! Full disks: small tmpfs mounts in a private mount namespace. Skipped, with the reason, where
//! they cannot be mounted.

use std::{
    fs,
    process::{Command, Output},
};

use crate::{
    run::{DEEP, SHORT, Shape, Whole, difference},
    support::{Place, TINY, is_like},
};

const ENOSPC: &str = "No space left on device (os error 28)";

/// Runs a shell script with a new tmpfs at `place/disk`; none if it cannot be mounted.
fn on_tmpfs(place: &Place, options: &str, script: &str) -> Option<Output> {
    let disk = place.path("disk");
    let _ = fs::create_dir(&disk);
    let namespace = |script: String| {
        Command::new("unshare")
            .args(["-Urm", "sh", "-c", &script])
            .current_dir(place.path(""))
            .output()
    };
    let mount = format!("mount -t tmpfs -o {options} tmpfs {}", disk.display());
    match namespace(mount.clone()) {
        Ok(probe) if probe.status.success() => {
            Some(namespace(format!("{mount} && {script}")).unwrap())
        }
        other => {
            println!("skipped: no file system can be mounted: {other:?}");
            None
        }
    }
}

/// The command line for a shell.
fn sparse24(line: &str) -> String {
    format!("{} {line}", env!("CARGO_BIN_EXE_sparse24"))
}

fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_run_that_will_not_fit_does_not_start() {
    let place = Place::new();
    let run = place.path("disk/run");
    let Some(output) = on_tmpfs(&place, "size=64k", &sparse24(&SHORT.next_line(&run))) else {
        return;
    };
    assert_eq!(output.status.code(), Some(4), "{}", last_line(&output));
    let facts = format!("{}*3 more checkpoints*0.2 MiB*run.keep_last", run.display());
    assert!(is_like(&last_line(&output), &facts), "{}", last_line(&output));
}

/// Other processes use up the disk between the start and a save.
#[test]
fn a_checkpoint_that_will_not_fit_is_not_started() {
    let place = Place::new();
    let train = sparse24(&format!(
        "train {TINY} --set steps=1000000 --set model.d_model=128 --checkpoint-every 0 --out {}",
        place.path("disk/run").display()
    ));
    // A mebibyte is left: enough for metrics, not for a checkpoint.
    let script = format!(
        "{train} 2> said & run=$!; \
         until [ -s disk/run/metrics.jsonl ]; do kill -0 $run || exit 99; sleep 0.01; done; \
         head -c $(($(stat -f -c '%a * %S' disk) - (1 << 20))) /dev/zero > disk/others; \
         kill -TERM $run; wait $run; code=$?; ls -A disk/run/checkpoints; exit $code"
    );
    let Some(output) = on_tmpfs(&place, "size=32m", &script) else { return };
    let said = place.read("said");
    assert_eq!(output.status.code(), Some(4), "{said}{}", last_line(&output));
    assert!(is_like(said.lines().last().unwrap(), "/checkpoints*step*1.8 MiB"), "{said}");
    let left = String::from_utf8_lossy(&output.stdout);
    assert!(left.is_empty(), "something is left: {left}");
}

/// Starts a run on each of these small disks, enlarges the disk and resumes; returns the errors of
/// the runs that failed.
fn exhausted(shape: Shape, disks: impl Iterator<Item = String>) -> Option<Vec<String>> {
    let place = Place::new();
    let (whole, run) = (Whole::train(&place, shape), place.path("disk/run"));
    let mut failures = Vec::new();
    for disk in disks {
        let begin = sparse24(&shape.next_line(&run));
        let script = format!(
            "{begin} 2> said; echo $? > code; \
             mount -o remount,size=4m,nr_inodes=1000 disk; \
             if [ -e disk/run/config.toml ]; then {}; else {begin}; fi && \
             rm -rf run && cp -r disk/run run",
            sparse24(&format!("resume {}", run.display()))
        );
        let output = on_tmpfs(&place, &disk, &script)?;
        let said = place.read("said");
        assert!(output.status.success(), "{disk}: {said}{}", last_line(&output));
        match place.read("code").trim() {
            "0" => {}
            "4" => failures.push(said.lines().last().unwrap().to_owned()),
            code => panic!("{disk}: {code}: {said}"),
        }
        let end = shape.end(&place, "run");
        assert_eq!(difference(&end, &whole.end), None, "{disk}: {said}");
    }
    Some(failures)
}

/// The tensors of the checkpoints fit; headers, manifests and file system overhead do or do not.
#[test]
fn a_disk_that_fills_up_loses_nothing() {
    let Some(failures) = exhausted(DEEP, (220..320).step_by(4).map(|size| format!("size={size}k")))
    else {
        return;
    };
    let met = failures.iter().filter(|message| message.ends_with(ENOSPC)).count();
    let refused = failures.iter().filter(|message| message.contains("MiB of disk space")).count();
    println!("a tmpfs that fills up: {refused} runs refused to save, {met} failed in a write");
    let is_complete = refused + met == failures.len() && failures.len() < 25;
    assert!(refused > 0 && met > 0 && is_complete, "{failures:?}");
}

/// Bytes are free, but inodes are not.
#[test]
fn a_disk_without_inodes_loses_nothing() {
    let Some(failures) =
        exhausted(SHORT, (4..40).map(|inodes| format!("size=4m,nr_inodes={inodes}")))
    else {
        return;
    };
    let is_met = |message: &String| message.starts_with("error: ") && message.ends_with(ENOSPC);
    assert!((10..36).contains(&failures.len()) && failures.iter().all(is_met), "{failures:?}");
    println!("a tmpfs without inodes: {} runs failed in a write", failures.len());
}
