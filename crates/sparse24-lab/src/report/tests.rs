//! The page of whole, unfinished, damaged and hostile runs: well-formed, complete, alone.

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use roxmltree::{Document, Node, ParsingOptions};

use super::page;
use sparse24_run::{
    checkpoint::PhaseKind,
    run::{Instruments, LayerInstruments, StepMetrics},
};

const CONFIG: &str = "preset = \"quickstart\"\nseed = 1\nsteps = STEPS\n[model]\nsequence_length = 64\n[method]\nname = \"METHOD\"\nlambda = 0.0002\n[batch]\nsize = 12\ngradient_accumulation_steps = 1\n";

/// A step of a run whose loss falls and whose masks calm down.
fn step(step: u32, of: u32, layers: usize, every: u32) -> StepMetrics {
    let is_sampled = step == 1 || step.is_multiple_of(every);
    let t = f64::from(step) / f64::from(of);
    let rate = 0.02 * (1.0 - t) + 1e-4;
    let per_layer = || -> BTreeMap<String, f64> {
        (0..layers)
            .map(|layer| (format!("h.{layer}.mlp.c_fc.weight"), rate * (1.0 + layer as f64)))
            .collect()
    };
    StepMetrics {
        step,
        phase: if 6 * step <= 5 * of { PhaseKind::Sparse } else { PhaseKind::Dense },
        loss: (2.0 + 3.0 / (1.0 + 20.0 * t)) as f32,
        lr: 1e-3,
        grad_norm: 1.0,
        tokens_per_s: 10_000.0,
        flip_rate: is_sampled.then_some(rate),
        flip_rate_per_layer: is_sampled.then(per_layer),
        val_loss: is_sampled.then_some(2.1),
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
    fs::write(
        path.join("config.toml"),
        CONFIG.replace("STEPS", &of.to_string()).replace("METHOD", method),
    )
    .unwrap();
    fs::write(
        path.join("provenance.json"),
        r#"[{"version": "0.1.0", "command": ["sparse24", "train"], "threads": 2}]"#,
    )
    .unwrap();
    fs::write(path.join("log.txt"), "2026-01-01T00:00:00Z started\n").unwrap();
    let mut lines = String::new();
    for number in 1..=done {
        let mut metrics = step(number, of, 2, 10);
        change(&mut metrics);
        let _ = writeln!(lines, "{}", serde_json::to_string(&metrics).unwrap());
    }
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
}

fn with_instruments(metrics: &mut StepMetrics) {
    if metrics.step.is_multiple_of(20) {
        metrics.instruments = Some(Box::new(instruments(metrics.step)));
    }
}

/// Everything that holds for every page; gives the text of all its elements.
fn check(page: &str) -> String {
    let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
    let document = Document::parse_with_options(body, ParsingOptions::default())
        .unwrap_or_else(|error| panic!("{error}"));
    let elements: Vec<Node<'_, '_>> = document.descendants().filter(Node::is_element).collect();
    let named = |name: &'static str| {
        elements.iter().filter(move |element| element.tag_name().name() == name)
    };
    let mut ids = HashSet::new();
    for element in &elements {
        for attribute in element.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(
                !["src", "srcset", "action", "data", "poster"].contains(&name)
                    && !name.starts_with("on"),
                "{name}={value}"
            );
            assert!(name != "href" || value.starts_with('#'), "{name}={value}");
            assert!(!value.contains("url(") && !value.contains("://"), "{name}={value}");
            assert!(name != "id" || ids.insert(value.to_owned()), "the id {value} stands twice");
        }
    }
    let refers = elements
        .iter()
        .flat_map(|element| ["aria-labelledby", "href"].map(|name| element.attribute(name)));
    for id in refers.flatten().flat_map(str::split_whitespace) {
        assert!(ids.contains(id.trim_start_matches('#')), "nothing has the id {id}");
    }
    assert_eq!((named("script").count(), named("style").count()), (1, 1));
    for text in named("script").chain(named("style")).filter_map(Node::text) {
        assert!(
            !["://", "url(", "@import", "fetch(", "import("]
                .iter()
                .any(|loads| text.contains(loads)),
            "it loads something"
        );
    }
    for figure in named("figure") {
        let inside =
            |name: &str| figure.descendants().filter(|node| node.tag_name().name() == name).count();
        let rows = figure.descendants().filter(|node| node.tag_name().name() == "td").count();
        assert!(inside("table") > 0 && rows > 0, "{:?} has no numbers", figure.attribute("id"));
        let pictures: Vec<_> =
            figure.descendants().filter(|node| node.attribute("role") == Some("img")).collect();
        assert!(!pictures.is_empty(), "{:?} has no picture", figure.attribute("id"));
        for picture in pictures {
            for part in ["title", "desc"] {
                let text = picture
                    .children()
                    .find(|node| node.tag_name().name() == part)
                    .and_then(|node| node.text());
                assert!(
                    text.is_some_and(|text| !text.is_empty()),
                    "a picture of {:?} has no {part}",
                    figure.attribute("id")
                );
            }
        }
    }
    elements
        .iter()
        .filter(|element| !["script", "style"].contains(&element.tag_name().name()))
        .filter_map(Node::text)
        .collect::<Vec<_>>()
        .join("\n")
}

