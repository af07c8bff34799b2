//! What the masks did: flips by layer, flips against the gap of a tile, the norm kept, the noise of
//! the sampled gradients.

use super::{
    axis::{Axis, range},
    chart::{Chart, Series},
    curves::{all, line_chart, step_axis, switches, table_each},
    figure::{Figure, Layout, Legend, Numbers, buckets, cell, finely},
    frame::Mark,
    heat::{Heat, Shades},
    markup::{Table, counted, number},
    record::Record,
    thin::{Bucket, ranges},
};
use sparse24_run::run::Instruments;

/// Columns of a heat map, and of its table.
const COLUMNS: usize = 90;
const TABLE_COLUMNS: usize = 10;

/// The flip rate of each layer over the steps.
pub(super) fn heat(runs: &[Record]) -> Option<Figure> {
    let drawn: Vec<_> =
        runs.iter().enumerate().filter(|(_, run)| !run.layer_flips.is_empty()).collect();
    let columns = (4 * COLUMNS / drawn.len().max(1)).clamp(30, COLUMNS);
    let all_cells: Vec<_> = drawn.iter().map(|(_, run)| cells(run, columns)).collect();
    let positive = all_cells
        .iter()
        .flat_map(|(_, rows)| rows.iter().flatten().copied())
        .filter(|rate| *rate > 0.0);
    let (low, high) = range(positive)?;
    // A thousandth of the largest is as good as nothing.
    let shades = Shades { low: low.max(high / 1000.0).min(high / 2.0), high };
    let mut pictures = Vec::new();
    let mut tables = Vec::new();
    for ((number, run), (edges, rows)) in drawn.into_iter().zip(all_cells) {
        let names: Vec<String> =
            run.layers.iter().map(|name| name.trim_end_matches(".weight").to_owned()).collect();
        let mean = |row: &[f64]| Bucket::of(row.iter().map(|rate| (0.0, *rate))).mean;
        let busiest = rows
            .iter()
            .map(|row| mean(row))
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map_or("", |(at, _)| &names[at]);
        let description = format!(
            "{} over {}; on average {busiest} flips most.",
            counted(names.len() as u64, "layer"),
            counted(run.last_step().into(), "step")
        );
        let own = switches(std::slice::from_ref(run), |_, step| f64::from(step)).into_iter();
        // A label would hide cells.
        let marks = own.map(|mark| Mark { label: String::new(), ..mark }).collect();
        let (ends, table) = cells(run, TABLE_COLUMNS);
        let head = ends.windows(2).map(|edge| format!("to step {}", edge[1]));
        tables.push(Table {
            caption: format!("{}: mean flip rate of each layer", run.name),
            columns: std::iter::once("layer".to_owned()).chain(head).collect(),
            rows: names
                .iter()
                .zip(&table)
                .map(|(name, row)| {
                    std::iter::once(name.clone())
                        .chain(row.iter().map(|rate| cell(*rate)))
                        .collect()
                })
                .collect(),
            series: None,
        });
        let (id, title) =
            (format!("heat-{number}"), format!("Flip rate by layer and step: {}", run.name));
        let heat = Heat {
            id,
            title,
            description,
            x: step_axis(runs),
            rows: names,
            edges,
            cells: rows,
            shades,
            marks,
        };
        pictures.push((if runs.len() > 1 { run.name.clone() } else { String::new() }, heat.draw()));
    }
    Some(Figure {
        id: "layers",
        title: "Flip rate by layer",
        lead: "Each row is a sparsifiable weight, each shade a power of the flip rate; the same shades for all runs.".into(),
        layout: Layout::Stacked,
        pictures,
        legend: Legend::Own(shades.legend()),
        notes: vec!["A cell is the mean of its samples; a dashed line is where a phase of another kind begins.".into()],
        tables,
        numbers: Numbers::Folded,
    })
}

/// Edges in steps, and means by layer and column.
fn cells(run: &Record, columns: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
    let samples = &run.layer_flips;
    let parts: Vec<_> = ranges(samples.len(), columns).collect();
    let ends = parts.iter().map(|part| f64::from(samples[part.end - 1].0));
    let edges = std::iter::once(0.0).chain(ends).collect();
    let mean = |layer: usize, part: &std::ops::Range<usize>| {
        Bucket::of(samples[part.clone()].iter().map(|(_, rates)| (0.0, f64::from(rates[layer]))))
            .mean
    };
    (
        edges,
        (0..run.layers.len())
            .map(|layer| parts.iter().map(|part| mean(layer, part)).collect())
            .collect(),
    )
}

