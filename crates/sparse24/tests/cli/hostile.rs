//! Run directories and folders of several runs that somebody else made: nothing outside of them is
//! written, and nothing in them blocks a command.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    finetune::{BERT, data, questions},
    support::{Place, SAVED, TINY, Tree},
};

/// Every command that opens a run.
const COMMANDS: [&str; 9] = [
    "resume run --tensorboard",
    "eval run",
    "eval run --best",
    "sample run --tokens 1",
    "export run exported",
    "report run",
    "report --figure quickstart run --out figure.svg",
    "train --init-from run --data text --steps 1 --set optimizer.warmup_steps=0 --out other",
    "train --plans run --data text --steps 1 --set optimizer.warmup_steps=0 --out other",
];

/// Names that a command might write, besides those of a finished run.
const WRITTEN: [&str; 9] = [
    "tensorboard",
    "plans.json",
    "data.json",
    "metrics.1.jsonl",
    ".tmp-metrics.jsonl",
    ".tmp-provenance.json",
    ".tmp-report.html",
    "checkpoints/.tmp-step-00000012",
    "checkpoints/step-00000012",
];

/// The same beside the arms of a study.
const OF_STUDY: [&str; 4] = ["lock", ".tmp-study.json", ".tmp-study.csv", ".tmp-report.html"];

/// A folder `run` of others, with what it takes to try it.
struct Hostile {
    place: Place,
    whole: Tree,
    /// Names that become something else.
    names: Vec<PathBuf>,
    commands: Vec<String>,
    /// The run that a command goes on with: it lacks its last checkpoint.
    goes_on: &'static str,
}

impl Hostile {
    fn new(
        place: Place,
        goes_on: &'static str,
        commands: Vec<String>,
        is_tried: impl Fn(&Path) -> bool,
    ) -> Self {
        let whole = place.tree("run");
        let at = Path::new(goes_on).strip_prefix("run").unwrap().to_owned();
        let last = at.join("checkpoints/step-00000012");
        let names = whole.keys().filter(|name| !name.starts_with(&last) && is_tried(name));
        let written = ["lock"].into_iter().chain(WRITTEN).map(|name| at.join(name));
        let names = names.cloned().chain(written).collect();
        Self { place, whole, names, commands, goes_on }
    }

    /// Makes the folder anew, and removes what lies outside.
    fn reset(&self) {
        for folder in ["run", "exported", "outside", "other"] {
            let _ = fs::remove_dir_all(self.place.path(folder));
        }
        let run = self.place.path("run");
        fs::create_dir(&run).unwrap();
        self.place.folder("outside");
        for (name, contents) in &self.whole {
            match contents {
                None => fs::create_dir(run.join(name)).unwrap(),
                Some(bytes) => fs::write(run.join(name), bytes).unwrap(),
            }
        }
        self.place.rewind(self.goes_on, [12]);
    }
}

fn hostile_run() -> Hostile {
    let commands = COMMANDS.map(str::to_owned).to_vec();
    Hostile::new(Place::trained(SAVED), "run", commands, |_| true)
}

fn hostile_study() -> Hostile {
    let place = Place::new();
    let arms = "[[arms]]\nname = \"dense\"\nmethod.name = \"dense\"\n[[arms]]\nname = \"fst\"\n";
    place.write("study.toml", format!("reference = \"dense\"\nseeds = [1, 2]\n{arms}"));
    let line = format!("study study.toml {TINY} --out run");
    place.answer(&line);
    // One run stands for the four.
    let is_tried = |name: &Path| name.starts_with("fst/seed-1") || name.components().count() == 1;
    let commands = vec![line.clone(), format!("{line} --keep results")];
    let mut hostile = Hostile::new(place, "run/fst/seed-1", commands, is_tried);
    hostile.names.extend(OF_STUDY.map(PathBuf::from));
    hostile
}

fn hostile_glue() -> Hostile {
    let place = Place::new();
    place.train("base", &format!("{BERT} --set data.tokenizer=byte"));
    data(&place);
    place.rename("task", "glue/cola");
    let line = format!(
        "glue --init-from base --data glue --seeds 1,2 --epochs 2 --set batch.size=8 {SAVED} \
         --out run"
    );
    place.answer(&line);
    // One run stands for the two.
    let is_tried = |name: &Path| name.starts_with("cola/seed-1") || name.components().count() == 1;
    Hostile::new(place, "run/cola/seed-1", vec![line], is_tried)
}

/// Runs a command, which must end by itself within a minute.
fn ends(place: &Place, line: &str, case: &str) {
    let mut child = place.command(line).stdout(null()).stderr(null()).spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{line} hangs with {case}");
        }
        thread::sleep(Duration::from_millis(2));
    };
    assert!(status.code().is_some_and(|code| code < 100), "{line} with {case}: {status}");
}

fn null() -> std::process::Stdio {
    std::process::Stdio::null()
}

