//! Disks that are really full: small file systems in memory, in a mount namespace of the command's
//! own. Skipped, with the reason, where none can be mounted.

use std::{
    fs,
    process::{Command, Output},
};

use crate::{
    run::{DEEP, SHORT, Shape, Whole},
    support::{Place, TINY, is_like},
};

/// Runs a shell script with `place/disk` being a new tmpfs; none if none can be mounted.
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
        Ok(probe) => {
            println!(
                "skipped: no file system can be mounted: {}",
                String::from_utf8_lossy(&probe.stderr).trim()
            );
            None
        }
        Err(error) => {
            println!("skipped: unshare: {error}");
            None
        }
    }
}

/// The command, for a shell in the same place.
fn sparse24(line: &str) -> String {
    format!("{} {line}", env!("CARGO_BIN_EXE_sparse24"))
}

fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_run_that_will_not_fit_does_not_begin() {
    let place = Place::new();
    let run = place.path("disk/run");
    let Some(output) = on_tmpfs(&place, "size=64k", &sparse24(&SHORT.next_line(&run))) else {
        return;
    };
    assert_eq!(output.status.code(), Some(4), "{}", last_line(&output));
    let said = last_line(&output);
    let expected = format!(
        "error: {}: 3 more checkpoints, as run.keep_last, run.keep_every and the switch ask for, need 0.2 MiB of disk space, ",
        run.display()
    );
    assert!(
        said.starts_with(&expected) && said.ends_with(" are free; free some, or keep less"),
        "{said}"
    );
}

/// Room that was there at the start, and that others took before a save.
#[test]
fn a_checkpoint_that_will_not_fit_is_not_begun() {
    let place = Place::new();
    let train = sparse24(&format!(
        "train {TINY} --set steps=1000000 --set model.d_model=128 --checkpoint-every 0 --out {}",
        place.path("disk/run").display()
    ));
    // A mebibyte is left: enough for metrics, not for a checkpoint.
    let script = format!(
        "{train} 2> said & run=$!; until [ -s disk/run/metrics.jsonl ]; do kill -0 $run || exit 99; sleep 0.01; done; \
         head -c $(($(stat -f -c '%a * %S' disk) - (1 << 20))) /dev/zero > disk/others; kill -TERM $run; wait $run; \
         code=$?; ls -A disk/run/checkpoints; exit $code"
    );
    let Some(output) = on_tmpfs(&place, "size=32m", &script) else { return };
    let said = place.read("said");
    assert_eq!(output.status.code(), Some(4), "{said}{}", last_line(&output));
    let pattern = "error: */checkpoints: the tensors of the checkpoint of step * need 1.8 MiB of disk space, * MiB are free; free some, or keep less";
    assert!(is_like(said.lines().last().unwrap(), pattern), "{said}");
    assert!(
        output.stdout.is_empty(),
        "something is left: {}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// Begins a run on each of these small disks, makes the disk large, and goes on; gives what the
/// runs said that failed.
fn exhausted(shape: Shape, disks: impl Iterator<Item = String>) -> Option<Vec<String>> {
    let place = Place::new();
    let (whole, run) = (Whole::train(&place, shape), place.path("disk/run"));
    let mut failures = Vec::new();
    for disk in disks {
        let begin = sparse24(&shape.next_line(&run));
        let script = format!(
            "{begin} 2> said; echo $? > code; mount -o remount,size=4m,nr_inodes=1000 disk; \
             if [ -e disk/run/config.toml ]; then {}; else {begin}; fi && rm -rf run && cp -r disk/run run",
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
        assert_eq!(whole.difference(&place, "run"), None, "{disk}: {said}");
    }
    Some(failures)
}

/// The tensors of the checkpoints would fit, their headers and manifests and what the file system
/// needs itself do not, or just.
#[test]
fn a_disk_that_fills_up_loses_nothing() {
    let Some(failures) = exhausted(DEEP, (220..320).step_by(4).map(|size| format!("size={size}k")))
    else {
        return;
    };
    let ending = |end: &str| failures.iter().filter(|said| said.ends_with(end)).count();
    let (refused, met) = (
        ending(" are free; free some, or keep less"),
        ending("No space left on device (os error 28)"),
    );
    println!(
        "a tmpfs that fills up: {refused} runs did not begin to write, {met} failed in a write; all were done once there was room"
    );
    assert!(
        refused > 0 && met > 0 && refused + met == failures.len() && failures.len() < 25,
        "{failures:?}"
    );
}

/// Bytes are free, but no more files can be made.
#[test]
fn a_disk_without_inodes_loses_nothing() {
    let Some(failures) =
        exhausted(SHORT, (4..40).map(|inodes| format!("size=4m,nr_inodes={inodes}")))
    else {
        return;
    };
    let is_met = |said: &String| {
        said.starts_with("error: cannot ")
            && said.ends_with("No space left on device (os error 28)")
    };
    assert!((10..36).contains(&failures.len()) && failures.iter().all(is_met), "{failures:?}");
    println!(
        "a tmpfs without inodes: {} runs failed in a write; all were done once there were some",
        failures.len()
    );
}
