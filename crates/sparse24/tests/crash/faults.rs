//! Each file operation of a run fails: with ENOSPC, EIO, EDQUOT or EINTR, by a short write, or
//! because the disk is full from then on.

use std::fs;

use crate::{
    kills::in_parallel,
    run::{SHORT, Whole, difference},
    shim::{self, Plan},
    support::Place,
};

const EINTR: i32 = 4;
/// ENOSPC, EIO and EDQUOT.
const FATAL: [i32; 3] = [28, 5, 122];

/// Runs under each of these plans: the run finishes or reports the failure in one sentence, and a
/// resume ends like the undisturbed run. Returns how many runs failed.
fn fail_well(place: &Place, whole: &Whole, plans: &[Plan]) -> usize {
    let failed = in_parallel(1, 0..plans.len(), |at| {
        fails_well(place, whole, &format!("run-{at}"), plans[at])
    });
    failed.into_iter().filter(|failed| *failed).count()
}

fn fails_well(place: &Place, whole: &Whole, name: &str, plan: Plan) -> bool {
    let run = place.path(name);
    let mut command = place.command(&SHORT.next_line(&run));
    shim::under(&mut command, &run, plan);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let is_reported = said.lines().last().is_some_and(|line| line.starts_with("error: "));
    let code = output.status.code();
    assert!(code == Some(0) || code == Some(4) && is_reported, "{plan}: {code:?}: {said}");
    assert!(!said.contains("panicked"), "{plan}: {said}");
    let resumed = place.command(&SHORT.next_line(&run)).output().unwrap();
    assert!(resumed.status.success(), "{plan}: {said}{}", String::from_utf8_lossy(&resumed.stderr));
    let end = SHORT.end(place, name);
    assert_eq!(difference(&end, &whole.end), None, "{plan}: {said}");
    fs::remove_dir_all(run).unwrap();
    code == Some(4)
}

#[test]
fn a_failed_operation_is_reported_and_loses_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, SHORT);
    let mut plans = Vec::new();
    for (at, (operation, _)) in whole.operations.iter().enumerate() {
        // The saves fail with every error at every operation in the tests of `sparse24-run`.
        plans.extend([Plan::Fail(at, FATAL[at % 3]), Plan::Fail(at, EINTR)]);
        // Before another operation, these are the plans of the next one that needs space.
        match operation.as_str() {
            "write" => plans.extend([Plan::Short(at), Plan::Full(at)]),
            "open" | "mkdir" | "fsync" | "fdatasync" => plans.push(Plan::Full(at)),
            _ => {}
        }
    }
    let failed = fail_well(&place, &whole, &plans);
    println!(
        "{failed} of {} faults ended the run; each resume ended with the same bits",
        plans.len()
    );
    assert!(failed > plans.len() / 3 && failed < plans.len());
}

#[test]
fn repeated_failures_lose_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, SHORT);
    // Beyond half of them, a single operation fails.
    let plans: Vec<_> = (2..=whole.operations.len() / 2)
        .flat_map(|every| [FATAL[every % 3], EINTR].map(|error| Plan::Every(every, error)))
        .collect();
    fail_well(&place, &whole, &plans);
}
