//! One of several ranks is killed or stopped, in each phase of a run and at random times. The
//! others end by themselves, and the run resumes on another number of ranks.

use std::{
    collections::BTreeMap,
    env, fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    kills::{Numbers, in_parallel},
    run::{RANKED, Whole, difference},
    shim::{self, Plan},
    support::{Place, is_like},
};

/// Ranks of a run that is hit in a phase.
const WORLD: usize = 4;

/// A part of a run, between two messages: what a rank does there, the others see only in the second
/// one.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Rank 0 knows all ranks, but not each of the others knows the rest.
    Rendezvous,
    /// From the plans of rank 0 to the first order.
    Planning,
    /// From the order of a step to the first gradients.
    MicroStep,
    /// One rank has gradients of this one, the next a part of them.
    Exchange,
    /// From the losses to the next order.
    Update,
    /// From the order to compare states, or from the comparison to the next order.
    Save,
}

const PHASES: [Phase; 6] = [
    Phase::Rendezvous,
    Phase::Planning,
    Phase::MicroStep,
    Phase::Exchange,
    Phase::Update,
    Phase::Save,
];

impl Phase {
    /// The message in which a rank is hit, of all that it sends. `messages` are those of rank 0 to
    /// one of the others: two that greet, the table of ranks, the facts, the set-up, and so on;
    /// other ranks send no table.
    fn message(self, rank: usize, messages: &[String], numbers: &mut Numbers) -> usize {
        let is = |at: usize, order: &str| messages[at].starts_with(order);
        let mut any = |order: &str| {
            let all: Vec<_> = (0..messages.len()).filter(|&at| is(at, order)).collect();
            all[numbers.below(all.len())]
        };
        let round = match self {
            Self::Rendezvous => return if rank == 0 { 2 * (WORLD - 1) } else { 2 },
            Self::Planning => 4 + usize::from(rank > 0),
            Self::MicroStep | Self::Exchange => any("{\"Step") + 1,
            Self::Update => {
                let orders = ["\"Ask", "\"Evaluate", "\"Compare", "{\"Step", "{\"End"];
                let is_order = |at: &usize| orders.iter().any(|order| is(*at, order));
                (any("{\"Step") + 1..).find(is_order).unwrap()
            }
            Self::Save => any("\"Compare") + 1 + usize::from(rank == 0),
        };
        let first = (round - usize::from(rank > 0)) * (WORLD - 1);
        first + usize::from(matches!(self, Self::Exchange))
    }
}

/// The messages that a rank has sent to each other one, as the shim has traced them.
fn messages(trace: &Path) -> BTreeMap<String, Vec<String>> {
    let mut messages = BTreeMap::<_, Vec<_>>::new();
    for line in fs::read_to_string(trace).unwrap().lines() {
        let (socket, text) = line.strip_prefix("send ").unwrap().split_once(' ').unwrap();
        messages.entry(socket.to_owned()).or_default().push(text.to_owned());
    }
    messages
}

/// Waits until a child has died, or is stopped; it is not reaped.
fn wait_for(child: &Child, state: &str) {
    let began = Instant::now();
    loop {
        let found = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        if found.rsplit(") ").next().unwrap().starts_with(state) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "expected the state {state}: {found}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Hits a rank in a phase, and resumes the run on another number of ranks.
fn hit(place: &Place, whole: &Whole, at: usize, sent: &[String]) {
    let (phase, victim, stops) = (PHASES[at % 6], at / 6 % WORLD, at / (6 * WORLD) == 1);
    let mut numbers = Numbers(at as u64);
    let message = phase.message(victim, sent, &mut numbers);
    let (plan, state) = if stops { (Plan::Stop(message), "T") } else { (Plan::Kill(message), "Z") };
    let (name, trace) = (format!("hit-{at}"), place.path(&format!("trace-{at}")));
    let run = place.path(&name);
    let what = format!("{plan} of rank {victim} in {phase:?}");
    let line = format!("{} --peer-timeout 3", RANKED.next_line(&run));
    let mut ranks = place.ranks(WORLD, &line, |rank, command| {
        if rank == victim {
            shim::under(command, Path::new("socket:"), plan);
            command.env("SHIM_TRACE", &trace);
        }
    });
    let mut lost = ranks.remove(victim);
    wait_for(&lost, state);
    let began = Instant::now();
    let mut is_left = true;
    while is_left && began.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(5));
        is_left = ranks.iter_mut().any(|rank| rank.try_wait().unwrap().is_none());
    }
    ranks.iter_mut().chain([&mut lost]).for_each(|rank| drop(rank.kill()));
    lost.wait().unwrap();
    assert!(!is_left, "{what}: not all others ended within 10 s");
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(7), "{what}: {said}");
        let why = match (phase, stops) {
            // Or there is no answer to a rank that connects.
            (Phase::Rendezvous, _) => "",
            (_, true) => "has sent nothing for 3 s",
            (_, false) => "is gone",
        };
        let named = format!("error: *rank {victim} (*{why}");
        assert!(is_like(&said, &named), "{what}: {said}");
    }
    // It was hit in this message, and none of a later round was sent.
    let counts: Vec<_> = messages(&trace).values().map(Vec::len).collect();
    assert_eq!(counts.iter().sum::<usize>(), message + 1, "{what}: {counts:?}");
    let most = (message / (WORLD - 1) + 1).max(2);
    assert_eq!(counts.iter().max(), Some(&most), "{what}: {counts:?}");
    resume(place, whole, &name, &mut numbers, &what);
}

