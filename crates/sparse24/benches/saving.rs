//! What saving costs a run, and how soon a resume steps:
//! `cargo bench -p sparse24 --bench saving [PAIRS]`, two threads' worth of a quiet machine.
//!
//! Runs of the quickstart that save every 10 steps and not at all take turns, in either order; both
//! end with the same bits, which is checked before a time counts. The cost of a save is the
//! difference over their number: a save every 10 steps shows it above the noise of whole runs, and
//! one every 50 costs a fifth of that a step.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sparse24_lab::statistics::{Interval, quantile};

const STEPS: u32 = 250;
const EVERY: u32 = 10;
const RESUMES: usize = 9;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    // Cargo adds `--bench`.
    let pairs = env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'))
        .map_or(Ok(20), |pairs| pairs.parse())?;
    let folder = tempfile::tempdir()?;
    let (mut without, mut costs) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        let mut seconds = [0.0; 2];
        for which in [pair % 2, 1 - pair % 2] {
            seconds[which] = trained(&run(folder.path(), which), [0, EVERY][which])?;
        }
        same_bits(folder.path())?;
        // The last step is saved by both.
        costs.push((seconds[1] - seconds[0]) / f64::from(STEPS / EVERY - 1));
        without.push(seconds[0] / f64::from(STEPS));
        for which in 0..2 {
            fs::remove_dir_all(run(folder.path(), which))?;
        }
    }
    let step = quantile(&without, 0.5).ok_or("no pairs")?;
    let cost = Interval::of(&costs).ok_or("no pairs")?;
    let (low, high) = cost.low.zip(cost.high).ok_or("one pair has no interval")?;
    println!("a step: {:.2} ms (median of {pairs} runs)", 1e3 * step);
    println!(
        "a save: {:.2} ms [{:.2}, {:.2}] (mean and 95 % of {pairs} pairs)",
        1e3 * cost.mean,
        1e3 * low,
        1e3 * high
    );
    let share = |cost: f64| 100.0 * cost / (50.0 * step);
    println!(
        "saving every 50 steps: {:.2} % [{:.2}, {:.2}] of their time",
        share(cost.mean),
        share(low),
        share(high)
    );

    let mut waits =
        (0..RESUMES).map(|_| resumed(&folder.path().join("killed"))).collect::<Result<Vec<_>>>()?;
    waits.sort_by(f64::total_cmp);
    println!(
        "a resume tells its first step after {:.2} s ({:.2} to {:.2}, {RESUMES} resumes)",
        waits[RESUMES / 2],
        waits[0],
        waits[RESUMES - 1]
    );
    Ok(())
}

fn run(folder: &Path, which: usize) -> PathBuf {
    folder.join(["without", "with"][which])
}

fn train(out: &Path, every: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sparse24"));
    let settings = [
        "--set",
        &format!("steps={STEPS}"),
        "--set",
        "run.eval_every=0",
        "--checkpoint-every",
        &every.to_string(),
    ]
    .map(str::to_owned);
    command.args(["train", "--json"]).args(settings).arg("--out").arg(out).stdin(Stdio::null());
    command
}

/// Seconds of a whole run.
fn trained(out: &Path, every: u32) -> Result<f64> {
    let output = train(out, every).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    summary["seconds"].as_f64().ok_or_else(|| "the summary has no seconds".into())
}

fn same_bits(folder: &Path) -> Result<()> {
    let files = [0, 1].map(|which| {
        run(folder, which).join(format!("checkpoints/step-{STEPS:08}/model.safetensors"))
    });
    let [without, with] = files.map(fs::read);
    if without? == with? { Ok(()) } else { Err("saving changed a bit of the model".into()) }
}

/// Kills a run between two saves, and gives the seconds from the start of a resume to the line of
/// its first step.
fn resumed(out: &Path) -> Result<f64> {
    let metrics = out.join("metrics.jsonl");
    let lines = || fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
    let until = |count: usize| {
        while lines() < count {
            thread::sleep(Duration::from_millis(1))
        }
    };
    let mut child = train(out, 20).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    until(50);
    child.kill()?;
    child.wait()?;
    let begun = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_sparse24"))
        .arg("resume")
        .arg(out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // It cuts the lines after its checkpoint before it adds its own.
    let mut seen = lines();
    let seconds = loop {
        let now = lines();
        if now > seen {
            break begun.elapsed().as_secs_f64();
        }
        seen = now;
        thread::sleep(Duration::from_millis(1));
    };
    child.kill()?;
    child.wait()?;
    fs::remove_dir_all(out)?;
    Ok(seconds)
}
