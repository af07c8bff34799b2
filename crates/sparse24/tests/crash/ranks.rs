//! kill -9 of one of several ranks at random times. The others end by themselves, and the run
//! resumes on another number of ranks.

use std::{
    env, fs,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use crate::{
    kills::Numbers,
    run::{RANKED, Whole, difference},
    support::Place,
};

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
    let attempts = env::var("SPARSE24_CRASHES").map_or(40, |count| count.parse().unwrap());
    let (mut numbers, mut kills) = (Numbers(19), 0);
    for attempt in 0..attempts {
        fs::remove_dir_all(&run).unwrap();
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
        let next = [1, 2, 4][numbers.below(3)];
        let line = format!("launch -n {next} -- {}", RANKED.next_line(&run));
        let output = place.command(&line).output().unwrap();
        assert!(output.status.success(), "{what}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(difference(&RANKED.end(&place, "killed"), &whole.end), None, "{what}");
    }
    println!("killed {kills} of {attempts}");
    assert!(4 * kills > attempts, "{kills} of {attempts} were killed");
}
