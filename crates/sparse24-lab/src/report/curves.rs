//! The curves of every run: loss, held-out loss, flip rate, and what the optimizer did.

use super::{
    axis::{Axis, range},
    chart::{Chart, Series},
    figure::{Figure, Layout, Legend, Numbers, buckets, cell, finely, span, thinned},
    frame::Mark,
    markup::{Table, number},
    record::{Record, Step},
    thin::Bucket,
};

/// A unit of time: its name and its seconds.
pub(super) type Unit = (&'static str, f64);

/// That which suits the longest run.
pub(super) fn unit(runs: &[Record]) -> Unit {
    let longest =
        runs.iter().filter_map(|run| run.steps.last()).map(|step| step.seconds).fold(0.0, f64::max);
    match longest {
        s if s < 300.0 => ("s", 1.0),
        s if s < 18_000.0 => ("min", 60.0),
        s if s < 400_000.0 => ("h", 3600.0),
        _ => ("d", 86_400.0),
    }
}

/// The axis of steps.
pub(super) fn step_axis(runs: &[Record]) -> Axis {
    Axis::from_zero("optimizer step", runs.iter().map(|run| f64::from(run.last_step())))
}

/// Where phases of another kind begin; `x` places the step before, the last one of the phase that
/// ends.
pub(super) fn switches(runs: &[Record], x: impl Fn(&Record, u32) -> f64) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        for &(step, kind) in &run.switches {
            let (x, label) = (x(run, step.saturating_sub(1)), format!("{kind} from step {step}"));
            match marks.iter_mut().find(|mark| mark.x == x) {
                Some(mark) => mark.series = None,
                None => {
                    let label = if marks.iter().any(|mark| mark.label == label) {
                        String::new()
                    } else {
                        label
                    };
                    marks.push(Mark { x, label, series: (runs.len() > 1).then_some(number) });
                }
            }
        }
    }
    // More labels than that would cover each other.
    marks.iter_mut().skip(MARKS).for_each(|mark| mark.label.clear());
    marks
}

/// Labelled marks of one picture.
const MARKS: usize = 3;

/// The losses of a run as they are drawn.
struct Losses<'a> {
    number: usize,
    run: &'a Record,
    /// Of training.
    thin: Vec<Bucket>,
    /// Step and loss on the held-out split.
    held_out: Vec<[f64; 2]>,
}

impl<'a> Losses<'a> {
    fn of(number: usize, run: &'a Record, fine: usize) -> Self {
        let points: Vec<_> =
            run.steps.iter().map(|step| [f64::from(step.step), f64::from(step.loss)]).collect();
        let held_out = buckets(&held_out(run), fine).iter().map(|b| [b.x[1], b.mean]).collect();
        Self { number, run, thin: buckets(&points, fine), held_out }
    }

    fn series(&self, has_band: bool, x: impl Fn(&Record, f64) -> f64) -> Series {
        let x = |step| x(self.run, step);
        let has_band = has_band && self.thin.len() < self.run.steps.len();
        let band =
            self.thin.iter().filter(|_| has_band).map(|b| [x(b.middle()), b.low, b.high]).collect();
        let faint = self.thin.iter().map(|b| [x(b.middle()), b.mean]).collect();
        let strong = self.held_out.iter().map(|&[step, loss]| [x(step), loss]).collect();
        Series { number: self.number, band, faint, strong, ..Series::default() }
    }

    fn tables(&self, unit: Unit) -> [Table; 2] {
        let time = |step: f64| cell(time_at(self.run, step, unit));
        let table = |what: &str, columns: &[&str], rows: Vec<Vec<String>>| Table {
            caption: format!("{}: {what}, nats a token", self.run.name),
            columns: ["step".into(), format!("time, {}", unit.0)]
                .into_iter()
                .chain(columns.iter().map(|&column| column.into()))
                .collect(),
            rows,
            series: Some(self.number),
        };
        let ends = |b: &Bucket| format!("{} to {}", cell(b.low), cell(b.high));
        let trained = self
            .thin
            .iter()
            .map(|b| vec![span(b), time(b.middle()), cell(b.mean), ends(b)])
            .collect();
        let held_out = self
            .held_out
            .iter()
            .map(|&[step, loss]| vec![step.to_string(), time(step), cell(loss)])
            .collect();
        [
            table("training loss", &["training loss", "least to largest"], trained),
            table("loss on the held-out split", &["held-out loss"], held_out),
        ]
    }
}

