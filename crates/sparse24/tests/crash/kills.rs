//! kill -9 at file operations chosen by index, at a delay after a step, and at random times;
//! sometimes again during the resume.

use std::{
    collections::BTreeMap, env, fs, ops::Range, os::unix::process::ExitStatusExt, path::Path,
    process::Stdio, sync::Mutex, thread,
};

use crate::{
    run::{RICH, SETTLING, SHORT, Shape, Whole, difference, kill_everywhere},
    shim::{self, Plan},
    support::Place,
};

/// A deterministic stream of numbers: splitmix64.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }
}

/// Results of a function for each of these indices, on this many threads per core.
pub(crate) fn in_parallel<T: Send>(
    per_core: usize,
    indices: Range<usize>,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let (indices, results) = (Mutex::new(indices), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..per_core * thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(index) = indices.lock().unwrap().next() else { break };
                    let result = work(index);
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    results.into_inner().unwrap()
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

/// Kills one run, perhaps again while it resumes, resumes it to its end and compares that. Returns
/// where it was killed.
fn crash(place: &Place, whole: &Whole, index: usize) -> Result<Vec<Point>, String> {
    let mut numbers = Numbers(index as u64);
    let name = format!("run-{index}");
    let run = place.path(&name);
    let mut points = Vec::new();
    // A time may be beyond the end of the run; then it is started again.
    while points.is_empty() || (points.len() < 3 && numbers.below(4) == 0) {
        let point = Point::draw(&mut numbers, whole);
        if dies(place, &run, point) {
            points.push(point);
        } else if points.is_empty() {
            fs::remove_dir_all(&run).unwrap();
        } else {
            break;
        }
    }
    let output = place.command(&RICH.next_line(&run)).output().unwrap();
    let wrong = |what: &str| Err(format!("SPARSE24_CRASH={index}: killed {points:?}: {what}"));
    if !output.status.success() {
        return wrong(&String::from_utf8_lossy(&output.stderr));
    }
    if let Some(path) = difference(&RICH.end(place, &name), &whole.end) {
        return wrong(&format!("{} differs", path.display()));
    }
    fs::remove_dir_all(&run).unwrap();
    Ok(points)
}

#[test]
fn a_run_killed_at_every_operation_resumes_to_the_same_bits() {
    for shape in [SHORT, SETTLING] {
        let place = Place::new();
        kill_everywhere(&place, 1, &|out| shape.next_line(out), &|out| shape.end(&place, out));
    }
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
    let whole = Whole::train(&place, RICH);
    let results = in_parallel(1, indices.clone(), |index| crash(&place, &whole, index));
    let (mut kills, mut failures) = (BTreeMap::new(), Vec::new());
    for result in results {
        match result {
            Ok(points) => {
                points.iter().for_each(|point| *kills.entry(point.kind()).or_insert(0) += 1);
            }
            Err(failure) => failures.push(failure),
        }
    }
    println!("kills in {} runs: {kills:#?}", indices.len());
    assert!(failures.is_empty(), "{} runs failed:\n{}", failures.len(), failures.join("\n"));
    let in_saves = kills.get(Point::InSave(0).kind()).copied().unwrap_or(0);
    assert!(
        indices.len() == 1 || 4 * in_saves >= kills.values().sum(),
        "a quarter of the kills should be at operations of saves"
    );
}
