//! kill -9 at file operations chosen by index, at a delay after a step, and at random times;
//! sometimes again during the resume.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use crate::{
    run::{RICH, SETTLING, SHORT, Shape, Whole},
    shim::{self, Plan},
    support::Place,
};

/// A deterministic stream of numbers: splitmix64.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }
}

/// Where a process dies.
#[derive(Debug, Clone, Copy)]
enum Point {
    /// Before, or halfway through, the Nth operation of saves and rotations.
    InSave(usize),
    /// The same for all operations in the run directory.
    AnyOperation(usize),
    /// Microseconds after a step was logged: in the next one's micro-steps or mask refresh.
    AfterStep(usize, u64),
    /// Microseconds after the run directory was created.
    AnyTime(u64),
}

impl Point {
    fn draw(numbers: &mut Numbers, whole: &Whole) -> Self {
        let total = whole.duration.as_micros() as usize;
        let Shape { steps, refresh, .. } = RICH;
        match numbers.below(20) {
            0..9 => Self::InSave(numbers.below(whole.operations_below("checkpoints"))),
            9..12 => Self::AnyOperation(numbers.below(whole.operations.len())),
            12..18 => {
                let step = match numbers.below(3) {
                    0 => RICH.switch - 1 + numbers.below(3),
                    1 => refresh * (1 + numbers.below(steps / refresh - 1)) - numbers.below(2),
                    _ => 1 + numbers.below(steps - 1),
                };
                Self::AfterStep(step, numbers.below(2 * total / steps) as u64)
            }
            _ => Self::AnyTime(numbers.below(total) as u64),
        }
    }

    /// The part of the run directory whose operations are counted, and the plan for them.
    fn plan(self) -> (&'static str, Plan) {
        match self {
            Self::InSave(at) => ("checkpoints", Plan::Kill(at)),
            Self::AnyOperation(at) => ("", Plan::Kill(at)),
            // The first operation opens the file; each line is one more.
            Self::AfterStep(step, delay) => ("metrics.jsonl", Plan::KillLater(step, delay)),
            Self::AnyTime(delay) => ("", Plan::KillLater(0, delay)),
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::InSave(_) => "at an operation of a save",
            Self::AnyOperation(_) => "at any file operation",
            Self::AfterStep(..) => "in a step, near the switch or a mask search for most",
            Self::AnyTime(_) => "at any time",
        }
    }
}

/// Counts of kills by kind and place.
#[derive(Default)]
struct Tally {
    kills: BTreeMap<&'static str, usize>,
    /// With an unfinished or outdated checkpoint on the disk.
    in_save: usize,
    at_start: usize,
    sparse: usize,
    dense: usize,
    resumes: usize,
}

