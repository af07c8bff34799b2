//! Curves against the optimizer step: losses, flip rate, instruments, and the optimizer.

use super::{
    axis::{Axis, range},
    bucket::{Bucket, buckets},
    figure::{Entry, Figure, LINE, Layout, legend},
    plot::{Curve, Mark, Plot, Style},
    record::{Record, Step},
    text::{Table, cell, number},
};

/// With more runs, bands would cover each other.
const BANDS: usize = 3;
/// With more labels on the marks of a plot, they would cover each other.
const LABELS: usize = 3;
/// Share of the steps at the start that need not fit in the plot of the loss.
const HEAD: f64 = 0.03;
pub(super) const NATS: &str = "nats";

/// Most points of a curve if `runs` share a plot.
pub(super) fn resolution(runs: usize) -> usize {
    (1600 / runs.max(1)).clamp(80, 320)
}

pub(super) fn step_axis(runs: &[Record]) -> Axis {
    Axis::from_zero("optimizer step", runs.iter().map(|run| f64::from(run.last_step())))
}

/// Marks where the kind of phase changes, at the last step of the phase that ends; `x` is the
/// position of a step.
pub(super) fn switches(runs: &[Record], x: impl Fn(&Record, u32) -> f64) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        for &(step, kind) in &run.switches {
            let (x, mut label) = (x(run, step.saturating_sub(1)), format!("{kind} from {step}"));
            if let Some(mark) = marks.iter_mut().find(|mark| mark.x == x) {
                mark.run = None;
                continue;
            }
            if marks.len() >= LABELS || marks.iter().any(|mark| mark.label == label) {
                label.clear();
            }
            marks.push(Mark { x, label, run: (runs.len() > 1).then_some(number) });
        }
    }
    marks
}

/// [`switches`] over steps, without labels.
pub(super) fn plain_switches(runs: &[Record]) -> Vec<Mark> {
    let marks = switches(runs, |_, step| f64::from(step)).into_iter();
    marks.map(|mark| Mark { label: String::new(), ..mark }).collect()
}

/// A plot whose alternative text gives the ends of each curve.
fn line_plot(
    runs: &[Record],
    [id, title]: [&str; 2],
    [x, y]: [Axis; 2],
    height: f64,
    curves: &[Curve],
    marks: Vec<Mark>,
) -> Plot {
    let ends = |curve: &Curve| {
        let ends = [curve.points.first()?, curve.points.last()?].map(Bucket::point);
        let [[x, first], [end, last]] = ends.map(|point| point.map(|value| number(value, 4)));
        let name = [&runs[curve.run].name, curve.detail.0].join(" ");
        Some(format!("{}: {first} at {x}, {last} at {end}.", name.trim_end()))
    };
    let description = curves.iter().filter_map(ends).collect::<Vec<_>>().join(" ");
    let (id, title) = (id.into(), title.into());
    Plot { id, title, description, x, height, marks, ..Plot::default() }.with_curves(y, curves)
}

/// A sentence for curves that are thinner than the measurements.
fn thinned(most: usize, band: &str) -> Option<String> {
    (most > 1).then(|| format!("Each point is the mean of up to {most} measurements{band}."))
}

/// The unit of time for the longest run, and its seconds.
fn time_unit(runs: &[Record]) -> (&'static str, f64) {
    match runs.iter().map(Record::seconds).fold(0.0, f64::max) {
        s if s < 300.0 => ("s", 1.0),
        s if s < 18_000.0 => ("min", 60.0),
        s if s < 400_000.0 => ("h", 3600.0),
        _ => ("d", 86_400.0),
    }
}

