//! The runs that are killed, each a fraction of a second long, and the comparison of their ends.

use std::{
    env, fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use crate::{
    kills::in_parallel,
    shim::{self, Plan},
    support::{Place, TINY, Tree, checkpoint},
};

/// Settings of a run that the choice of kill points depends on.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) steps: usize,
    /// Steps between mask searches.
    pub(crate) refresh: usize,
    /// Steps between checkpoints.
    pub(crate) every: usize,
    /// Last step of the first phase; its checkpoint is kept.
    pub(crate) switch: usize,
    settings: &'static str,
}

/// Three micro-steps per step, dropout, and evaluations between checkpoints.
pub(crate) const RICH: Shape = Shape {
    steps: 60,
    refresh: 4,
    every: 7,
    switch: 50,
    settings: "--set model.d_model=32 --set model.d_ff=64 --set model.dropout=0.1 --set \
               batch.gradient_accumulation_steps=3 --set run.eval_every=9",
};

/// The shortest run with a phase switch and a rotation in each phase.
pub(crate) const SHORT: Shape =
    Shape { steps: 6, refresh: 2, every: 2, switch: 5, settings: "--set run.keep_last=1" };

/// Dense until Adam's variance settles between steps 1 and 6, then sparse with it frozen. The
/// statistics and the step of the switch are part of the state.
pub(crate) const SETTLING: Shape = Shape {
    steps: 12,
    refresh: 1,
    every: 3,
    switch: 4,
    settings: "--method step --set optimizer.beta2=0.75 --set optimizer.epsilon=1e-3 --set \
               run.keep_last=9",
};

/// Four replicas, dropout, and evaluations between checkpoints, for one to four ranks.
pub(crate) const RANKED: Shape = Shape {
    steps: 20,
    refresh: 4,
    every: 6,
    switch: 16,
    settings: "--set batch.gradient_accumulation_steps=4 --set batch.replicas=4 --set \
               model.dropout=0.1 --set run.eval_every=9",
};

/// Short, with large headers and manifests relative to the tensors.
pub(crate) const DEEP: Shape =
    Shape { settings: "--set run.keep_last=1 --set model.layers=8 --set model.d_model=8", ..SHORT };

impl Shape {
    /// The command line that starts the run, or resumes it once that is possible.
    pub(crate) fn next_line(self, run: &Path) -> String {
        let Self { steps, refresh, every, settings, .. } = self;
        let at = run.display();
        if run.join("config.toml").exists() {
            return format!("resume {at}");
        }
        // Each rank of a GPU run needs a GPU of its own.
        let backend = match env::var("SPARSE24_CRASH_BACKEND") {
            Ok(backend) if !settings.contains("batch.replicas") => backend,
            _ => "cpu".to_owned(),
        };
        format!(
            "train {TINY} --backend {backend} --set steps={steps} --set method.refresh={refresh} \
             --checkpoint-every {every} {settings} --out {at}"
        )
    }

    /// The files in which finished runs must agree: the checkpoints at the switch and at the end,
    /// leftovers beside them, the configuration, the tokenizer, and the metrics without times.
    pub(crate) fn end(self, place: &Place, run: &str) -> Tree {
        let kept = [self.switch, self.steps].map(|step| format!("checkpoints/step-{step:08}"));
        let mut end = place.tree(run);
        end.retain(|path, _| {
            let name = path.to_str().unwrap();
            let is_leftover =
                name.starts_with("checkpoints/") && !name.starts_with("checkpoints/step-");
            let is_kept = kept.iter().any(|kept| path.starts_with(kept));
            is_kept || is_leftover || ["config.toml", "tokenizer.json"].contains(&name)
        });
        let metrics = format!("{:?}", place.timeless(run));
        end.insert("metrics.jsonl".into(), Some(metrics.into_bytes()));
        end
    }
}

/// The first path whose contents differ.
pub(crate) fn difference<'a>(found: &'a Tree, expected: &'a Tree) -> Option<&'a PathBuf> {
    found.keys().chain(expected.keys()).find(|path| found.get(*path) != expected.get(*path))
}

/// An undisturbed run.
pub(crate) struct Whole {
    pub(crate) end: Tree,
    /// File operations: name, and path relative to the run directory.
    pub(crate) operations: Vec<(String, PathBuf)>,
    pub(crate) duration: Duration,
}