/// Cumulative flips of a tile against its gap, at the last sample of each run.
pub(super) fn scatter(runs: &[Record]) -> Option<Figure> {
    let last = |run: &Record| {
        run.instruments
            .last()
            .filter(|(_, instruments)| !instruments.tiles.is_empty())
            .map(|(step, last)| (*step, last.tiles.clone()))
    };
    let drawn: Vec<_> = runs
        .iter()
        .enumerate()
        .filter_map(|(number, run)| Some((number, run, last(run)?)))
        .collect();
    let tiles = || drawn.iter().flat_map(|(.., (_, tiles))| tiles);
    let (low, high) = range(tiles().map(|tile| f64::from(tile.0)).filter(|gap| *gap > 0.0))?;
    // What is nearer to a tie than that stands at the left edge.
    let x = Axis::log("L1-norm gap of the tile", low.max(high / 1e5), high);
    let y =
        Axis::around("flips since the start", tiles().map(|tile| f64::from(tile.1)).chain([0.0]));
    let (mut pictures, mut tables) = (Vec::new(), Vec::new());
    for (number, run, (step, mut tiles)) in drawn {
        tiles.sort_by(|a, b| a.0.total_cmp(&b.0));
        let parts: Vec<_> = ranges(tiles.len(), 10).collect();
        let mean = |part: &std::ops::Range<usize>| {
            Bucket::of(
                tiles[part.clone()].iter().map(|&(gap, flips)| (f64::from(gap), f64::from(flips))),
            )
        };
        let line: Vec<_> = parts
            .iter()
            .map(|part| [f64::from(tiles[part.start + part.len() / 2].0), mean(part).mean])
            .collect();
        let rows = parts.iter().map(|part| {
            let bucket = mean(part);
            vec![
                format!("{} to {}", cell(bucket.x[0]), cell(bucket.x[1])),
                part.len().to_string(),
                cell(bucket.mean),
                cell(bucket.high),
            ]
        });
        tables.push(Table {
            caption: format!("{}: tiles by their gap, at step {step}", run.name),
            columns: ["gap", "tiles", "mean flips", "most flips"].map(str::to_owned).into(),
            rows: rows.collect(),
            series: None,
        });
        let most = |part: usize| number_of(line.get(part).map_or(f64::NAN, |point| point[1]));
        let description = format!(
            "{} of all tiles. Mean flips of the tenth of least gap: {}; of the largest: {}.",
            counted(tiles.len() as u64, "sample"),
            most(0),
            most(line.len().saturating_sub(1))
        );
        let dots = tiles.iter().map(|&(gap, flips)| [f64::from(gap), f64::from(flips)]).collect();
        let chart = Chart {
            id: format!("scatter-{number}"),
            title: format!("Flips against gap: {}", run.name),
            description,
            x: x.clone(),
            y: y.clone(),
            height: 220.0,
            series: vec![Series { number, dots, strong: line, ..Series::default() }],
            marks: Vec::new(),
            column: 0,
        };
        pictures
            .push((if runs.len() > 1 { run.name.clone() } else { String::new() }, chart.draw()));
    }
    Some(Figure {
        id: "tiles",
        title: "Flips of a tile against its gap",
        lead: "A dot is a 4×4 tile, one of an even sample: how far its best mask is ahead of its second best in kept L1 norm, and how many mask bits have \
               flipped in it over the sampled steps. Where masked decay works, few tiles flip often, and those that do have a small gap.".into(),
        layout: Layout::Beside,
        pictures,
        legend: all(runs),
        notes: vec!["The line joins the means of tenths of the tiles, by their gap. All pictures have the same axes.".into()],
        tables,
        numbers: Numbers::Folded,
    })
}

/// The share of the norm that the masks keep, and the noise of the sampled gradients.
pub(super) fn instruments(runs: &[Record]) -> Vec<Figure> {
    let kept = measured(
        runs,
        ["kept", "Norm kept by the transposable mask", "kept L1 norm / L1 norm"],
        "The share of the weights' L1 norm that the transposable masks searched in them keep, whatever mask the method multiplies under: 1 would be a model that pruning does not touch. Half of the weights of a Gaussian, chosen freely, hold about four fifths of it.",
        |instruments| Some(instruments.kept),
    );
    let variance = measured(
        runs,
        ["variance", "Noise of the sampled gradients", "E|MVUE(dZ) − dZ|² / |dZ|²"],
        "What the unbiased 2:4 estimate of the output gradients adds, as a share of their squared norm, over all sparsified layers of the step's first micro-batch. Dense phases sample nothing.",
        |instruments| instruments.mvue_variance,
    );
    [kept, gaps(runs), variance].into_iter().flatten().collect()
}

