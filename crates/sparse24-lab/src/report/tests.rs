//! Pages of complete, unfinished, damaged and hostile runs are well-formed, complete and
//! self-contained.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use roxmltree::{Document, Node};
use serde_json::json;

use super::{Contents, FILE, Unreadable, View, document, figure, write};
use sparse24_run::{
    Error,
    checkpoint::PhaseKind,
    config::Config,
    run::{Instruments, LayerInstruments, StepMetrics},
};

/// A step of a run whose loss and flip rate fall.
fn step(step: u32, of: u32, layers: u32, every: u32) -> StepMetrics {
    let is_sampled = step == 1 || step.is_multiple_of(every);
    let t = f64::from(step) / f64::from(of);
    let rate = 0.02 * (1.0 - t) + 1e-4;
    let of_layer = |layer| (format!("h.{layer}.mlp.c_fc.weight"), rate * (1.0 + f64::from(layer)));
    StepMetrics {
        step,
        phase: if 6 * step <= 5 * of { PhaseKind::Sparse } else { PhaseKind::Dense },
        loss: (2.0 + 3.0 / (1.0 + 20.0 * t)) as f32,
        lr: 1e-3,
        grad_norm: 1.0,
        tokens_per_s: 10_000.0,
        tokens: None,
        flip_rate: is_sampled.then_some(rate),
        flip_rate_per_layer: is_sampled.then(|| (0..layers).map(of_layer).collect()),
        val_loss: is_sampled.then_some(2.1),
        scores: Default::default(),
        instruments: None,
        skipped: None,
    }
}

fn instruments(step: u32) -> Instruments {
    let layer =
        LayerInstruments { kept: 0.8, flips_per_tile: 1.5, gap: 0.01, mvue_variance: Some(0.3) };
    let tiles = (0..200).map(|tile| (tile as f32 * 1e-4, 300 / (tile + 1) + step % 7)).collect();
    let layers = [("h.0.mlp.c_fc.weight".to_owned(), layer)].into();
    Instruments {
        kept: 0.8,
        flips_per_tile: 1.5,
        gap: [1e-3, 2e-3, 4e-3, 8e-3, 0.02],
        mvue_variance: Some(0.3),
        layers,
        tiles,
    }
}

/// A run directory of `of` steps, of which `done` are done.
fn write_run(path: &Path, method: &str, done: u32, of: u32, change: impl Fn(&mut StepMetrics)) {
    fs::create_dir_all(path).unwrap();
    // 12 sequences of 64 tokens per step.
    let method = format!("method.name={method}");
    let settings = [format!("steps={of}"), method, "method.lambda=2e-4".to_owned()];
    let config = Config::resolve(Some("quickstart"), None, &settings).unwrap().to_toml();
    fs::write(path.join("config.toml"), config).unwrap();
    let start = r#"[{"version": "0.1.0", "command": ["sparse24", "train"], "threads": 2}]"#;
    fs::write(path.join("provenance.json"), start).unwrap();
    fs::write(path.join("log.txt"), "started\n").unwrap();
    let line = |number| {
        let mut metrics = step(number, of, 2, 10);
        change(&mut metrics);
        serde_json::to_string(&metrics).unwrap() + "\n"
    };
    let lines: String = (1..=done).map(line).collect();
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
}

fn with_instruments(metrics: &mut StepMetrics) {
    if metrics.step.is_multiple_of(20) {
        metrics.instruments = Some(Box::new(instruments(metrics.step)));
    }
}

/// Checks that a document is well-formed, describes its pictures and loads nothing.
fn parse(text: &str) -> Document<'_> {
    let document = Document::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let elements = || document.descendants().filter(Node::is_element);
    let loads = |text: &str| {
        ["://", "url(", "@import", "fetch(", "import("].iter().any(|part| text.contains(part))
    };
    let (mut ids, mut references) = (HashSet::new(), Vec::new());
    for attribute in elements().flat_map(|element| element.attributes()) {
        let (name, value) = (attribute.name(), attribute.value());
        let acts =
            ["src", "srcset", "action", "data", "poster"].contains(&name) || name.starts_with("on");
        let leaves = name == "href" && !value.starts_with('#');
        assert!(!acts && !leaves && !loads(value), "{name}={value}");
        assert!(name != "id" || ids.insert(value), "the id {value} occurs twice");
        if ["aria-labelledby", "href"].contains(&name) {
            references.extend(value.split_whitespace());
        }
    }
    for id in references {
        assert!(ids.contains(id.trim_start_matches('#')), "no element has the id {id}");
    }
    for element in elements() {
        let is_code = ["script", "style"].contains(&element.tag_name().name());
        assert!(!is_code || !loads(element.text().unwrap()), "the document loads something");
        // The root of an SVG file has a title alone.
        if element.attribute("role") == Some("img") && element != document.root_element() {
            for part in ["title", "desc"] {
                let part = element.children().find(|child| child.tag_name().name() == part);
                assert!(
                    part.and_then(|part| part.text()).is_some_and(|text| !text.is_empty()),
                    "{element:?}"
                );
            }
        }
    }
    document
}