/// Runs the command up to a point; returns whether it died there.
fn dies(place: &Place, run: &Path, point: Point) -> bool {
    let (part, plan) = point.plan();
    let mut command = place.command(&RICH.next_line(run));
    let root = if part.is_empty() { run.to_owned() } else { run.join(part) };
    shim::under(&mut command, &root, plan);
    let output = command.stdout(Stdio::null()).output().unwrap();
    let died = output.status.signal() == Some(9);
    assert!(
        died || output.status.success(),
        "{point:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    died
}

/// Kills one run, perhaps again while it resumes, resumes it to its end and compares that.
fn crash(place: &Place, whole: &Whole, index: usize, tally: &Mutex<Tally>) -> Result<(), String> {
    let mut numbers = Numbers(index as u64);
    let run = place.path(&format!("run-{index}"));
    let name = run.file_name().unwrap().to_str().unwrap().to_owned();
    let mut points = Vec::new();
    // A time may be beyond the end of the run; then it is started again.
    while points.is_empty() || (points.len() < 3 && numbers.below(4) == 0) {
        let point = Point::draw(&mut numbers, whole);
        if dies(place, &run, point) {
            points.push(point);
            count(&mut tally.lock().unwrap(), point, &run);
        } else if points.is_empty() {
            fs::remove_dir_all(&run).unwrap();
        } else {
            break;
        }
    }
    let output = place.command(&RICH.next_line(&run)).output().unwrap();
    let wrong = |what: String| Err(format!("SPARSE24_CRASH={index}: killed {points:?}: {what}"));
    if !output.status.success() {
        return wrong(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    tally.lock().unwrap().resumes += 1;
    match whole.difference(place, &name) {
        Some(difference) => wrong(difference),
        None => {
            fs::remove_dir_all(&run).unwrap();
            Ok(())
        }
    }
}

fn count(tally: &mut Tally, point: Point, run: &Path) {
    *tally.kills.entry(point.kind()).or_default() += 1;
    let names = |folder: PathBuf| {
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().file_name())
    };
    let unfinished =
        names(run.join("checkpoints")).any(|name| !name.to_str().unwrap().starts_with("step-"));
    tally.in_save += usize::from(unfinished);
    let told = fs::read(run.join("metrics.jsonl"))
        .unwrap_or_default()
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count();
    match told {
        _ if !run.join("config.toml").exists() => tally.at_start += 1,
        told if told < RICH.switch => tally.sparse += 1,
        _ => tally.dense += 1,
    }
}

/// Kills the run at each of its file operations in turn.
fn kill_at_every_operation(shape: Shape) {
    let place = Place::new();
    let (whole, run) = (Whole::train(&place, shape), place.path("run"));
    let (mut kills, mut starts) = (0, 0);
    for operation in 0..whole.operations.len() {
        let mut command = place.command(&shape.next_line(&run));
        shim::under(&mut command, &run, Plan::Kill(operation));
        kills += usize::from(command.output().unwrap().status.signal() == Some(9));
        let next = shape.next_line(&run);
        starts += usize::from(next.starts_with("train"));
        place.answer(&next);
        assert_eq!(whole.difference(&place, "run"), None, "killed at operation {operation}");
        fs::remove_dir_all(&run).unwrap();
    }
    println!("killed at each of {kills} operations, {starts} of them before it could be resumed");
    // The order of the run and its saver thread varies: the last operations may be missing.
    assert!(
        kills + 9 > whole.operations.len() && starts > 15,
        "{kills} kills, {starts} in the start"
    );
}

#[test]
fn a_run_killed_at_every_operation_resumes_to_the_same_bits() {
    kill_at_every_operation(SHORT);
}

#[test]
fn a_settling_run_killed_at_every_operation_resumes_to_the_same_bits() {
    kill_at_every_operation(SETTLING);
}

/// `SPARSE24_CRASHES` is the number of runs (200 by default); `SPARSE24_CRASH` repeats a single one
/// by its index.
#[test]
fn a_run_killed_anywhere_resumes_to_the_same_bits() {
    let number = |name: &str| {
        env::var(name).ok().map(|value| value.parse::<usize>().expect("a whole number"))
    };
    let indices = match number("SPARSE24_CRASH") {
        Some(index) => index..index + 1,
        None => 0..number("SPARSE24_CRASHES").unwrap_or(200),
    };
    let place = Place::new();
    let (whole, began) = (Whole::train(&place, RICH), Instant::now());
    let (next, tally, failures) =
        (AtomicUsize::new(indices.start), Mutex::default(), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= indices.end {
                        break;
                    }
                    if let Err(failure) = crash(&place, &whole, index, &tally) {
                        failures.lock().unwrap().push(failure);
                    }
                }
            });
        }
    });
    let (tally, failures): (Tally, Vec<String>) =
        (tally.into_inner().unwrap(), failures.into_inner().unwrap());
    let kills: usize = tally.kills.values().sum();
    let Tally { in_save, at_start, sparse, dense, resumes, .. } = &tally;
    println!(
        "{kills} kills in {} runs, {in_save} of them in a save; {at_start} before the run could be \
         resumed, {sparse} before the switch, {dense} after it; {resumes} runs resumed to their \
         end; {:.0} s",
        indices.len(),
        began.elapsed().as_secs_f64()
    );
    tally.kills.iter().for_each(|(kind, kills)| println!("{kills:>6} {kind}"));
    assert!(failures.is_empty(), "{} runs failed:\n{}", failures.len(), failures.join("\n"));
    let chosen = tally.kills.get(Point::InSave(0).kind()).copied().unwrap_or_default();
    assert!(
        indices.len() == 1 || 4 * chosen >= kills,
        "a quarter of the kills should be at operations of saves"
    );
}