/// The time of all steps up to this one.
fn time_at(run: &Record, step: f64, (_, seconds): Unit) -> f64 {
    run.seconds_at(step as u32) / seconds
}

/// Loss against step and against time.
pub(super) fn loss(runs: &[Record]) -> Figure {
    // Losses of neighbouring batches scatter: a few of them together show more.
    let fine = finely(runs.len()) / 2;
    let (unit, has_band) = (unit(runs), runs.len() <= BANDS);
    let losses: Vec<_> =
        runs.iter().enumerate().map(|(number, run)| Losses::of(number, run, fine)).collect();
    let by_step: Vec<_> =
        losses.iter().map(|losses| losses.series(has_band, |_, step| step)).collect();
    let by_time = losses
        .iter()
        .map(|losses| losses.series(has_band, |run, step| time_at(run, step, unit)))
        .collect();
    let most = runs.iter().map(|run| run.steps.len().div_ceil(fine)).max().unwrap_or(1);

    let x = step_axis(runs);
    let label = "loss, nats a token";
    let (y, cut) = loss_axis(label, &by_step, x.high * HEAD);
    let mut notes: Vec<String> = thinned(most, has_band).into_iter().collect();
    notes.extend(
        cut.map(|top| {
            format!("The first steps reach up to {}, above the picture.", number(top, 3))
        }),
    );
    let marks = switches(runs, |_, step| f64::from(step));
    let picture = line_chart(
        runs,
        ["loss-step", "Loss against the optimizer step"],
        [x, y.clone()],
        by_step,
        marks,
    );
    let mut pictures = vec![("against the step".to_owned(), picture)];
    if runs.iter().any(|run| run.steps.last().is_some_and(|step| step.seconds > 0.0)) {
        let ends = runs.iter().map(|run| time_at(run, f64::from(run.last_step()), unit));
        let x = Axis::from_zero(format!("time in optimizer steps, {}", unit.0), ends);
        let marks = switches(runs, |run, step| time_at(run, f64::from(step), unit));
        pictures.push((
            "against time".to_owned(),
            line_chart(runs, ["loss-time", "Loss against time"], [x, y], by_time, marks),
        ));
    } else {
        notes.push(
            "Against time nothing can be drawn: the metrics or the configuration do not tell it."
                .into(),
        );
    }
    let lead = "Thin: training loss of a step's batches. Strong, with markers: loss over the whole held-out split, with the weights of the phase. \
                Time is that of the optimizer steps, tokens over tokens a second; evaluations, saving and pauses are not in it.";
    Figure {
        id: "loss",
        title: "Loss",
        lead: lead.into(),
        layout: Layout::Stacked,
        pictures,
        legend: all(runs),
        notes,
        tables: losses.iter().flat_map(|losses| losses.tables(unit)).collect(),
        numbers: Numbers::Folded,
    }
}

/// The bands of more runs would hide each other.
const BANDS: usize = 3;

/// The share of the steps at the beginning that need not fit into a picture.
const HEAD: f64 = 0.03;

/// Around all but the beginning; and the largest value that does not fit.
fn loss_axis(label: &str, series: &[Series], head: f64) -> (Axis, Option<f64>) {
    let values = |from: f64| {
        series.iter().flat_map(move |series| {
            let band = series
                .band
                .iter()
                .filter(move |point| point[0] >= from)
                .flat_map(|&[_, low, high]| [low, high]);
            let lines = series
                .faint
                .iter()
                .chain(&series.strong)
                .filter(move |point| point[0] >= from)
                .map(|point| point[1]);
            band.chain(lines)
        })
    };
    let (all, later) = (range(values(0.0)), range(values(head)));
    match (all, later) {
        (Some((_, top)), Some((low, high))) if top > high + 0.15 * (high - low) => {
            (Axis::around(label, [low, high]), Some(top))
        }
        _ => (Axis::around(label, values(0.0)), None),
    }
}