fn figures(page: &str) -> Vec<&str> {
    page.split("<figure id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
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
        ["loss", "held-out", "flips", "layers", "tiles", "kept", "gaps", "variance", "optimizer"]
    );
    // 12 * 64 tokens a step at 10,000 a second.
    for said in [
        "dense from step 101",
        "fst, λ = 0.0002 on gradients",
        "120, finished",
        "9.2 s",
        "Settings that differ",
        "sparse24 train",
    ] {
        assert!(text.contains(said), "{said} is missing");
    }
    assert!(!text.contains("What is not here"));
    let one = page(&paths[1..]).unwrap();
    check(&one);
    assert!(!figures(&one).contains(&"held-out"));
}

#[test]
fn an_unfinished_run_says_how_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stopped");
    write_run(&path, "fst", 37, 120, |_| {});
    fs::write(
        path.join("log.txt"),
        "2026-01-01T00:00:00Z started\n2026-01-01T00:00:09Z stopped after step 37\n",
    )
    .unwrap();
    let text = check(&page(&[path]).unwrap());
    for said in
        ["37 of 120, unfinished", "its log ends with “2026-01-01T00:00:09Z stopped after step 37”"]
    {
        assert!(text.contains(said), "{said} is missing in {text}");
    }
}

#[test]
fn a_damaged_run_says_what_is_missing() {
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
    for said in [
        "metrics.jsonl: 2 lines of 56 cannot be read and are left out, the first is line 26",
        "metrics.jsonl: 6 steps before step 60 are missing",
        "config.toml is damaged",
        "provenance.json is missing",
        "Against time nothing can be drawn",
    ] {
        assert!(text.contains(said), "{said} is missing in {text}");
    }

    for name in ["metrics.jsonl", "config.toml"] {
        fs::remove_file(path.join(name)).unwrap();
    }
    let empty = page(std::slice::from_ref(&path)).unwrap();
    assert_eq!(figures(&empty), [""; 0]);
    assert!(check(&empty).contains("metrics.jsonl is missing: there are no curves"));
    fs::remove_file(path.join("log.txt")).unwrap();
    assert!(
        page(std::slice::from_ref(&path))
            .unwrap_err()
            .to_string()
            .contains("holds none of config.toml")
    );
    assert!(page(&[path.join("nowhere")]).unwrap_err().to_string().contains("no such directory"));
    assert!(page(&[]).is_err());
}

#[test]
fn numbers_that_are_none_are_gaps() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nan");
    write_run(&path, "fst", 30, 30, |metrics| {
        if metrics.step > 10 {
            (metrics.loss, metrics.grad_norm, metrics.tokens_per_s, metrics.lr) =
                (f32::NAN, f32::NAN, 0.0, 0.0);
        }
        if metrics.step == 20 {
            metrics.flip_rate = Some(0.0);
        }
    });
    // What no run measures.
    let mut lines = fs::read_to_string(path.join("metrics.jsonl")).unwrap();
    lines.insert_str(0, "{\"step\": 0, \"phase\": \"dense\"}\n");
    for (step, value) in [(31, "1e308"), (32, "-1e308"), (33, "5e-324"), (34, "1e999")] {
        let _ = writeln!(
            lines,
            "{{\"step\": {step}, \"phase\": \"dense\", \"val_loss\": {value}, \"flip_rate\": {value}, \"loss\": {value}, \"tokens_per_s\": 1e-300}}"
        );
    }
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
    let page = page(&[path]).unwrap();
    let text = check(&page);
    assert!(
        text.contains("2 lines of 35 cannot be read and are left out, the first is line 1"),
        "{text}"
    );
    let drawn: String =
        page.split(" d=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
}