impl Whole {
    pub(crate) fn train(place: &Place, shape: Shape) -> Self {
        let (root, trace) = (place.path("whole"), place.path("trace"));
        let mut command = place.command(&shape.next_line(&root));
        shim::traced(&mut command, &root, &trace);
        let began = Instant::now();
        assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
        let duration = began.elapsed();
        let operation = |line: &str| {
            let (what, path) = line.split_once(' ').unwrap();
            (what.to_owned(), Path::new(path).strip_prefix(&root).unwrap().to_owned())
        };
        let operations = fs::read_to_string(trace).unwrap().lines().map(operation).collect();
        let switch = place.path(&checkpoint("whole", shape.switch as u32));
        assert!(switch.exists(), "the switch is elsewhere");
        Self { end: shape.end(place, "whole"), operations, duration }
    }

    /// Number of operations below a part of the run directory.
    pub(crate) fn operations_below(&self, part: &str) -> usize {
        self.operations.iter().filter(|(_, path)| path.starts_with(part)).count()
    }
}

/// Kills a command that writes to `out` at each `stride`-th file operation, gives it again, and
/// compares its exit code and its end with those of an undisturbed one.
pub(crate) fn kill_everywhere(
    place: &Place,
    stride: usize,
    line: &(dyn Fn(&Path) -> String + Sync),
    end: &(dyn Fn(&str) -> Tree + Sync),
) {
    let (out, trace) = (place.path("out"), place.path("trace"));
    let mut whole = place.command(&line(&out));
    shim::traced(&mut whole, &out, &trace);
    let ended = whole.output().unwrap().status.code();
    let (expected, operations) = (end("out"), fs::read_to_string(&trace).unwrap().lines().count());
    let killed = in_parallel(1, 0..operations.div_ceil(stride), |index| {
        let (operation, name) = (index * stride, format!("out-{index}"));
        let out = place.path(&name);
        let mut command = place.command(&line(&out));
        shim::under(&mut command, &out, Plan::Kill(operation));
        let was_killed = command.output().unwrap().status.signal() == Some(9);
        let output = place.command(&line(&out)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), ended, "killed at operation {operation}: {said}");
        assert_eq!(difference(&end(&name), &expected), None, "killed at operation {operation}");
        fs::remove_dir_all(&out).unwrap();
        was_killed
    });
    let kills = killed.into_iter().filter(|was_killed| *was_killed).count();
    println!("killed at {kills} of {operations} operations");
    // The order of a run and its saver thread varies: the last operations may be missing.
    assert!(kills > 30 && 8 * kills * stride > 7 * operations, "{kills} kills");
}

/// The order that recovery relies on: metrics, files and directory of a checkpoint are synced
/// before it is renamed, the manifest is written last, and nothing older is removed before the
/// rename is synced.
#[test]
fn everything_is_synced_before_what_relies_on_it() {
    let place = Place::new();
    let whole = Whole::train(&place, RICH);
    // The run writes metrics while the saver thread works.
    let is_of_save =
        |(what, path): &&(String, PathBuf)| path.starts_with("checkpoints") || what == "fdatasync";
    // An evaluation after the last save rewrites the metrics' last line by replacing the file; the
    // saver may still sync the old file after that, which then shows as `(deleted)`.
    let name = |(what, path): &(String, PathBuf)| {
        let name = path.file_name().unwrap().to_str().unwrap();
        format!("{what} {}", name.trim_end_matches(" (deleted)"))
    };
    let mut operations: Vec<String> =
        whole.operations.iter().filter(is_of_save).map(name).collect();
    // A file is written in pieces, and removed in any order.
    operations.dedup();
    operations.retain(|operation| !operation.starts_with("unlinkat "));
    let first = operations.iter().position(|operation| operation == "mkdir checkpoints").unwrap();
    operations.remove(first);
    let saves: Vec<&[String]> =
        operations.split_inclusive(|operation| operation == "fsync checkpoints").collect();
    assert_eq!(saves.len(), RICH.steps / RICH.every + 2, "periodic saves, the switch and the end");
    for save in saves {
        let named =
            save.iter().position(|operation| operation.starts_with("rename step-")).unwrap();
        let name = save[named].strip_prefix("rename ").unwrap();
        let mut expected = vec!["fdatasync metrics.jsonl".to_owned(), format!("mkdir .tmp-{name}")];
        for file in ["model", "optimizer", "masks", "state", "manifest"] {
            let kind = if ["state", "manifest"].contains(&file) { "json" } else { "safetensors" };
            expected.extend(["open", "write", "fsync"].map(|what| format!("{what} {file}.{kind}")));
        }
        let last = [format!("fsync .tmp-{name}"), format!("rename {name}")];
        expected.extend(last.into_iter().chain(["fsync checkpoints".to_owned()]));
        let removed =
            save.iter().take_while(|operation| operation.starts_with("rename .tmp-step-")).count();
        assert_eq!(save[removed..], expected);
    }
}