/// The held-out loss of the second half, where several runs come near each other.
pub(super) fn validation(runs: &[Record]) -> Option<Figure> {
    let x = step_axis(runs);
    let half = x.high / 2.0;
    let later = |run: &Record| -> Vec<[f64; 2]> {
        let points: Vec<_> = held_out(run).into_iter().filter(|&[step, _]| step >= half).collect();
        buckets(&points, finely(runs.len())).iter().map(|b| [b.x[1], b.mean]).collect()
    };
    let series: Vec<_> = runs
        .iter()
        .enumerate()
        .map(|(number, run)| Series { number, strong: later(run), ..Series::default() })
        .collect();
    if runs.len() < 2 || series.iter().filter(|series| series.strong.len() > 1).count() < 2 {
        return None;
    }
    let y = Axis::around(
        "held-out loss, nats a token",
        series.iter().flat_map(|series| &series.strong).map(|point| point[1]),
    );
    let tables = table_each(runs, &series, "held-out loss, nats a token", "held-out loss");
    let marks = switches(runs, |_, step| f64::from(step))
        .into_iter()
        .filter(|mark| mark.x >= half)
        .collect();
    let x = Axis { low: half, ..x };
    let title = "Loss on the held-out split over the second half of the steps";
    let picture = line_chart(runs, ["held-out-step", title], [x, y], series, marks);
    let lead = "The same held-out loss over the second half of the steps, on a scale of its own.";
    Some(Figure {
        legend: all(runs),
        ..Figure::of(["held-out", "Held-out loss, closer"], lead, picture, tables)
    })
}

/// Steps and losses on the held-out split.
fn held_out(run: &Record) -> Vec<[f64; 2]> {
    run.validation.iter().map(|&(step, loss)| [f64::from(step), loss]).collect()
}

/// The flip rate against the step.
pub(super) fn flips(runs: &[Record]) -> Option<Figure> {
    let fine = finely(runs.len());
    let points = |run: &Record| -> Vec<[f64; 2]> {
        run.flips.iter().map(|&(step, rate)| [f64::from(step), rate]).collect()
    };
    let thin = |run: &Record| -> Vec<[f64; 2]> {
        buckets(&points(run), fine).iter().map(|b| [b.middle(), b.mean]).collect()
    };
    let series: Vec<_> = runs
        .iter()
        .enumerate()
        .map(|(number, run)| Series { number, strong: thin(run), ..Series::default() })
        .collect();
    if series.iter().all(|series| series.strong.is_empty()) {
        return None;
    }
    let most = runs.iter().map(|run| run.flips.len().div_ceil(fine)).max().unwrap_or(1);
    let y = Axis::of_magnitudes(
        "flip rate",
        series.iter().flat_map(|series| &series.strong).map(|point| point[1]),
    );
    let tables = table_each(runs, &series, "flip rate", "flip rate");
    let marks = switches(runs, |_, step| f64::from(step));
    let picture = line_chart(
        runs,
        ["flips-step", "Flip rate against the optimizer step"],
        [step_axis(runs), y],
        series,
        marks,
    );
    let notes = if most > 1 {
        vec![format!("Each point is the mean of up to {most} samples.")]
    } else {
        Vec::new()
    };
    let lead = "The share of mask bits that change in one step, |m(wₜ) − m(wₜ₋₁)|₁ / D, of all sparsifiable weights; of a dense run, of the mask \
                that its weights would have. Sparse training wants it to rise and then to calm down; λ is the factor of masked decay.";
    Some(Figure {
        legend: all(runs),
        notes,
        ..Figure::of(["flips", "Flip rate"], lead, picture, tables)
    })
}

/// A number of a step.
type Of = fn(&Step) -> f32;