/// A number of the instruments against the step.
fn measured(
    runs: &[Record],
    [id, title, label]: [&'static str; 3],
    lead: &str,
    of: fn(&Instruments) -> Option<f64>,
) -> Option<Figure> {
    let fine = finely(runs.len());
    let points = |run: &Record| -> Vec<[f64; 2]> {
        run.instruments
            .iter()
            .filter_map(|(step, instruments)| Some([f64::from(*step), of(instruments)?]))
            .collect()
    };
    let series: Vec<_> = runs
        .iter()
        .enumerate()
        .map(|(number, run)| Series {
            number,
            strong: buckets(&points(run), fine).iter().map(|b| [b.middle(), b.mean]).collect(),
            ..Series::default()
        })
        .filter(|series| !series.strong.is_empty())
        .collect();
    if series.is_empty() {
        return None;
    }
    let y =
        Axis::around(label, series.iter().flat_map(|series| &series.strong).map(|point| point[1]));
    let tables = table_each(runs, &series, label, label);
    let legend = if runs.len() > 1 {
        Legend::Series(series.iter().map(|series| series.number).collect())
    } else {
        Legend::None
    };
    let picture = line_chart(
        runs,
        [&format!("{id}-step"), title],
        [step_axis(runs), y],
        series,
        switches(runs, |_, step| f64::from(step)),
    );
    Some(Figure { legend, ..Figure::of([id, title], lead, picture, tables) })
}

/// The distribution of the gaps against the step.
fn gaps(runs: &[Record]) -> Option<Figure> {
    let fine = finely(runs.len());
    let mut tables = Vec::new();
    let mut series = Vec::new();
    for (number, run) in runs.iter().enumerate().filter(|(_, run)| !run.instruments.is_empty()) {
        let of = |quantile: usize| -> Vec<Bucket> {
            let points: Vec<_> = run
                .instruments
                .iter()
                .map(|(step, instruments)| [f64::from(*step), f64::from(instruments.gap[quantile])])
                .collect();
            buckets(&points, fine)
        };
        let quantiles: Vec<Vec<Bucket>> = (0..5).map(of).collect();
        let rows = (0..quantiles[0].len()).map(|at| {
            std::iter::once(quantiles[0][at].middle().to_string())
                .chain(quantiles.iter().map(|of| cell(of[at].mean)))
                .collect()
        });
        tables.push(Table {
            caption: format!("{}: quantiles of the gap over all tiles", run.name),
            columns: ["step", "10 %", "25 %", "50 %", "75 %", "90 %"].map(str::to_owned).into(),
            rows: rows.collect(),
            series: Some(number),
        });
        let curve = |quantile: usize| quantiles[quantile].iter().map(|b| [b.middle(), b.mean]);
        let (mut band, mut faint) = (Vec::new(), Vec::new());
        if runs.len() == 1 {
            band = curve(1).zip(curve(3)).map(|([x, low], [_, high])| [x, low, high]).collect();
        } else {
            // Bands would hide each other.
            faint = curve(1).chain([[f64::NAN; 2]]).chain(curve(3)).collect();
        }
        let strong = curve(2).collect();
        series.push(Series { number, band, faint, strong, ..Series::default() });
    }
    if series.is_empty() {
        return None;
    }
    let top = runs
        .iter()
        .flat_map(|run| &run.instruments)
        .map(|(_, instruments)| f64::from(instruments.gap[3]));
    let y = Axis::around("L1-norm gap of a tile", top.chain([0.0]));
    let picture = line_chart(
        runs,
        ["gaps-step", "L1-norm gap of the tiles"],
        [step_axis(runs), y],
        series,
        switches(runs, |_, step| f64::from(step)),
    );
    Some(Figure {
        legend: all(runs),
        ..Figure::of(
            ["gaps", "Gap between the best mask and the next"],
            "The kept L1 norm of a tile's best mask minus that of its second best: the median over all tiles, and thin (or shaded) the quarters of them. A mask with a small gap flips easily.",
            picture,
            tables,
        )
    })
}

fn number_of(value: f64) -> String {
    number(value, 3)
}