/// Training and validation loss against the step and against time.
pub(super) fn loss(runs: &[Record]) -> Figure {
    // Losses of neighbouring batches scatter, so coarser buckets show more.
    let most = resolution(runs.len()) / 2;
    let (unit, seconds) = time_unit(runs);
    let time = |run: &Record, step: f64| run.seconds_at(step as u32) / seconds;
    let sharing = runs.len();
    let (mut tables, mut by_step) = (Vec::new(), Vec::new());
    for (at, run) in runs.iter().enumerate() {
        let losses = run.points(|step| step.loss.into());
        let training = buckets(&losses, most);
        let mut validation = buckets(&run.validation, most);
        validation.iter_mut().for_each(|b| b.at = b.x[1]);
        let mut add_table = |what: &str, last: &[&str], rows: Vec<Vec<String>>| {
            if !rows.is_empty() {
                let time = format!("time, {unit}");
                let columns = [&["step", &time, what], last].concat();
                let caption = format!("{}: {what}, {NATS}", run.name);
                tables.push(Table::new(caption, &columns, rows).of_run(at));
            }
        };
        let time_at = |step: f64| cell(time(run, step));
        let range = |b: &Bucket| format!("{} to {}", cell(b.low), cell(b.high));
        let row = |b: &Bucket| vec![b.span(), time_at(b.at), cell(b.mean), range(b)];
        let rows = training.iter().map(row).collect();
        add_table("training loss", &["least to largest"], rows);
        let row = |b: &Bucket| vec![b.at.to_string(), time_at(b.at), cell(b.mean)];
        add_table("validation loss", &[], validation.iter().map(row).collect());
        let has_band = sharing <= BANDS && training.len() < run.steps.len();
        let faint = Curve { run: at, style: Style::Faint, points: training, ..Curve::default() };
        let strong = Curve { run: at, points: validation, ..Curve::default() };
        by_step.push(Curve { has_band, ..faint.of("training loss", &losses, sharing) });
        by_step.push(strong.of("validation loss", &run.validation, sharing));
    }
    by_step.retain(|curve| !curve.points.is_empty());
    let over_time = |curve: &Curve| {
        let moved = |points: &[Bucket]| -> Vec<_> {
            points.iter().map(|b| Bucket { at: time(&runs[curve.run], b.at), ..*b }).collect()
        };
        let (name, detail) = &curve.detail;
        let (points, detail) = (moved(&curve.points), (*name, moved(detail)));
        Curve { points, detail, ..*curve }
    };

    let x = step_axis(runs);
    let (y, cut) = loss_axis(&by_step, x.high * HEAD);
    let longest = runs.iter().map(|run| run.steps.len().div_ceil(most)).max().unwrap_or(1);
    let band = if runs.len() <= BANDS { "; the band shows their range" } else { "" };
    let mut notes: Vec<String> = thinned(longest, band).into_iter().collect();
    notes.extend(
        cut.map(|top| format!("The first steps reach {}, above the plot.", number(top, 3))),
    );
    let marks = switches(runs, |_, step| f64::from(step));
    let names = ["loss-step", "Loss against the optimizer step"];
    let plot = line_plot(runs, names, [x, y.clone()], 300.0, &by_step, marks);
    let mut plots = vec![("against the step".to_owned(), plot)];
    if runs.iter().any(|run| run.seconds() > 0.0) {
        let ends = runs.iter().map(|run| run.seconds() / seconds);
        let x = Axis::from_zero(format!("time in optimizer steps, {unit}"), ends);
        let marks = switches(runs, |run, step| time(run, f64::from(step)));
        let names = ["loss-time", "Loss against time"];
        let curves: Vec<_> = by_step.iter().map(over_time).collect();
        let plot = line_plot(runs, names, [x, y], 300.0, &curves, marks);
        plots.push(("against time".to_owned(), plot));
    } else {
        notes.push(
            "There is no plot against time: the speed or the tokens of a step are not known."
                .into(),
        );
    }
    Figure {
        id: "loss",
        title: "Loss",
        lead:
            "Thin: training loss of each step. Strong, with markers: loss on the validation set, \
               or on run.eval_tokens of it, with the weights of the phase. Time is the sum over \
               optimizer steps, without evaluation, checkpoints and pauses."
                .into(),
        plots,
        legend: legend(runs, &by_step),
        notes,
        tables,
        ..Figure::default()
    }
}