/// Checks what holds for every page, and returns the text of all its elements.
fn check(page: &str) -> String {
    let document = parse(page.strip_prefix("<!DOCTYPE html>\n").unwrap());
    let named = |node: &Node<'_, '_>, name: &str| {
        node.descendants().filter(|element| element.tag_name().name() == name).count()
    };
    let root = document.root();
    assert_eq!((named(&root, "script"), named(&root, "style")), (1, 1));
    for figure in root.descendants().filter(|node| node.tag_name().name() == "figure") {
        assert!(named(&figure, "table") > 0 && named(&figure, "td") > 0, "no numbers: {figure:?}");
        let is_picture = |node: Node<'_, '_>| node.attribute("role") == Some("img");
        assert!(figure.descendants().any(is_picture), "no picture: {figure:?}");
    }
    let elements = root.descendants().filter(Node::is_element);
    let prose =
        elements.filter(|element| !["script", "style"].contains(&element.tag_name().name()));
    prose.filter_map(|element| element.text()).collect::<Vec<_>>().join("\n")
}

fn check_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

fn figures(page: &str) -> Vec<&str> {
    page.split("<figure id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
}

fn page(paths: &[PathBuf]) -> Result<String, Error> {
    let contents = Contents::read(paths, Unreadable::Refused)?;
    Ok(document(&contents.title(), &contents.html(), None))
}

#[test]
fn runs_side_by_side_have_all_figures() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["dense", "fst"].map(|method| folder.path().join(method));
    write_run(&paths[0], "dense", 120, 120, |metrics| {
        with_instruments(metrics);
        metrics.phase = PhaseKind::Dense;
        if let Some(instruments) = &mut metrics.instruments {
            instruments.mvue_variance = None;
        }
    });
    write_run(&paths[1], "fst", 120, 120, with_instruments);
    let both = page(&paths).unwrap();
    let text = check(&both);
    assert_eq!(
        figures(&both),
        ["loss", "validation", "flips", "layers", "tiles", "kept", "gaps", "variance", "optimizer"]
    );
    check_contains(
        &text,
        &[
            "dense from 101",
            "fst, λ = 0.0002 on gradients",
            "120, finished",
            "9.2 s",
            "Settings that differ",
            "sparse24 train",
        ],
    );
    assert!(!text.contains("Missing data"));
    let one = page(&paths[1..]).unwrap();
    check(&one);
    assert!(!figures(&one).contains(&"validation"));
}

/// A run that was resumed seven times, the fourth time with another method and twice the batch.
#[test]
fn the_page_of_a_changed_run_says_what_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed");
    write_run(&path, "fst", 120, 120, |metrics| {
        metrics.tokens = Some(if metrics.step <= 40 { 384 } else { 768 });
    });
    let start = |number: u32| match number {
        0 => json!({ "command": ["first"] }),
        4 => json!({ "command": ["resume-4"], "after": 40, "changed": { "method.name": "fst" } }),
        _ => json!({ "command": [format!("resume-{number}")], "after": 10 * number }),
    };
    let starts: Vec<_> = (0..8).map(start).collect();
    fs::write(path.join("provenance.json"), json!(starts).to_string()).unwrap();
    let text = check(&page(&[path]).unwrap());
    // 40 * 384 / 10,000 + 80 * 768 / 10,000
    check_contains(&text, &["fst, λ = 0.0002 on gradients, from step 41", "7.7 s", "first"]);
    (1..8).for_each(|number| check_contains(&text, &[&format!("resume-{number}")]));
}

