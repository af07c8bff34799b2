//! Runs on several ranks: the bits of one, whatever happens to the ranks.

use std::{
    fs,
    process::{Child, Command, Output},
    thread,
    time::Duration,
};

use crate::{
    running::{LONG, attempts, lines, send},
    support::{Place, SAVED, TINY, is_like, text},
};

/// Four micro-batches per step in four replicas, dropout, and evaluations between checkpoints.
const FOUR: &str = "--set batch.gradient_accumulation_steps=4 --set batch.replicas=4 \
    --set model.dropout=0.1 --set run.eval_every=3";

/// Exit code and standard error of each rank.
fn ended(ranks: Vec<Child>) -> Vec<(Option<i32>, String)> {
    let end = |child: Child| {
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        (status.code(), String::from_utf8(stderr).unwrap())
    };
    ranks.into_iter().map(end).collect()
}

/// Waits until the metrics of a run have so many lines; whether they do before a rank ends.
fn reach(place: &Place, run: &str, steps: usize, ranks: &mut [Child]) -> bool {
    while lines(place, run) < steps {
        if ranks.iter_mut().any(|rank| rank.try_wait().unwrap().is_some()) {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Kills what is left of some ranks.
fn kill(ranks: Vec<Child>) {
    for mut rank in ranks {
        drop(rank.kill());
        rank.wait().unwrap();
    }
}

#[test]
fn any_number_of_ranks_ends_with_the_bits_of_one() {
    let place = Place::new();
    let settings = format!("{FOUR} {SAVED}");
    place.train("1", &settings);
    let files = |run: &str| {
        (place.tree(&format!("{run}/checkpoints")), place.read(&format!("{run}/config.toml")))
    };
    for ranks in ["2", "4"] {
        let line = format!("launch -n {ranks} -- train {TINY} {settings} --out {ranks} --json");
        let summary = place.json(&line);
        assert_eq!(summary["steps"], 12);
        assert!(files(ranks) == files("1"), "{ranks} ranks");
        assert_eq!(place.timeless(ranks), place.timeless("1"), "{ranks} ranks");
    }
    // Without it, a run has as many replicas as it starts with ranks.
    let settings = settings.replace("--set batch.replicas=4", "");
    place.answer(&format!("launch -n 4 -- train {TINY} {settings} --out default"));
    assert!(files("default") == files("1"));
}

#[test]
fn a_signal_to_any_rank_stops_all_after_a_step() {
    let place = Place::new();
    let settings = format!("{LONG} {FOUR} --set run.eval_every=75");
    place.answer(&format!("train {TINY} {settings} --out whole"));
    let run = attempts(|attempt| {
        let run = format!("stopped-{attempt}");
        let line = format!("train {TINY} {settings} --out {run}");
        let mut ranks = place.ranks(2, &line, |_, _| {});
        if !reach(&place, &run, 20, &mut ranks) {
            kill(ranks);
            return None;
        }
        send("-TERM", &ranks[1]);
        // A launcher may kill the others as soon as one has ended.
        assert_eq!(ranks[1].wait().unwrap().code(), Some(143));
        assert!(place.checkpoints(&run)[0].starts_with("step-"));
        let codes: Vec<_> = ended(ranks).into_iter().map(|(code, _)| code).collect();
        assert_eq!(codes, [Some(130), Some(143)]);
        Some(run)
    });
    assert_eq!(place.checkpoints(&run).len(), 1);
    place.answer(&format!("launch -n 2 resume {run} --json"));
    assert!(place.saved(&run, 600) == place.saved("whole", 600));
    assert_eq!(place.timeless(&run), place.timeless("whole"));
}

/// To its process group, as from a terminal or `timeout`, or to itself alone.
#[cfg(unix)]
#[test]
fn a_signal_to_launch_reaches_its_ranks() {
    use crate::{running::reached_by, signals::stops};
    use std::os::unix::process::CommandExt;

    let place = Place::new();
    let settings = format!("{LONG} {FOUR} --checkpoint-every 0");
    for ((signal, expected), to_group) in stops().chain([("-USR1", 0)]).flat_map(|signal| {
        [true, false]
            .into_iter()
            .filter(move |group| signal.1 != 0 || !group)
            .map(move |group| (signal, group))
    }) {
        let run = attempts(|attempt| {
            let run = format!("run{expected}-{to_group}-{attempt}");
            let mut launch =
                place.command(&format!("launch -n 2 -- train {TINY} {settings} --out {run}"));
            launch.process_group(0);
            let launch = reached_by(&place, launch, &run, 20)?;
            let to = if to_group { format!("-{}", launch.id()) } else { launch.id().to_string() };
            assert!(Command::new("kill").args([signal, "--", &to]).status().unwrap().success());
            let (code, notes) = ended(vec![launch]).remove(0);
            (code != Some(0) || expected == 0).then_some(())?;
            assert_eq!(code, Some(expected), "{notes}");
            Some(run)
        });
        let log = place.read(&format!("{run}/log.txt"));
        let saves = if expected == 0 { 3 } else { 1 };
        assert_eq!(log.matches(": saved ").count(), saves, "{log}");
    }
}

/// Without a step, there is nothing to save.
#[cfg(unix)]
#[test]
fn a_rank_that_waits_ignores_the_signal_that_saves() {
    use std::{
        io::{BufRead as _, BufReader},
        net::TcpListener,
        process::Stdio,
    };

    let place = Place::new();
    for command in ["train --out run", "resume run"] {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let line = format!("{command} --rank 0 --world 2 --rendezvous {free}");
        let mut waits = place.command(&line);
        waits.env("SPARSE24_SECRET", "of the test").stderr(Stdio::piped());
        let mut waits = waits.spawn().unwrap();
        let mut said = BufReader::new(waits.stderr.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        send("-USR1", &waits);
        send("-TERM", &waits);
        assert_eq!(waits.wait().unwrap().code(), Some(143), "{command}");
    }
}

/// A launcher that is killed leaves no rank behind: all stop as on SIGTERM.
#[cfg(target_os = "linux")]
#[test]
fn ranks_stop_with_their_launcher() {
    use crate::running::reached;

    let place = Place::new();
    let run = attempts(|attempt| {
        let run = format!("orphaned-{attempt}");
        let line = format!("launch -n 2 -- train {TINY} {LONG} {FOUR} --out {run}");
        let mut launcher = reached(&place, &line, &run, 20)?;
        launcher.kill().unwrap();
        // The ranks write to the same pipe, so it ends with the last of them.
        let said = String::from_utf8(launcher.wait_with_output().unwrap().stderr).unwrap();
        assert!(said.contains("interrupted after step"), "{said}");
        Some(run)
    });
    assert_eq!(place.checkpoints(&run).len(), 1);
    let code = attempts(|attempt| {
        let run = format!("killed-{attempt}");
        let line = format!("launch -n 2 -- train {TINY} {LONG} {FOUR} --out {run}");
        let mut launcher = reached(&place, &line, &run, 20)?;
        let id = launcher.id();
        let ranks = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        let rank = ranks.split_whitespace().last()?;
        assert!(Command::new("kill").args(["-KILL", rank]).status().unwrap().success());
        launcher.wait().unwrap().code()
    });
    assert_eq!(code, 137);
    let mut orphan = place.command("train");
    orphan.env("SPARSE24_LAUNCHER", "0");
    place.refuses_command(orphan, 7, "`sparse24 launch`*is gone");
}

/// Under Open MPI, if it is installed.
#[test]
fn mpirun_starts_the_ranks() {
    let place = Place::new();
    let settings = format!("train {TINY} {FOUR}");
    let program = env!("CARGO_BIN_EXE_sparse24");
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "2", program]);
    mpirun.args(format!("{settings} --out mpi").split_whitespace());
    mpirun.current_dir(place.path("")).env("SPARSE24_SECRET", "of the test");
    let output = match mpirun.output() {
        Err(error) if std::env::var_os("SPARSE24_REQUIRE_MPIRUN").is_none() => {
            return println!("skipped: no mpirun: {error}");
        }
        output => output.unwrap(),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    place.answer(&format!("{settings} --out alone"));
    assert!(place.saved("mpi", 12) == place.saved("alone", 12));
    assert_eq!(place.timeless("mpi"), place.timeless("alone"));
}

/// Every rank exits with the message and the exit code of the rank that failed.
#[test]
fn ranks_that_do_not_fit_are_refused() {
    let place = Place::new();
    let line = |more: &str| match more.starts_with("resume") {
        true => more.to_owned(),
        false => format!("train {TINY} {FOUR} --out run {more}"),
    };
    let differ = "seed: differs between ranks: rank 0 found nothing, rank 1 found 9";
    for (world, settings, of_rank_1, code, expected) in [
        (
            2,
            "",
            "--set seed=9",
            2,
            "seed: differs between ranks: rank 0 found 1337, rank 1 found 9",
        ),
        (2, "--init-from absent", "--set seed=9", 2, differ),
        (2, "resume absent --set steps=14", "--set seed=9", 2, differ),
        (2, "--set batch.gradient_accumulation_steps=3", "", 2, "replicas*3"),
        (4, "--set batch.replicas=2", "", 2, "batch.replicas: *the number of ranks, 4, found 2"),
        (2, "--set optimizer.learning_rate=3e38", "", 5, "not finite"),
        (2, "--set batch.replicas=1", "", 2, "batch.replicas: expected a multiple*, 2, found 1"),
        (4, "--data none", "", 3, "none: does not exist"),
    ] {
        let ends = ended(place.ranks(world, &line(settings), |rank, command| {
            if rank == 1 {
                command.args(of_rank_1.split_whitespace());
            }
        }));
        let reports_it =
            |(found, message): &(_, String)| *found == Some(code) && is_like(message, expected);
        assert!(ends.iter().all(reports_it), "{ends:?}");
        drop(fs::remove_dir_all(place.path("run")));
    }
    for (line, code, pattern) in [
        ("train --rank 0 --world 2 --rendezvous 127.0.0.1:9", 2, "SPARSE24_SECRET: is not set"),
        ("train --rank 0 --world 2", 2, "--rendezvous"),
        (
            "train --rank 2 --world 2 --rendezvous a:9",
            2,
            "error: --rank: expected*below 2, found 2",
        ),
        ("train --rank 0 --world 2 --rendezvous a", 2, "error: --rendezvous: expected HOST:PORT"),
        ("train --rank 0 --world 0 --rendezvous a:9", 2, "error: --world: expected*from 1*found 0"),
        ("launch -n 0 -- train", 2, "at least 1"),
        ("launch -n 2", 2, "`launch -n 2 -- train`"),
        ("launch -n 2 report run", 2, "`launch -n 2 -- train`"),
        ("launch -n 1 --nodes 2 -- train", 2, "--node: required"),
        ("launch -n 1 --nodes 2 --node 2 -- train", 2, "below --nodes"),
        ("launch -n 1 --nodes 2 --node 0 -- train", 2, "--rendezvous: required"),
        ("launch -n 1 --nodes 2 --node 0 --rendezvous a:9 -- train", 2, "SPARSE24_SECRET: set it"),
        ("train --resume-or-start", 2, "--out"),
        ("train --init-from=resume", 3, "resume: does not exist; *`sparse24 resume RUN`"),
    ] {
        place.refuses(line, code, pattern);
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for (host, code, pattern) in [
        ("127.0.0.1", 4, "cannot listen at 127.0.0.1:*in use"),
        ("192.0.2.1", 2, "error: --rendezvous: expected an address of rank 0's machine, found"),
    ] {
        let port = taken.local_addr().unwrap().port();
        let line = format!("train {TINY} --rank 0 --world 2 --rendezvous {host}:{port} --out run");
        let mut command = place.command(&line);
        command.env("SPARSE24_SECRET", "of the test");
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && is_like(&said, pattern), "{said}");
    }
    // Only `train` and `resume` join ranks.
    for (line, ranks, pattern) in [
        ("finetune --task cola --init-from run", "RANK=1 WORLD_SIZE=2", "WORLD_SIZE: *found 2*"),
        (
            "glue --init-from run --out g",
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
            "WORLD_SIZE: *found 2*`glue`",
        ),
        (
            "study text --out s",
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0",
            "SLURM_STEP_NUM_TASKS: *found 4*`study` once",
        ),
        (
            "lambda-search --out s",
            "SPARSE24_RANK=0 SPARSE24_WORLD=3 SPARSE24_LOCAL_RANK=0",
            "SPARSE24_WORLD: *found 3*`lambda-search` once",
        ),
    ] {
        let mut command = place.command(line);
        command.envs(ranks.split(' ').filter_map(|variable| variable.split_once('=')));
        place.refuses_command(command, 2, pattern);
    }
}

#[test]
fn one_line_starts_and_resumes() {
    let place = Place::new();
    let line = format!("train {TINY} {SAVED} --out run --resume-or-start");
    place.answer(&line);
    let end = (place.saved("run", 12), place.timeless("run"));
    place.rewind("run", [10, 12]);
    let notes = place.notes(&line);
    assert!(notes.contains("resumed after step 8") && !notes.contains("from here on"), "{notes}");
    assert!((place.saved("run", 12), place.timeless("run")) == end);
    place.write("other", text(2));
    let advice = "run/checkpoints/step-00000012: *fingerprint*allow data.path --set steps=N`";
    for (more, code, pattern) in [
        ("--seed 7", 2, "seed: *expected 1337*found 7*resume run --set seed"),
        ("--method dense", 2, "method.name: *expected \"fst\"*found \"dense\"*"),
        ("--lambda 2e-2", 2, "method.lambda: *expected 0.006*found 0.02*"),
        ("--data other", 3, advice),
        ("--data nowhere", 3, "/nowhere: does not exist"),
    ] {
        place.refuses(&format!("{line} {more}"), code, pattern);
    }
}

/// Also where the data have moved, and on several ranks.
#[test]
fn one_line_changes_settings_that_decide_no_bits() {
    let place = Place::new();
    place.write("more.toml", "run.keep_every = 6\nrun.spike_window = 40");
    for (run, launch) in [("run", ""), ("ranks", "launch -n 2 -- ")] {
        let line = format!(
            "{launch}train {TINY} {FOUR} {SAVED} --lambda 6e-3 --out {run} --resume-or-start"
        );
        place.answer(&format!("{line} --data ./text"));
        let end = (place.saved(run, 12), place.timeless(run));
        place.rewind(run, [10, 12]);
        place.rename("text", "moved");
        let line =
            format!("{line} --data moved --config more.toml --set backend.cuda_graphs=false");
        let notes = place.notes(&line);
        let said = "from here on with data.path=\"moved\", run.keep_every=6, run.spike_window=40, \
            backend.cuda_graphs=false";
        assert!(notes.contains("resumed after step 8") && notes.contains(said), "{notes}");
        assert!((place.saved(run, 12), place.timeless(run)) == end);
        let provenance = place.read(&format!("{run}/provenance.json"));
        let notes = place.notes(&line.replace("moved", "./moved"));
        assert!(notes.contains("is finished") && !notes.contains("from here on"), "{notes}");
        assert_eq!(place.read(&format!("{run}/provenance.json")), provenance);
        // A resume changed it meanwhile.
        place.answer(&format!("resume {run} --set run.keep_every=3"));
        assert!(place.notes(&line).contains("from here on with run.keep_every=6"));
        place.rename("moved", "text");
    }
}

#[test]
fn resume_or_start_needs_the_initial_model_only_once() {
    let place = Place::trained("");
    let line = "train --set data.path=text --set steps=3 --set batch.size=2 \
        --set backend.threads=1 --init-from run --out next --resume-or-start";
    place.answer(line);
    place.rename("run", "gone");
    place.answer(line);
    let pattern = "model.d_model: expected 16*found 32";
    place.refuses(&format!("{line} --set model.d_model=32"), 2, pattern);
}