/// An axis for all losses but those before the step `head`, and the largest loss that does not fit.
fn loss_axis(curves: &[Curve], head: f64) -> (Axis, Option<f64>) {
    let label = format!("loss, {NATS}");
    let values = |from: f64| -> Vec<f64> {
        let of_curve = |curve: &Curve| {
            let points = curve.points.iter().filter(|point| point.at >= from);
            let band = |b: &Bucket| if curve.has_band { [b.low, b.high] } else { [b.mean; 2] };
            points.flat_map(band).collect::<Vec<_>>()
        };
        curves.iter().flat_map(of_curve).collect()
    };
    match (range(values(0.0)), range(values(head))) {
        (Some((_, top)), Some((low, high))) if top > high + 0.15 * (high - low) => {
            (Axis::around(label, [low, high]), Some(top))
        }
        _ => (Axis::around(label, values(0.0)), None),
    }
}

/// One value of each run against the step.
struct Measure {
    id: &'static str,
    title: &'static str,
    label: &'static str,
    lead: &'static str,
    points: fn(&Record) -> Vec<[f64; 2]>,
    axis: fn(&'static str, Vec<f64>) -> Axis,
}

const VALIDATION: Measure = Measure {
    id: "validation",
    title: "Validation loss in detail",
    label: "validation loss, nats",
    lead: "The validation loss over the second half of the steps, on its own scale.",
    points: |run| run.validation.clone(),
    axis: Axis::around,
};

const SCORE: Measure = Measure {
    id: "score",
    title: "Score of the task",
    label: "score on the validation set",
    lead: "The score that the task of a fine-tuning is judged by: accuracy, F1, or a correlation.",
    points: |run| run.scores.clone(),
    axis: Axis::around,
};

const FLIPS: Measure = Measure {
    id: "flips",
    title: "Flip rate",
    label: "flip rate",
    lead: "The share of mask bits of all sparsifiable weights that change in one step, \
           |m(wₜ) − m(wₜ₋₁)|₁ / D. For a dense run, the mask is the one that its weights would \
           have. In healthy sparse training, it rises and then decays; λ is the factor of masked \
           decay.",
    points: |run| run.flips.clone(),
    axis: Axis::magnitudes,
};

const KEPT: Measure = Measure {
    id: "kept",
    title: "Norm kept by the transposable mask",
    label: "kept L1 norm / L1 norm",
    lead: "The share of the weights' L1 norm that their transposable masks keep, whichever mask \
           the method multiplies with; 1 means that pruning changes nothing. The larger half of \
           Gaussian weights holds about four fifths of the norm.",
    points: |run| run.instrument(|instruments| Some(instruments.kept)),
    axis: Axis::around,
};

const VARIANCE: Measure = Measure {
    id: "variance",
    title: "Noise of the sampled gradients",
    label: "E|MVUE(dZ) − dZ|² / |dZ|²",
    lead: "The variance that the unbiased 2:4 estimate adds to the output gradients, over their \
           squared norm, for all sparsified layers of the first micro-batch of a step. Dense \
           phases sample nothing.",
    points: |run| run.instrument(|instruments| instruments.mvue_variance),
    axis: Axis::around,
};

/// A curve and a table for each run that has the values; the steps start at `x.low`.
fn measured(runs: &[Record], measure: &Measure, x: Axis) -> Option<Figure> {
    let Measure { id, title, label, lead, .. } = *measure;
    let quantity = label.split(',').next().unwrap_or(label);
    let most = resolution(runs.len());
    let (mut curves, mut tables, mut longest) = (Vec::new(), Vec::new(), 1);
    for (run, record) in runs.iter().enumerate() {
        let points: Vec<_> =
            (measure.points)(record).into_iter().filter(|&[step, _]| step >= x.low).collect();
        longest = longest.max(points.len().div_ceil(most));
        let drawn = buckets(&points, most);
        if !drawn.is_empty() {
            let rows = drawn.iter().map(|b| vec![b.span(), cell(b.mean)]);
            let caption = format!("{}: {label}", record.name);
            tables.push(Table::new(caption, &["step", label], rows).of_run(run));
            let curve = Curve { run, points: drawn, ..Curve::default() };
            curves.push(curve.of(quantity, &points, runs.len()));
        }
    }
    let values = curves.iter().flat_map(|curve| &curve.points).map(|point| point.mean);
    let y = (measure.axis)(label, values.collect());
    let marks = switches(runs, |_, step| f64::from(step));
    let marks = marks.into_iter().filter(|mark| mark.x >= x.low).collect();
    let plot = line_plot(runs, [&format!("{id}-step"), title], [x, y], 300.0, &curves, marks);
    (!curves.is_empty()).then(|| Figure {
        id,
        title,
        lead: lead.into(),
        legend: legend(runs, &curves),
        plots: vec![(String::new(), plot)],
        notes: thinned(longest, "").into_iter().collect(),
        tables,
        ..Figure::default()
    })
}

/// The validation loss of the second half of the steps, where several runs are close.
pub(super) fn validation(runs: &[Record]) -> Option<Figure> {
    let x = step_axis(runs);
    let x = Axis { low: x.high / 2.0, ..x };
    let has_curve =
        |run: &&Record| run.validation.iter().filter(|[step, _]| *step >= x.low).count() > 1;
    (runs.iter().filter(has_curve).count() > 1).then(|| measured(runs, &VALIDATION, x))?
}

pub(super) fn score(runs: &[Record]) -> Option<Figure> {
    measured(runs, &SCORE, step_axis(runs))
}

pub(super) fn flips(runs: &[Record]) -> Option<Figure> {
    measured(runs, &FLIPS, step_axis(runs))
}

/// The norm kept by the masks, the gaps of the tiles, and the noise of the sampled gradients.
pub(super) fn instruments(runs: &[Record]) -> Vec<Figure> {
    let x = || step_axis(runs);
    let figures = [measured(runs, &KEPT, x()), gaps(runs), measured(runs, &VARIANCE, x())];
    figures.into_iter().flatten().collect()
}

/// Quantiles of the tiles' gaps against the step.
fn gaps(runs: &[Record]) -> Option<Figure> {
    let (mut tables, mut curves, mut top) = (Vec::new(), Vec::new(), vec![0.0]);
    for (run, record) in runs.iter().enumerate().filter(|(_, run)| !run.samples.is_empty()) {
        let values = |at: usize| record.instrument(|sample| Some(sample.gap[at].into()));
        let quantiles: [Vec<Bucket>; 5] =
            std::array::from_fn(|at| buckets(&values(at), resolution(runs.len())));
        let rows = (0..quantiles[0].len()).map(|at| {
            let values = quantiles.iter().map(|points| cell(points[at].mean));
            [quantiles[0][at].span()].into_iter().chain(values).collect()
        });
        let columns = ["step", "10 %", "25 %", "50 %", "75 %", "90 %"];
        let caption = format!("{}: quantiles of the gap over all tiles", record.name);
        tables.push(Table::new(caption, &columns, rows).of_run(run));
        let [_, quarter, mut median, three, _] = quantiles;
        top.extend(three.iter().map(|point| point.mean));
        let has_band = runs.len() == 1;
        if has_band {
            for ((b, low), high) in median.iter_mut().zip(&quarter).zip(&three) {
                (b.low, b.high) = (low.mean, high.mean);
            }
        }
        let mut add = |(at, name), style, points| {
            let curve = Curve { run, style, points, has_band, ..Curve::default() };
            curves.push(curve.of(name, &values(at), runs.len()));
        };
        if !has_band {
            add((1, "first quartile"), Style::Faint, quarter);
            add((3, "third quartile"), Style::Faint, three);
        }
        add((2, "median gap"), Style::Strong, median);
    }
    let axes = [step_axis(runs), Axis::around("L1-norm gap of a tile", top)];
    let names = ["gaps-step", "L1-norm gap of the tiles"];
    let marks = switches(runs, |_, step| f64::from(step));
    let plot = line_plot(runs, names, axes, 300.0, &curves, marks);
    (!curves.is_empty()).then(|| Figure {
        id: "gaps",
        title: "Gap between the best mask and the second best",
        lead: "The L1 norm that a tile's best mask keeps minus that of its second best: the \
               median over all tiles, and the quartiles as thin lines or a band. A mask with a \
               small gap flips easily."
            .into(),
        legend: legend(runs, &curves),
        plots: vec![(String::new(), plot)],
        tables,
        ..Figure::default()
    })
}

pub(super) fn optimizer(runs: &[Record]) -> Figure {
    type Value = fn(&Step) -> f64;
    let kinds: [(&str, &str, Value); 3] = [
        ("gradient-norm", "gradient norm before clipping", |step| step.grad_norm.into()),
        ("learning-rate", "learning rate", |step| step.lr.into()),
        ("speed", "tokens per second", |step| step.tokens_per_s),
    ];
    let most = resolution(runs.len()) / 2;
    let drawn: Vec<_> = runs.iter().enumerate().filter(|(_, run)| !run.steps.is_empty()).collect();
    let thin: Vec<_> = drawn
        .iter()
        .map(|(_, run)| kinds.map(|(_, _, value)| buckets(&run.points(value), most)))
        .collect();
    let mut shown = Vec::new();
    let plots = kinds.iter().enumerate().map(|(kind, &(id, name, value))| {
        let curve = |(&(run, record), thin): (&(usize, &Record), &[Vec<Bucket>; 3])| {
            let curve = Curve { run, points: thin[kind].clone(), ..Curve::default() };
            curve.of(
                name.split(" before").next().unwrap_or(name),
                &record.points(value),
                runs.len(),
            )
        };
        let curves: Vec<_> = drawn.iter().zip(&thin).map(curve).collect();
        let values = curves.iter().flat_map(|curve| &curve.points).map(|point| point.mean);
        let y = match kind {
            0 => Axis::magnitudes("", values),
            _ => Axis::around("", values.chain([0.0])),
        };
        let names = [id, &format!("{name} against the optimizer step")];
        let axes = [step_axis(runs), y];
        let plot = line_plot(runs, names, axes, 150.0, &curves, plain_switches(runs));
        shown = curves;
        (name.to_owned(), plot)
    });
    let plots = plots.collect();
    let tables = drawn.iter().zip(&thin).map(|(&(at, run), [norm, rate, speed])| {
        let columns = [
            "step",
            "gradient norm",
            "learning rate",
            "tokens per second",
            "largest gradient norm",
        ];
        let rows = norm.iter().zip(rate).zip(speed).map(|((norm, rate), speed)| {
            let values = [norm.mean, rate.mean, speed.mean, norm.high].map(cell);
            [norm.span()].into_iter().chain(values).collect()
        });
        Table::new(format!("{}: means over the steps", run.name), &columns, rows).of_run(at)
    });
    let longest = runs.iter().map(|run| run.steps.len().div_ceil(most)).max().unwrap_or(1);
    Figure {
        id: "optimizer",
        title: "Optimizer and speed",
        lead: "Gradient norm, learning rate and throughput of the steps.".into(),
        layout: Layout::Beside,
        plots,
        legend: legend(runs, &shown),
        notes: thinned(longest, "").into_iter().collect(),
        tables: tables.collect(),
        ..Figure::default()
    }
}

/// Loss and flip rate against the step, with the switch between sparse and dense phases.
pub(super) fn quickstart(runs: &[Record]) -> Figure {
    let head = |head: &str, (_, plot): (String, Plot)| (head.to_owned(), plot);
    let loss = loss(runs);
    let plots = loss.plots.into_iter().take(1).map(|plot| head("Loss", plot));
    let flips = flips(runs).map(|flips| flips.plots).into_iter().flatten();
    let flips = flips.map(|plot| head("Flip rate: share of mask bits that change in a step", plot));
    let key = [("faint", "training loss"), ("strong", "validation loss and flip rate")];
    let entry = |(class, name): (&str, &str)| Entry {
        swatch: LINE.replace("strong", class).replace("INK", "s0"),
        name: name.into(),
        ..Entry::default()
    };
    Figure {
        id: "quickstart",
        title: "Loss and flip rate against the optimizer step",
        plots: plots.chain(flips).collect(),
        legend: key.into_iter().map(entry).chain(loss.legend).collect(),
        notes: loss.notes,
        ..Figure::default()
    }
}