#[test]
fn the_page_of_a_damaged_run_names_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged");
    write_run(&path, "fst", 60, 120, |_| {});
    let whole = fs::read_to_string(path.join("metrics.jsonl")).unwrap();
    let broken: Vec<_> = whole
        .lines()
        .enumerate()
        .filter(|(at, _)| !(20..25).contains(at))
        .map(|(at, line)| if at == 30 { "{\"step\": 3" } else { line })
        .collect();
    let mut bytes = broken.join("\n").into_bytes();
    bytes.extend(b"\n{\"step\": 61, \"phase\": \"spa\xff");
    fs::write(path.join("metrics.jsonl"), bytes).unwrap();
    fs::write(path.join("config.toml"), "steps = = 3").unwrap();
    fs::remove_file(path.join("provenance.json")).unwrap();
    let text = check(&page(std::slice::from_ref(&path)).unwrap());
    check_contains(
        &text,
        &[
            "metrics.jsonl: 2 lines of 56 cannot be read and are left out; the first is line 26",
            "metrics.jsonl: 6 steps before step 60 are missing",
            "config.toml is damaged",
            "provenance.json is missing",
            "There is no plot against time",
        ],
    );

    let out = path.join(FILE);
    write(std::slice::from_ref(&path), &out).unwrap();
    for name in ["metrics.jsonl", "config.toml"] {
        fs::remove_file(path.join(name)).unwrap();
    }
    let refused = write(std::slice::from_ref(&path), &out).unwrap_err().to_string();
    assert!(refused.contains("is not a report without curves"), "{refused}");
    fs::remove_file(&out).unwrap();
    let noted = write(std::slice::from_ref(&path), &out).unwrap().join("\n");
    assert!(noted.contains(": metrics.jsonl is missing, so there are no curves"), "{noted}");
    let empty = fs::read_to_string(&out).unwrap();
    assert_eq!(figures(&empty), [""; 0]);
    assert!(check(&empty).contains("metrics.jsonl is missing, so there are no curves"));
    fs::remove_file(path.join("log.txt")).unwrap();
    for (path, expected) in
        [(path.clone(), "holds none of config.toml"), (path.join("nowhere"), "no such directory")]
    {
        let refused = page(&[path]).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    assert!(page(&[]).is_err() && View::read(&[]).is_err());
    // A page that follows runs shows them.
    let view = View::read(&[path.join("nowhere")]).unwrap();
    let live = view.page("n0nce");
    check_contains(&check(&live), &["connecting", "no such directory"]);
    assert!(live.contains(view.contents()) && live.contains("<script nonce=\"n0nce\">"));
}

#[test]
fn values_that_are_not_finite_are_gaps() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nan");
    write_run(&path, "fst", 30, 30, |metrics| {
        if metrics.step > 10 {
            (metrics.loss, metrics.grad_norm, metrics.tokens_per_s, metrics.lr) =
                (f32::NAN, f32::NAN, [0.0, 5e-324, 1e300][metrics.step as usize % 3], 0.0);
        }
        match metrics.step {
            1 => metrics.flip_rate_per_layer = Some(Default::default()),
            20 => metrics.flip_rate = Some(0.0),
            _ => {}
        }
    });
    // Values that no run produces.
    let mut lines = fs::read_to_string(path.join("metrics.jsonl")).unwrap();
    lines.insert_str(0, "{\"step\": 0, \"phase\": \"dense\"}\n");
    for (step, value) in [(31, "1e308"), (32, "-1e308"), (33, "5e-324"), (34, "1e999")] {
        let line = r#"{"step": STEP, "phase": "dense", "val_loss": VALUE, "flip_rate": VALUE,
            "loss": VALUE, "lr": 0, "grad_norm": null, "tokens_per_s": 1e-300}"#;
        let line = line.replace("STEP", &step.to_string()).replace("VALUE", value);
        lines += &(line.replace('\n', "") + "\n");
    }
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
    let page = page(&[path]).unwrap();
    let text = check(&page);
    assert!(
        text.contains("4 lines of 35 cannot be read and are left out; the first is line 1"),
        "{text}"
    );
    let drawn: String =
        page.split(" d=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
    for absurd in ["10³⁰⁰", "no plot against time"] {
        assert!(!text.contains(absurd), "{absurd}: {text}");
    }
}

