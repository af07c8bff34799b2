//! Each file operation of a run fails: with ENOSPC, EIO, EDQUOT or EINTR, by a short write, or
//! because the disk is full from then on.

use std::{fs, process::Output};

use crate::{
    run::{SHORT, Whole},
    shim::{self, Plan},
    support::Place,
};

const EINTR: i32 = 4;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

/// Runs under a plan: the run finishes or reports the failure in one sentence, and a resume ends
/// like the undisturbed run.
fn fails_well(place: &Place, whole: &Whole, plan: Plan) -> Output {
    let run = place.path("run");
    let mut command = place.command(&SHORT.next_line(&run));
    shim::under(&mut command, &run, plan);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("panicked"), "{plan}: {said}");
    match output.status.code() {
        Some(0) => {}
        Some(4) => assert!(
            said.lines().last().is_some_and(|line| line.starts_with("error: ")),
            "{plan}: {said}"
        ),
        code => panic!("{plan}: {code:?}: {said}"),
    }
    let resumed = place.command(&SHORT.next_line(&run)).output().unwrap();
    assert!(resumed.status.success(), "{plan}: {said}{}", String::from_utf8_lossy(&resumed.stderr));
    assert_eq!(whole.difference(place, "run"), None, "{plan}: {said}");
    fs::remove_dir_all(run).unwrap();
    output
}

#[test]
fn a_failed_operation_is_reported_and_loses_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, SHORT);
    let (mut failed, mut all) = (0, 0);
    let plans = |at| {
        [ENOSPC, EIO, EDQUOT, EINTR]
            .map(|error| Plan::Fail(at, error))
            .into_iter()
            .chain([Plan::Short(at), Plan::Full(at)])
    };
    for plan in (0..whole.operations.len()).flat_map(plans) {
        all += 1;
        failed += usize::from(!fails_well(&place, &whole, plan).status.success());
    }
    println!(
        "{failed} of {all} faults ended the run, {} did not; each resume ended with the same bits",
        all - failed
    );
    assert!(failed > all / 3 && failed < all);
}

#[test]
fn repeated_failures_lose_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, SHORT);
    for every in 2..whole.operations.len() {
        for error in [ENOSPC, EIO, EDQUOT, EINTR] {
            fails_well(&place, &whole, Plan::Every(every, error));
        }
    }
}
