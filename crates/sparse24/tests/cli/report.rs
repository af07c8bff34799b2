//! `sparse24 report`, the instruments, and the page in a browser.

use std::{path::PathBuf, process::Command};

use serde_json::Value;

use crate::support::{Place, SAVED, TINY};

/// Instruments and flip rates at every step.
const MEASURED: &str = "--set run.instrument_every=1 --set run.flip_every=1";

#[test]
fn training_leaves_a_page_and_runs_are_compared_in_one() {
    let place = Place::new();
    place.train("fst", MEASURED);
    place.train("dense", "--method dense");
    for run in ["fst", "dense"] {
        let page = place.read(&format!("{run}/report.html"));
        assert!(page.starts_with("<!DOCTYPE html>") && page.contains("12, finished"), "{page}");
    }
    assert!(place.read("fst/report.html").contains("dense from 11"));
    place.remove("fst/report.html");
    assert_eq!(place.answer("report fst dense"), "fst/report.html\n");
    assert_eq!(place.answer("report fst dense --out both.html"), "both.html\n");
    assert!(place.read("both.html") == place.read("fst/report.html"));
    place.exits(&format!("train {TINY} --set optimizer.learning_rate=1e30 --out failed"), 5);
    let page = place.read("failed/report.html");
    assert!(page.contains("unfinished") && page.contains("is not finite"), "{page}");
    place.folder("empty");
    let many = " fst".repeat(17);
    for (line, code, message) in [
        ("nowhere", 3, "nowhere: * no such directory"),
        ("text", 3, "text: is not a run directory: it is a file"),
        ("empty", 3, "empty: * holds none of config.toml*"),
        ("fst --out fst/config.toml", 3, "fst/config.toml: exists and is not a report*"),
        ("fst --out none/page.html", 4, "cannot write none/page.html: *"),
        (&many, 2, "report: expected at most 16 runs, found 17*"),
        ("fst --figure losses --out a.svg", 2, "figure: * no figure \"losses\"*quickstart"),
        ("fst --figure loss --out both.html", 3, "both.html: exists and is not a report*"),
    ] {
        place.refuses(&format!("report {line}"), code, message);
    }
    place.write("fst/report.html", "garbage");
    place.refuses("report fst", 3, "fst/report.html: *remove it*--out");
    let notes = place.notes("resume fst");
    assert!(
        notes.contains("remove it") && notes.contains("`sparse24 report fst` writes"),
        "{notes}"
    );
    place.write("bare/config.toml", place.bytes("fst/config.toml"));
    place.refuses("report bare --figure loss --out a.svg", 2, "it has: none*metrics.jsonl");
    for _ in ["new", "replaced"] {
        let line = "report fst dense --figure quickstart --out figure.svg";
        assert_eq!(place.answer(line), "figure.svg\n");
        assert!(place.read("figure.svg").starts_with("<svg xmlns="));
    }
}

#[test]
fn instruments_decide_no_bit_and_count_what_flips() {
    let place = Place::new();
    place.train("plain", &format!("--set run.flip_every=1 {SAVED}"));
    place.train("measured", &format!("{MEASURED} {SAVED}"));
    for part in ["model.safetensors", "masks.safetensors"] {
        let part = std::path::Path::new(part);
        let [plain, measured] = ["plain", "measured"].map(|run| place.saved(run, 12));
        assert!(plain[part] == measured[part], "{part:?} differs");
    }
    let mut metrics = place.timeless("measured");
    let sample = |line: &mut Value| line.as_object_mut().unwrap().remove("instruments").unwrap();
    let samples: Vec<Value> = metrics.iter_mut().map(sample).collect();
    assert_eq!(metrics, place.timeless("plain"));
    let loss = |run: &str| place.json(&format!("eval {run} --json"))["loss"].take();
    assert_eq!(loss("measured"), loss("plain"), "evaluation ignores the counts in a checkpoint");

    let mut flips = 0.0;
    for (line, sample) in metrics.iter().zip(&samples) {
        // A tile has 16 bits. The sums are integers that f64 holds exactly.
        flips += line["flip_rate"].as_f64().unwrap() * 16.0;
        let found = sample["flips_per_tile"].as_f64().unwrap();
        assert!((found - flips).abs() <= 1e-9, "{found} flips per tile, expected {flips}");
        let kept = sample["kept"].as_f64().unwrap();
        // The better of two complementary transposable masks keeps at least half.
        assert!((0.5..1.0).contains(&kept), "{sample}");
        let gap = sample["gap"].as_array().unwrap().iter().map(|gap| gap.as_f64().unwrap());
        let gap: Vec<f64> = gap.collect();
        assert!(gap.is_sorted() && gap[0] >= 0.0 && gap[4] > 0.0, "{sample}");
        assert_eq!(sample["tiles"].as_array().unwrap().len(), 128);
        assert_eq!(sample["layers"].as_object().unwrap().len(), 4);
        // Gradients are sampled only in sparse phases.
        let noise = sample["mvue_variance"].as_f64();
        assert_eq!(noise.is_some(), line["phase"] == "sparse");
        assert!(noise.is_none_or(|noise| noise > 0.0 && noise < 2.0), "{sample}");
    }
    assert!(flips > 0.0, "nothing flips");
    place.repeats("measured");
}