/// Each file and folder of a run or a study is a link to one outside, which is a good one or does
/// not exist.
#[test]
fn no_link_leads_out_of_a_folder() {
    for hostile in [hostile_run(), hostile_study(), hostile_glue()] {
        let place = &hostile.place;
        for name in &hostile.names {
            for exists in [true, false] {
                for line in &hostile.commands {
                    hostile.reset();
                    let inner = place.path("run").join(name);
                    let outer = place.path("outside/victim");
                    if exists && inner.exists() {
                        fs::rename(&inner, &outer).unwrap();
                    } else {
                        let _ = fs::remove_file(&inner);
                        let _ = fs::remove_dir_all(&inner);
                        if exists {
                            fs::write(&outer, "precious").unwrap();
                        }
                    }
                    symlink(&outer, &inner).unwrap();
                    let before = place.tree("outside");
                    let case = format!("{} as a link (exists: {exists})", name.display());
                    ends(place, line, &case);
                    assert!(place.tree("outside") == before, "{line} with {case} writes outside");
                }
            }
        }
    }
}

/// Each file of a run or a study, and each that a command makes beside it, is another name of a
/// file outside.
#[test]
fn other_names_of_files_outside_are_not_written() {
    for hostile in [hostile_run(), hostile_study(), hostile_glue()] {
        let place = &hostile.place;
        for name in &hostile.names {
            for line in &hostile.commands {
                hostile.reset();
                let (inner, outer) = (place.path("run").join(name), place.path("outside/victim"));
                if inner.is_dir() {
                    continue;
                }
                if !inner.exists() {
                    fs::write(&inner, "precious").unwrap();
                }
                fs::hard_link(&inner, &outer).unwrap();
                let before = place.tree("outside");
                let case = format!("{} as a hard link", name.display());
                ends(place, line, &case);
                assert!(place.tree("outside") == before, "{line} with {case} writes outside");
            }
        }
    }
}

/// Each file of a run or a study is a pipe, or a device that never ends, where devices can be made.
#[test]
fn pipes_and_devices_do_not_block() {
    for hostile in [hostile_run(), hostile_study(), hostile_glue()] {
        for name in &hostile.names {
            for kind in ["pipe", "device"] {
                for line in &hostile.commands {
                    hostile.reset();
                    let inner = hostile.place.path("run").join(name);
                    let _ = fs::remove_file(&inner);
                    let _ = fs::remove_dir_all(&inner);
                    match kind {
                        "pipe" => {
                            assert!(Command::new("mkfifo").arg(&inner).status().unwrap().success());
                        }
                        // Only root may.
                        _ => drop(
                            Command::new("mknod")
                                .arg(&inner)
                                .args(["c", "1", "5"])
                                .stderr(null())
                                .status(),
                        ),
                    }
                    let case = format!("{} as a {kind}", name.display());
                    ends(&hostile.place, line, &case);
                }
            }
        }
    }
}

/// Paths that a foreign run names outside of it are printed before they are read.
#[test]
fn what_is_read_outside_is_printed_first() {
    let place = Place::trained("--method dense");
    place.train("next", &format!("{SAVED} --set run.flip_reference=run"));
    place.rewind("next", [12]);
    let text = place.path("text");
    let expected = [
        format!("data.path: reads {}", text.display()),
        format!("run.flip_reference: reads {}", place.path("run").display()),
    ];
    // A link below the run is not followed, under whatever name a path reaches it.
    std::os::unix::fs::symlink(&text, place.path("next/link")).unwrap();
    let own = place.read("next/config.toml");
    place.edit("next/config.toml", text.to_str().unwrap(), "/proc/self/cwd/next/link");
    place.refuses("resume next", 4, "it is a symbolic link, and is not followed");
    place.write("next/config.toml", own);
    fs::remove_file(&text).unwrap();
    let (_, err) = place.exits("resume next", 3);
    assert!(err.lines().take(2).eq(&expected), "{err}");
    let (_, err) = place.exits("eval next", 3);
    assert_eq!(err.lines().next(), Some(&*expected[0]));
}

/// A broken symbolic link is not treated as a missing file.
#[test]
fn nothing_is_left_out_silently() {
    let place = Place::trained("--method dense");
    for file in ["images/train/a/a", "images/train/b/a", "images/val/a/a", "glue/sst-2/train"] {
        place.write(&format!("{file}.png"), "");
    }
    for file in ["train.en", "train.de", "dev.en", "dev.de"] {
        place.write(&format!("pairs/{file}"), "a\n");
    }
    for (link, line) in [
        ("images/train/c", "train --preset deit-tiny --data images"),
        ("glue/cola", "glue --init-from run --data glue"),
        ("pairs/val.en", "train --preset transformer-multi30k-cpu --data pairs"),
    ] {
        symlink("nowhere", place.path(link)).unwrap();
        let (_, err) = place.exits(&format!("{line} --out new"), 3);
        assert!(err.contains(&format!("{link}: is a broken symbolic link")), "{err}");
    }
}