/// Markup in every file and name that reaches the page.
#[test]
fn contents_of_files_are_text() {
    const EVIL: &str = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;]]>";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("<b onclick=alert(1)>&\"' run");
    let other = folder.path().join("other");
    for path in [&path, &other] {
        write_run(path, "fst", 40, 80, |metrics| {
            with_instruments(metrics);
            if let Some(rates) = &mut metrics.flip_rate_per_layer {
                rates.insert(EVIL.to_owned(), 0.01);
            }
        });
    }
    let quoted = format!("'''{EVIL}'''");
    let config = format!(
        "steps = 80\n\"{}\" = {quoted}\n[method]\nname = {quoted}\nlambda = 1e-4\n",
        EVIL.replace('"', "")
    );
    fs::write(path.join("config.toml"), config).unwrap();
    let start = json!([{ EVIL: EVIL, "command": [EVIL], "libraries": { EVIL: EVIL } }]);
    fs::write(path.join("provenance.json"), start.to_string()).unwrap();
    fs::write(path.join("log.txt"), EVIL).unwrap();
    let candidate = json!({
        "lambda": 1e-4, "mu": 0.8, "interval": [0.7, 0.9], "verdict": EVIL
    });
    let search = json!({ "candidates": [candidate], "advice": EVIL, "until": EVIL });
    fs::write(folder.path().join("search.json"), search.to_string()).unwrap();
    let difference = json!({ "mean": 0.1, "low": 0.0, "high": 0.2 });
    let study = json!({
        "reference": EVIL, "arms": [{ "name": EVIL, "difference": difference }]
    });
    fs::write(folder.path().join("study.json"), study.to_string()).unwrap();
    let page = page(&[folder.path().to_owned(), path, other]).unwrap();
    let text = check(&page);
    assert!(figures(&page).starts_with(&["search", "study", "loss"]));
    assert!(
        text.matches("<script>alert(1)</script>").count() >= 10
            && text.contains("<b onclick=alert(1)>&\"' run")
    );
}

#[test]
fn the_page_of_a_long_run_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a", "b"].map(|name| folder.path().join(name)).into();
    let metrics =
        |number: u32| StepMetrics { val_loss: Some(2.1), ..step(number, 300_000, 48, 1000) };
    let lines: String = (1..=300_000)
        .map(|number| serde_json::to_string(&metrics(number)).unwrap() + "\n")
        .collect();
    for path in &paths {
        write_run(path, "fst", 0, 300_000, |_| {});
        fs::write(path.join("metrics.jsonl"), &lines).unwrap();
    }
    let page = page(&paths).unwrap();
    let text = check(&page);
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    assert!(text.contains("mean of up to 1875 measurements; the band shows their range"), "{text}");
}

#[test]
fn the_page_of_a_study_has_one_run_of_each_arm() {
    let folder = tempfile::tempdir().unwrap();
    for arm in ["dense", "fst"] {
        for seed in [1, 2, 10] {
            let path = folder.path().join(format!("{arm}/seed-{seed}"));
            write_run(&path, arm, 40, 40, |_| {});
        }
    }
    let arm = |name: &str, difference: [Option<f64>; 3]| {
        let [mean, low, high] = difference;
        json!({
            "name": name,
            "val_loss": { "mean": 2.5 },
            "difference": { "mean": mean, "low": low, "high": high, "pairs": 3 },
            "flip_rate": 0.01,
            "mu": null,
            "failures": []
        })
    };
    let arms = [arm("dense", [None; 3]), arm("fst", [Some(-0.0123), Some(-0.02), Some(-0.005)])];
    let left_out = json!({ "mean": 0.0125, "by_seed": [0.025, 0.0, 0.0125] });
    let best = json!({ "arm": "fst", "among": ["dense", "fst"], "left_out": left_out });
    let trends = json!([{ "arms": ["weak", "fst"], "flip_rate": -1.0, "val_loss": 0.5 }]);
    let study = json!({
        "format": 1, "reference": "dense", "seeds": [1, 2, 10], "done": 6, "of": 6,
        "arms": arms, "best": best, "trends": trends
    });
    fs::write(folder.path().join("study.json"), study.to_string()).unwrap();
    let page = page(&[folder.path().to_owned()]).unwrap();
    let text = check(&page);
    assert_eq!(figures(&page)[..2], ["study", "loss"]);
    assert!(page.contains(&format!("<h1>{}</h1>", folder.path().file_name().unwrap().display())));
    check_contains(
        &text,
        &[
            "−0.0123",
            "−0.02 to −0.005",
            "dense/seed-1",
            "fst/seed-1",
            "the results include 4 more",
            "Lowest mean loss among all arms: fst.",
            "is 0.0125 on average; by seed: 0.025, 0, 0.0125.",
            "correlation of λ over weak, fst: −1 with the mean flip rate and 0.5 with the mean",
        ],
    );
    fs::write(folder.path().join("study.json"), "{").unwrap();
    let damaged = self::page(&[folder.path().to_owned()]).unwrap();
    assert!(check(&damaged).contains("study.json is damaged"));
}

