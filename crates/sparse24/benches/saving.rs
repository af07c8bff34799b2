//! The cost of saving a checkpoint, and the time from the start of a resume to its first step:
//! `cargo bench -p sparse24 --bench saving [PAIRS]`, on two threads of a quiet machine.
//!
//! Runs of the quickstart with a save every 10 steps alternate with runs without saves. Both must
//! end with the same bits. The cost of a save is the difference in time over the number of saves;
//! saves this frequent make it larger than the noise.

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
    // Cargo passes `--bench` too.
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
        // Both save the last step.
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
    let [mean, low, high] = [cost.mean, low, high].map(|seconds| 1e3 * seconds);
    println!("a save: {mean:.2} ms [{low:.2}, {high:.2}] (mean and 95 % of {pairs} pairs)");

    let mut waits =
        (0..RESUMES).map(|_| resumed(&folder.path().join("killed"))).collect::<Result<Vec<_>>>()?;
    waits.sort_by(f64::total_cmp);
    println!(
        "a resume finishes its first step after {:.2} s ({:.2} to {:.2}, {RESUMES} resumes)",
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
    command
        .args(["train", "--json", "--set", "run.eval_every=0", "--set"])
        .arg(format!("steps={STEPS}"))
        .arg(format!("--checkpoint-every={every}"))
        .arg("--out")
        .arg(out)
        .stdin(Stdio::null());
    command
}

/// The seconds of a whole run.
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

/// Kills a run between two saves. Returns the seconds from the start of a resume to the metrics of
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
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_sparse24"))
        .arg("resume")
        .arg(out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // The resume removes the lines after its checkpoint before it adds its own.
    let mut seen = lines();
    let seconds = loop {
        let now = lines();
        if now > seen {
            break started.elapsed().as_secs_f64();
        }
        seen = now;
        thread::sleep(Duration::from_millis(1));
    };
    child.kill()?;
    child.wait()?;
    fs::remove_dir_all(out)?;
    Ok(seconds)
}
