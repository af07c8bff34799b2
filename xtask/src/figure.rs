//! `cargo xtask figure RUN_DIR... --out FILE`: what happened in one or more runs, as an SVG that
//! stands on its own: loss above, flip rate below, against the step, with the switch from sparse to
//! dense. The numbers are those of `metrics.jsonl`; only the training loss of long runs is
//! averaged, and the legend says over how many steps. No fonts and no scripts are loaded.

use std::{fs, path::PathBuf, process::ExitCode};

use crate::Result;

mod metrics;
mod panel;

use metrics::Run;
use panel::{Curve, Floor, Ink, Panel};

/// Mid tones that hold on white and on near-black alike; a run takes the next one.
const COLOURS: [&str; 6] = ["#2f81f7", "#e0823d", "#2da44e", "#a475f9", "#d4699e", "#9a8a2c"];

/// At most so many points are drawn of a training loss.
const POINTS: usize = 500;

const WIDTH: f64 = 840.0;

/// Where the legend begins, from the top; it has a line for each run.
const PLOTS_END: f64 = 570.0;
const LEGEND_LINE: f64 = 22.0;

/// Where the second entry of a legend line begins, from the left.
const LEGEND_SECOND: f64 = 420.0;

/// Reads the runs, draws, writes the file.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let (mut directories, mut out) = (Vec::new(), None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = Some(PathBuf::from(arguments.next().ok_or("--out wants a file")?)),
            option if option.starts_with('-') => {
                return Err(format!("unknown option {option}; known: --out FILE").into());
            }
            directory => directories.push(PathBuf::from(directory)),
        }
    }
    let out = out.ok_or("no --out FILE")?;
    if !(1..=COLOURS.len()).contains(&directories.len()) {
        return Err(format!(
            "{} run directories; 1 to {} fit in one picture",
            directories.len(),
            COLOURS.len()
        )
        .into());
    }
    let runs =
        directories.iter().map(|directory| Run::read(directory)).collect::<Result<Vec<Run>>>()?;
    fs::write(&out, draw(&runs)).map_err(|error| format!("{}: {error}", out.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn draw(runs: &[Run]) -> String {
    let (mut losses, mut flips, mut legend) = (Vec::new(), Vec::new(), String::new());
    for ((run, colour), line) in runs.iter().zip(COLOURS).zip(0..) {
        let (training, steps) = thinned(&run.loss);
        let training_label = if steps == 1 {
            "training loss".to_owned()
        } else {
            format!("training loss, mean of {steps} steps")
        };
        losses.push(Curve { points: training, colour, ink: Ink::Faint });
        losses.push(Curve { points: run.validation.clone(), colour, ink: Ink::Marked });
        flips.push(Curve { points: run.flip_rate.clone(), colour, ink: Ink::Marked });
        let sampled = [
            (!run.validation.is_empty(), "validation loss"),
            (!run.flip_rate.is_empty(), "flip rate"),
        ];
        let sampled: Vec<&str> =
            sampled.into_iter().filter(|(there, _)| *there).map(|(_, name)| name).collect();
        let name = if runs.len() == 1 { String::new() } else { format!("{}: ", run.name) };
        let entries = [
            (Ink::Faint, name.clone() + &training_label),
            (Ink::Marked, name + &sampled.join(", ")),
        ];
        for ((ink, label), x) in
            entries.into_iter().zip([panel::LEFT, LEGEND_SECOND]).take(1 + sampled.len().min(1))
        {
            let y = PLOTS_END + LEGEND_LINE * f64::from(line);
            legend += &ink.stroke(&[(x, y), (x + 26.0, y)], &[(x + 13.0, y)], colour);
            legend +=
                &format!("<text x=\"{}\" y=\"{}\">{}</text>\n", x + 34.0, y + 4.5, escaped(&label));
        }
    }

    let last_step =
        losses.iter().flat_map(|curve| &curve.points).map(|&(step, _)| step).fold(1.0, f64::max);
    let mut switches: Vec<f64> = runs.iter().filter_map(|run| run.switch).collect();
    switches.sort_by(f64::total_cmp);
    switches.dedup();

    let above = Panel {
        title: "loss (nats a token)",
        top: 34.0,
        height: 230.0,
        floor: Floor::Data,
        step_axis: None,
    };
    let title = "flip rate (share of mask bits that change in a step)";
    let below = Panel {
        title,
        top: 318.0,
        height: 180.0,
        floor: Floor::Zero,
        step_axis: Some("optimizer step"),
    };
    let panels =
        above.draw(&losses, last_step, &switches) + &below.draw(&flips, last_step, &switches);
    let height = PLOTS_END + LEGEND_LINE * runs.len() as f64;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13" fill="#7d8590">
<title>Loss and flip rate against the optimizer step</title>
{panels}{legend}</svg>
"##
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// At most [`POINTS`] points, each the mean of so many neighbours.
fn thinned(points: &[(f64, f64)]) -> (Vec<(f64, f64)>, usize) {
    let size = points.len().div_ceil(POINTS).max(1);
    let mean = |chunk: &[(f64, f64)]| {
        let n = chunk.len() as f64;
        (chunk.iter().map(|p| p.0).sum::<f64>() / n, chunk.iter().map(|p| p.1).sum::<f64>() / n)
    };
    (points.chunks(size).map(mean).collect(), size)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{POINTS, escaped, run, thinned};

    fn figure(lines: &[&str]) -> Result<String, String> {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("figure.svg");
        fs::write(directory.path().join("metrics.jsonl"), lines.join("\n")).unwrap();
        let arguments = [
            directory.path().to_str().unwrap().to_owned(),
            "--out".to_owned(),
            out.to_str().unwrap().to_owned(),
        ];
        run(&arguments).map_err(|error| error.to_string())?;
        Ok(fs::read_to_string(out).unwrap())
    }

    #[test]
    fn the_switch_and_every_curve_are_drawn() {
        let svg = figure(&[
            r#"{"step": 1, "phase": "sparse", "loss": 5.0, "flip_rate": 0.01}"#,
            r#"{"step": 2, "phase": "sparse", "loss": 4.0, "flip_rate": 0.02, "val_loss": 4.5}"#,
            r#"{"step": 3, "phase": "dense", "loss": 3.0, "flip_rate": 0.005}"#,
        ])
        .unwrap();
        for part in
            ["training loss", "validation loss", "flip rate", "sparse", "dense", "stroke-dasharray"]
        {
            assert!(svg.contains(part), "{part} is missing in {svg}");
        }
    }

    #[test]
    fn a_dense_run_has_no_switch() {
        let svg = figure(&[
            r#"{"step": 1, "phase": "dense", "loss": 5.0}"#,
            r#"{"step": 2, "phase": "dense", "loss": 4.0}"#,
        ])
        .unwrap();
        assert!(!svg.contains("stroke-dasharray"), "{svg}");
    }

    #[test]
    fn bad_metrics_name_their_line() {
        let good = r#"{"step": 1, "phase": "sparse", "loss": 5.0}"#;
        for (bad, says) in
            [("{", "metrics.jsonl:2"), (r#"{"step": 2, "loss": 1.0}"#, "metrics.jsonl:2: no phase")]
        {
            let error = figure(&[good, bad]).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert!(figure(&[]).unwrap_err().contains("no step"));
    }

    #[test]
    fn arguments_are_checked() {
        for (arguments, says) in [
            (vec!["x"], "no --out"),
            (vec!["--out", "x.svg"], "0 run directories"),
            (vec!["--in", "x"], "--in"),
        ] {
            let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
            let error = run(&arguments).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_long_curve_is_averaged() {
        let points: Vec<(f64, f64)> = (0..3 * POINTS).map(|i| (i as f64, (i % 3) as f64)).collect();
        let (thin, steps) = thinned(&points);
        assert_eq!((thin.len(), steps), (POINTS, 3));
        assert_eq!(thin[1], (4.0, 1.0));
        assert_eq!(thinned(&points[..POINTS]).0, points[..POINTS]);
    }

    #[test]
    fn names_are_text() {
        assert_eq!(escaped("a<b & c"), "a&lt;b &amp; c");
    }
}