/// Resumes a run on a random number of ranks, and compares its end.
fn resume(place: &Place, whole: &Whole, name: &str, numbers: &mut Numbers, what: &str) {
    let run = place.path(name);
    let line = format!("launch -n {} -- {}", 1 << numbers.below(3), RANKED.next_line(&run));
    let output = place.command(&line).output().unwrap();
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(difference(&RANKED.end(place, name), &whole.end), None, "{what}");
    fs::remove_dir_all(run).unwrap();
}

#[test]
fn a_rank_that_is_killed_or_stopped_in_any_phase_costs_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, RANKED);
    let trace = place.path("trace-of-ranks");
    let line = RANKED.next_line(&place.path("ranks"));
    let ranks = place.ranks(WORLD, &line, |rank, command| {
        if rank == 0 {
            shim::traced(command, Path::new("socket:"), &trace);
        }
    });
    ranks.into_iter().for_each(|rank| assert!(rank.wait_with_output().unwrap().status.success()));
    let (_, sent) = messages(&trace).pop_first().unwrap();
    let hits = 2 * PHASES.len() * WORLD;
    // Most of the time is spent in waiting for ranks that are stopped.
    in_parallel(2, 0..hits, |at| hit(&place, &whole, at, &sent));
    println!("killed or stopped {hits} ranks in {PHASES:?}");
}

/// Kills a rank that a launcher has started; whether it was there.
fn kill_rank(launcher: u32, rank: usize) -> bool {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let is_rank = |process: &&str| {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        let mut variables = environment.split(|&byte| byte == 0);
        variables.any(|variable| variable == format!("SPARSE24_RANK={rank}").as_bytes())
    };
    let children = children.unwrap_or_default();
    let Some(process) = children.split_whitespace().find(is_rank) else { return false };
    let process = rustix::process::Pid::from_raw(process.parse().unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).is_ok()
}

#[test]
fn a_rank_that_is_killed_at_any_time_costs_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, RANKED);
    let run = place.path("killed");
    let began = Instant::now();
    place.answer(&format!("launch -n 4 -- {}", RANKED.next_line(&run)));
    let duration = began.elapsed().as_micros() as usize;
    fs::remove_dir_all(&run).unwrap();
    let attempts = env::var("SPARSE24_CRASHES").map_or(40, |count| count.parse().unwrap());
    let (mut numbers, mut kills) = (Numbers(19), 0);
    for attempt in 0..attempts {
        let world = 2 << numbers.below(2);
        let line = format!("launch -n {world} -- {}", RANKED.next_line(&run));
        let mut command = place.command(&line);
        let launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(Duration::from_micros(numbers.below(duration) as u64));
        let victim = numbers.below(world);
        let has_steps = fs::metadata(run.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        let was_there = kill_rank(launcher.id(), victim);
        let output = launcher.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let what = format!("attempt {attempt}, rank {victim} of {world}: {said}");
        // A rank that has ended already may be killed too.
        let was_killed = was_there && !output.status.success();
        kills += usize::from(was_killed);
        assert!(output.status.success() || output.status.code() == Some(137), "{what}");
        assert!(!has_steps || !said.contains("are killed"), "{what}");
        resume(&place, &whole, "killed", &mut numbers, &what);
    }
    println!("killed {kills} of {attempts}");
    assert!(4 * kills > attempts, "{kills} of {attempts} were killed");
}