/// A report of a foreign study does not follow the link that stands for an arm.
#[test]
fn an_arm_that_leads_outside_is_not_reported() {
    let hostile = hostile_study();
    let place = &hostile.place;
    place.write("outside/secret/config.toml", "");
    symlink(place.path("outside"), place.path("run/other")).unwrap();
    symlink(place.path("outside/secret"), place.path("run/dense/other")).unwrap();
    place.answer("report run --out page.html");
    assert!(!place.read("page.html").contains("secret"));
}

/// Text of a foreign folder reaches the terminal without its escape sequences, and a configuration
/// that does not fit is bad input.
#[test]
fn what_a_folder_says_is_harmless() {
    let place = Place::trained("");
    place.edit("run/config.toml", "preset = \"quickstart\"", "preset = \"\\u001b]0;x\\u0007\"");
    let (_, err) = place.exits("eval run", 0);
    let path = place.path("text").display().to_string();
    place.edit("run/config.toml", &path, "\\u001b[2K\\u202e/nowhere");
    let (_, missing) = place.exits("eval run", 3);
    place.edit("run/config.toml", "\\u001b[2K\\u202e/nowhere", &path);
    // Of a finished run, and of one whose last evaluation is to be done.
    let mut last = place.metrics("run").pop().unwrap();
    last["scores"] = json!({ "x\nEVIL": 1.0 });
    place.write("run/metrics.jsonl", format!("{last}\n"));
    let (finished, _) = place.exits("resume run", 0);
    assert!(finished.contains("EVIL"), "{finished}");
    last.as_object_mut().unwrap().remove("val_loss");
    last["skipped"] = json!("x\nEVIL");
    place.write("run/metrics.jsonl", format!("{last}\n"));
    let (_, pending) = place.exits("resume run", 0);
    assert!(pending.contains("EVIL"), "{pending}");
    for text in [err, missing, finished, pending] {
        let is_harmful = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(is_harmful) && !text.contains("\nEVIL"), "{text:?}");
    }
}

/// A configuration of a model folder is not read through a link out of it.
#[test]
fn a_model_folder_is_not_left() {
    let place = Place::trained("");
    place.answer("export run gpt2");
    place.rename("gpt2/config.json", "secret");
    symlink(place.path("secret"), place.path("gpt2/config.json")).unwrap();
    for line in ["import gpt2 new", "train --init-from gpt2 --out new"] {
        place.refuses(line, 3, "gpt2/config.json: is a link out of its folder");
    }
}

/// Predictions do not replace a pipe or a device; at a link, they replace the file that it leads
/// to. A path that cannot be written is refused before anything is read.
#[test]
fn predictions_replace_only_files() {
    let place =
        Place::trained(&format!("{BERT} --set data.tokenizer=byte --set model.sequence_length=24"));
    questions(&place);
    place.answer(
        "finetune --task squad --data squad --init-from run --set steps=2 --set task.stride=8 \
         --out tuned",
    );
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    for (path, code, pattern) in [
        ("pipe", 3, "pipe: is not a regular file"),
        ("squad", 3, "squad: is a folder"),
        ("nowhere/x.json", 4, "cannot write nowhere/x.json"),
    ] {
        let (_, err) = place.exits(&format!("eval tuned --predictions {path}"), code);
        assert!(err.contains(pattern) && !err.contains("reads"), "{err}");
    }
    symlink("answers.json", place.path("link.json")).unwrap();
    place.answer("eval tuned --predictions link.json");
    assert!(place.path("link.json").is_symlink());
    assert_eq!(place.value("answers.json").as_object().unwrap().len(), 12);
}

/// Another process exchanges the folder of checkpoints, and files of the run, with links outside
/// while commands run.
#[test]
fn what_is_exchanged_meanwhile_leads_nowhere() {
    let hostile = hostile_run();
    let place = &hostile.place;
    let stop = AtomicBool::new(false);
    for (name, kind) in [("checkpoints", true), ("log.txt", false), ("metrics.jsonl", false)] {
        for _ in 0..4 {
            hostile.reset();
            let (inner, aside, victim) =
                (place.path("run").join(name), place.path("aside"), place.path("outside/victim"));
            if kind {
                fs::create_dir(&victim).unwrap();
            } else {
                fs::write(&victim, "precious").unwrap();
            }
            let before = place.tree("outside");
            stop.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        if fs::rename(&inner, &aside).is_ok() {
                            let _ = symlink(&victim, &inner);
                            let _ = fs::remove_file(&inner);
                            let _ = fs::rename(&aside, &inner);
                        }
                    }
                });
                ends(place, "resume run", name);
                stop.store(true, Ordering::Relaxed);
            });
            assert!(place.tree("outside") == before, "{name} leads outside");
            for left in [place.path("aside"), place.path("run")] {
                let _ = fs::remove_dir_all(&left);
                let _ = fs::remove_file(&left);
            }
        }
    }
}