/// `cargo test --release -p sparse24 --test cli browser -- --ignored --nocapture`. Screenshots are
/// written to the folder `SPARSE24_PICTURES`.
#[test]
#[ignore = "needs Chromium"]
fn the_page_opens_in_a_browser_with_an_empty_console() {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let Some(browser) =
        names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
    else {
        println!("skipped: none of {names:?} is on the path");
        return;
    };
    let place = Place::new();
    place.train("fst", MEASURED);
    place.train("dense", &format!("--method dense {MEASURED}"));
    place.answer("report fst dense --out page.html");
    // Checks that console messages are captured at all.
    place.write("loud.html", "<!DOCTYPE html><script>console.error('heard')</script>");
    assert!(console(&place, browser, "loud.html", &["--dump-dom"]).contains("heard"));
    assert_eq!(console(&place, browser, "page.html", &["--dump-dom"]), "");
    #[cfg(unix)]
    {
        let watch = crate::watch::Watch::start(&place, "fst dense");
        assert_eq!(console(&place, browser, &watch.address(), &["--dump-dom"]), "");
    }
    let Some(pictures) = std::env::var_os("SPARSE24_PICTURES").map(PathBuf::from) else { return };
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
        let picture = format!(
            "--screenshot={}",
            pictures.join(format!("report-{width}-{scheme}.png")).display()
        );
        // Blink: 0 is dark, 1 is light.
        let scheme =
            format!("--blink-settings=preferredColorScheme={}", u8::from(scheme == "light"));
        assert_eq!(
            console(
                &place,
                browser,
                "page.html",
                &[&picture, &scheme, &format!("--window-size={width},6000")]
            ),
            ""
        );
    }
}

/// The lines of the console of a file or an address.
fn console(place: &Place, browser: &str, page: &str, more: &[&str]) -> String {
    // Without a user profile and a network.
    let always = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars \
                  --enable-logging=stderr --v=0 --no-first-run --disable-background-networking \
                  --disable-component-update --disable-sync";
    let profile = format!("--user-data-dir={}", place.path("profile").display());
    let page = match page.contains(':') {
        true => page.to_owned(),
        false => format!("file://{}", place.path(page).display()),
    };
    let output = Command::new(browser)
        .args(always.split_whitespace())
        .arg(profile)
        .args(more)
        .arg(page)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr)
        .lines()
        .filter(|line| line.contains(":CONSOLE:"))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn lost_metrics_are_reported() {
    let place = Place::trained(SAVED);
    place.rewind("run", [12]);
    let whole = place.read("run/metrics.jsonl");
    place.write("run/metrics.jsonl", whole.split_inclusive('\n').take(5).collect::<String>());
    let notes = place.notes("resume run");
    for text in [notes, place.read("run/log.txt")] {
        let is_lost = |line: &str| line.contains("metrics.jsonl") && line.contains("6 to 10");
        assert!(text.lines().any(is_lost) && text.contains("resumed after step 10"), "{text}");
    }
    let steps: Vec<_> =
        place.metrics("run").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 11, 12]);
    // The report still shows them.
    let report = place.read("run/report.html");
    assert!(place.read("run/report.1.html").contains("12, finished") && report.contains("lost"));
    place.remove("run/metrics.jsonl");
    let notes = place.notes("resume run");
    assert!(notes.contains("the lost metrics, is kept as report.html"), "{notes}");
    assert_eq!(place.read("run/report.html"), report);
    // Lines missing within the file, or unreadable: a report is kept until a newer one says so.
    let lines: Vec<_> = whole.lines().filter(|line| !line.contains(r#""step":3,"#)).collect();
    place.write("run/metrics.jsonl", lines.join("\n").replace(r#""step":5,"#, "") + "\n");
    for (steps, is_kept) in [(12, true), (14, true), (16, false)] {
        let notes = place.notes(&format!("resume run --set steps={steps}"));
        let is_lost = notes.contains("metrics.jsonl has lost steps 3, 5");
        assert_eq!((is_lost, notes.contains("the lost metrics, is kept")), (true, is_kept));
    }
    assert_eq!(place.read("run/report.2.html"), report);
}