/// Markup in every place where a file or a name has a say.
#[test]
fn what_stands_in_files_is_text() {
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
    let start = serde_json::json!([{ EVIL: EVIL, "command": [EVIL], "libraries": { EVIL: EVIL } }]);
    fs::write(path.join("provenance.json"), start.to_string()).unwrap();
    fs::write(path.join("log.txt"), EVIL).unwrap();
    let search = serde_json::json!({ "candidates": [{ "lambda": 1e-4, "mu": 0.8, "interval": [0.7, 0.9], "verdict": EVIL }], "advice": EVIL, "until": EVIL });
    fs::write(folder.path().join("search.json"), search.to_string()).unwrap();
    let study = serde_json::json!({ "reference": EVIL, "arms": [{ "name": EVIL, "difference": { "mean": 0.1, "low": 0.0, "high": 0.2 } }] });
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
fn a_long_run_is_a_small_page() {
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
    assert!(
        text.contains("Each point is the mean of up to 1875 measurements; the band reaches from the least to the largest of them."),
        "{text}"
    );
}

#[test]
fn a_study_is_told_with_one_run_of_each_arm() {
    let folder = tempfile::tempdir().unwrap();
    for (arm, method) in [("dense", "dense"), ("fst", "fst")] {
        for seed in [1, 2, 10] {
            write_run(
                &folder.path().join(arm).join(format!("seed-{seed}")),
                method,
                40,
                40,
                |_| {},
            );
        }
    }
    let arm = |name: &str, difference: [Option<f64>; 3]| {
        let [mean, low, high] = difference;
        serde_json::json!({ "name": name, "val_loss": { "mean": 2.5 }, "difference": { "mean": mean, "low": low, "high": high, "pairs": 3 }, "flip_rate": 0.01, "mu": null, "failures": [] })
    };
    let arms = [arm("dense", [None; 3]), arm("fst", [Some(-0.0123), Some(-0.02), Some(-0.005)])];
    let best = serde_json::json!({ "arm": "fst", "among": ["dense", "fst"], "left_out": { "mean": 0.0125, "by_seed": [0.025, 0.0, 0.0125] } });
    let trends =
        serde_json::json!([{ "arms": ["weak", "fst"], "flip_rate": -1.0, "val_loss": 0.5 }]);
    let study = serde_json::json!({
        "format": 1, "reference": "dense", "seeds": [1, 2, 10], "done": 6, "of": 6, "arms": arms, "best": best, "trends": trends
    });
    fs::write(folder.path().join("study.json"), study.to_string()).unwrap();
    let page = page(&[folder.path().to_owned()]).unwrap();
    let text = check(&page);
    assert_eq!(figures(&page)[..2], ["study", "loss"]);
    assert!(page.contains(&format!("<h1>{}</h1>", folder.path().file_name().unwrap().display())));
    for said in [
        "−0.0123",
        "−0.02 to −0.005",
        "dense/seed-1",
        "fst/seed-1",
        "4 more are in its conclusions",
        "Lowest mean loss: fst, of all arms. Minus the best of the other seeds, dense has 0.0125 on average, 0.025, 0, 0.0125 by seed.",
        "With λ, over weak, fst: Spearman's rank correlation is −1 of the mean flip rate and 0.5 of the mean held-out loss.",
    ] {
        assert!(text.contains(said), "{said} is missing in {text}");
    }
    fs::write(folder.path().join("study.json"), "{").unwrap();
    assert!(
        check(&super::page(&[folder.path().to_owned()]).unwrap()).contains("study.json is damaged")
    );
}
