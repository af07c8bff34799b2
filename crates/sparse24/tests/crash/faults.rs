//! Every file operation of a run, failing: with ENOSPC, EIO, EDQUOT and EINTR, by a short write, by
//! a disk that is full from there on.

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

/// Runs under a plan; the run either ends or says in a sentence what failed, and a resume makes its
/// end that of one that nothing befell.
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
            said.lines().last().is_some_and(|line| line.starts_with("error: cannot ")),
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
fn any_operation_that_fails_is_told_and_loses_nothing() {
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
        "{failed} of {all} faults ended the run, {} were overcome; each resume ended as it should",
        all - failed
    );
    assert!(failed > all / 3 && failed < all);
}

#[test]
fn operations_that_fail_again_and_again_lose_nothing() {
    let place = Place::new();
    let whole = Whole::train(&place, SHORT);
    for every in 2..whole.operations.len() {
        for error in [ENOSPC, EIO, EDQUOT, EINTR] {
            fails_well(&place, &whole, Plan::Every(every, error));
        }
    }
}