/// The values under the pointer are those that the run logged, digit by digit.
#[test]
fn the_data_of_a_plot_are_the_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let loss = |step: u32| 4.0 + (step as f32).sin();
    write_run(&path, "fst", 1000, 1000, |metrics| metrics.loss = loss(metrics.step));
    let short = folder.path().join("short");
    write_run(&short, "dense", 7, 1000, |metrics| metrics.grad_norm = f32::NAN);
    let page = page(&[path.clone(), short]).unwrap();
    let document = Document::parse(page.strip_prefix("<!DOCTYPE html>\n").unwrap()).unwrap();
    let curves = |id: &str| -> Vec<serde_json::Value> {
        let plot = document.descendants().find(|node| node.attribute("id") == Some(id)).unwrap();
        serde_json::from_str(plot.attribute("data-curves").unwrap()).unwrap()
    };
    let logged = |key: &str| -> (Vec<u64>, Vec<String>) {
        let text = fs::read_to_string(path.join("metrics.jsonl")).unwrap();
        let lines =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let lines = lines.filter(|line| line[key].is_number());
        lines.map(|line| (line["step"].as_u64().unwrap(), line[key].to_string())).unzip()
    };
    for (id, of, key) in [
        ("loss-step", "training loss", "loss"),
        ("loss-time", "validation loss", "val_loss"),
        ("flips-step", "flip rate", "flip_rate"),
        ("learning-rate", "learning rate", "lr"),
    ] {
        let curves = curves(id);
        let curve = curves.iter().find(|curve| curve["of"] == of && curve["run"] == 0).unwrap();
        let (steps, values) = logged(key);
        assert_eq!(curve["step"], json!(steps), "{id}");
        let found: Vec<_> =
            curve["y"].as_array().unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(found, values, "{id}");
    }
    let loss = curves("loss-step");
    let ends = loss.iter().filter(|curve| curve["run"] == 1).map(|curve| &curve["step"]);
    assert_eq!(ends.collect::<Vec<_>>(), [&json!([1, 2, 3, 4, 5, 6, 7]), &json!([1])]);
    assert_eq!(curves("gradient-norm")[1]["y"], json!(vec![(); 7]));
    // A legend has the runs of its figure: the short one has no second flip rate, but a loss.
    let figure = page.split("<figure id=\"layers\"").next().unwrap();
    assert_eq!(figure.matches("<li data-run=\"1\">").count(), 2);
}

/// Every figure of the page is also a file that is well-formed and loads nothing.
#[test]
fn a_figure_is_a_standalone_document() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["dense", "fst"].map(|method| folder.path().join(method));
    write_run(&paths[0], "dense", 120, 120, with_instruments);
    write_run(&paths[1], "fst", 120, 120, with_instruments);
    let page = page(&paths).unwrap();
    for name in figures(&page).into_iter().chain(["quickstart"]) {
        let svg = figure(&paths, name).unwrap();
        assert_eq!(svg, figure(&paths, name).unwrap(), "the output is deterministic");
        let svg = svg.replace("http://www.w3.org/2000/svg", "");
        let document = parse(&svg);
        let root = document.root_element();
        assert_eq!((root.tag_name().name(), root.attribute("role")), ("svg", Some("img")));
        let has = |name: &str| root.descendants().any(|node| node.tag_name().name() == name);
        assert!(has("desc") && !has("script"), "{name}");
    }
    let quickstart = figure(&paths[1..], "quickstart").unwrap();
    check_contains(
        &quickstart,
        &["training loss", "validation loss and flip rate", "Flip rate", "dense from 101"],
    );
    let refused = figure(&paths, "variances").unwrap_err().to_string();
    assert!(refused.contains("variance") && refused.contains("quickstart"), "{refused}");
}