/// Gradient norm, learning rate and speed.
pub(super) fn optimizer(runs: &[Record]) -> Figure {
    let fine = finely(runs.len()) / 2;
    let kinds: [(&str, &str, Of); 3] = [
        ("gradient-norm", "gradient norm, before clipping", |step| step.grad_norm),
        ("learning-rate", "learning rate", |step| step.lr),
        ("speed", "tokens a second", |step| step.tokens_per_s),
    ];
    let thin: Vec<[Vec<_>; 3]> = runs
        .iter()
        .map(|run| {
            kinds.map(|(_, _, of)| {
                buckets(
                    &run.steps
                        .iter()
                        .map(|step| [f64::from(step.step), f64::from(of(step))])
                        .collect::<Vec<_>>(),
                    fine,
                )
            })
        })
        .collect();
    let picture = |kind: usize| {
        let (id, name, _) = kinds[kind];
        let series: Vec<_> = thin
            .iter()
            .enumerate()
            .map(|(number, thin)| Series {
                number,
                strong: thin[kind].iter().map(|b| [b.middle(), b.mean]).collect(),
                ..Series::default()
            })
            .collect();
        let values = series.iter().flat_map(|series| &series.strong).map(|point| point[1]);
        let y = if id == "gradient-norm" {
            Axis::of_magnitudes("", values)
        } else {
            Axis::around("", values.chain([0.0]))
        };
        let (x, title) = (step_axis(runs), format!("{name} against the optimizer step"));
        let description = describe(&series, runs);
        let marks = switches(runs, |_, step| f64::from(step))
            .into_iter()
            .map(|mark| Mark { label: String::new(), ..mark })
            .collect();
        let chart = Chart {
            id: id.into(),
            title,
            description,
            x,
            y,
            height: 150.0,
            series,
            marks,
            column: 0,
        };
        (name.to_owned(), chart.draw())
    };
    let tables = runs.iter().zip(&thin).enumerate().map(|(series, (run, thin))| {
        let rows = (0..thin[0].len()).map(|at| {
            let of = |kind: usize| cell(thin[kind][at].mean);
            vec![span(&thin[0][at]), of(0), of(1), of(2), cell(thin[0][at].high)]
        });
        Table {
            caption: format!("{}: means over the steps", run.name),
            columns: [
                "step",
                "gradient norm",
                "learning rate",
                "tokens a second",
                "largest gradient norm",
            ]
            .map(str::to_owned)
            .into(),
            rows: rows.collect(),
            series: Some(series),
        }
    });
    Figure {
        id: "optimizer",
        title: "Optimizer and speed",
        lead: "What the optimizer saw, and how fast the steps were.".into(),
        layout: Layout::Beside,
        pictures: (0..kinds.len()).map(picture).collect(),
        legend: all(runs),
        notes: thinned(
            runs.iter().map(|run| run.steps.len().div_ceil(fine)).max().unwrap_or(1),
            false,
        )
        .into_iter()
        .collect(),
        tables: tables.collect(),
        numbers: Numbers::Folded,
    }
}

/// A legend of all runs, where there are several.
pub(super) fn all(runs: &[Record]) -> Legend {
    if runs.len() > 1 { Legend::Series((0..runs.len()).collect()) } else { Legend::None }
}

/// A line chart of the usual height: its name and title, its axes.
pub(super) fn line_chart(
    runs: &[Record],
    [id, title]: [&str; 2],
    [x, y]: [Axis; 2],
    series: Vec<Series>,
    marks: Vec<Mark>,
) -> String {
    let (description, column) = (describe(&series, runs), usize::from(x.label.starts_with("time")));
    Chart {
        id: id.into(),
        title: title.into(),
        description,
        x,
        y,
        height: 300.0,
        series,
        marks,
        column,
    }
    .draw()
}

/// Where each curve begins and ends, in words.
fn describe(series: &[Series], runs: &[Record]) -> String {
    let told = series.iter().filter_map(|series| {
        let curve = if series.strong.is_empty() { &series.faint } else { &series.strong };
        let ([from, first], [to, last]) = (curve.first()?, curve.last()?);
        let name = &runs[series.number].name;
        Some(format!(
            "{name}: from {} at {} to {} at {}.",
            number(*first, 4),
            number(*from, 4),
            number(*last, 4),
            number(*to, 4)
        ))
    });
    told.collect::<Vec<_>>().join(" ")
}

/// A table for each series: step and value.
pub(super) fn table_each(
    runs: &[Record],
    series: &[Series],
    what: &str,
    column: &str,
) -> Vec<Table> {
    let some = series.iter().filter(|series| !series.strong.is_empty());
    some.map(|series| Table {
        caption: format!("{}: {what}", runs[series.number].name),
        columns: vec!["step".into(), column.into()],
        rows: series
            .strong
            .iter()
            .map(|&[step, value]| vec![step.to_string(), cell(value)])
            .collect(),
        series: Some(series.number),
    })
    .collect()
}
