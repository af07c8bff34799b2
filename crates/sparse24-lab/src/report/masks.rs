//! Figures of the masks: flips by layer, and flips against the gap of a tile.

use std::ops::Range;

use super::{
    axis::{Axis, range},
    bucket::{Bucket, ranges},
    curves::{plain_switches, step_axis},
    figure::{Entry, Figure, Layout, legend},
    plot::{Curve, Plot, Shades, Style},
    record::Record,
    text::{Table, cell, number},
};
use crate::count::counted;

/// Columns of a heat map, and of its table.
const COLUMNS: usize = 90;
const TABLE_COLUMNS: usize = 10;

/// The name of a run above its plot, if there are several.
fn head(runs: &[Record], run: &Record) -> String {
    if runs.len() > 1 { run.name.clone() } else { String::new() }
}

pub(super) fn heat(runs: &[Record]) -> Option<Figure> {
    let drawn: Vec<_> =
        runs.iter().enumerate().filter(|(_, run)| !run.layer_flips.is_empty()).collect();
    let columns = (4 * COLUMNS / drawn.len().max(1)).clamp(30, COLUMNS);
    let maps: Vec<_> = drawn.iter().map(|(_, run)| cells(run, columns)).collect();
    let rates = maps.iter().flat_map(|(_, rows)| rows.iter().flatten().copied());
    let (low, high) = range(rates.filter(|rate| *rate > 0.0))?;
    // Rates below a thousandth of the largest get one shade.
    let shades = Shades { low: low.max(high / 1000.0).min(high / 2.0), high };
    let (mut plots, mut tables) = (Vec::new(), Vec::new());
    for ((number, run), (edges, rows)) in drawn.into_iter().zip(maps) {
        let names: Vec<String> =
            run.layers.iter().map(|name| name.trim_end_matches(".weight").to_owned()).collect();
        let mean = |row: &Vec<f64>| Bucket::of(row.iter().map(|rate| [0.0, *rate])).mean;
        let busiest = names.iter().zip(rows.iter().map(mean)).max_by(|a, b| a.1.total_cmp(&b.1));
        let (ends, table) = cells(run, TABLE_COLUMNS);
        let columns: Vec<_> = ["layer".to_owned()]
            .into_iter()
            .chain(ends[1..].iter().map(|end| format!("to step {end}")))
            .collect();
        let rates = names.iter().zip(&table).map(|(name, row)| {
            [name.clone()].into_iter().chain(row.iter().map(|rate| cell(*rate))).collect()
        });
        let caption = format!("{}: mean flip rate of each layer", run.name);
        tables.push(Table { columns, ..Table::new(caption, &[], rates) }.of_run(number));
        let plot = Plot {
            id: format!("heat-{number}"),
            title: format!("Flip rate by layer and step: {}", run.name),
            description: format!(
                "{}, {}; the mean flip rate is largest in {}.",
                counted(names.len(), "layer"),
                counted(run.last_step() as usize, "step"),
                busiest.map_or("none", |(name, _)| name)
            ),
            x: step_axis(runs),
            marks: plain_switches(std::slice::from_ref(run)),
            run: Some(number),
            ..Plot::default()
        };
        plots.push((head(runs, run), plot.with_heat(&names, &edges, &rows, shades)));
    }
    let entry = |(swatch, name)| Entry { swatch, name, ..Entry::default() };
    Some(Figure {
        id: "layers",
        title: "Flip rate by layer",
        lead:
            "Each row is a sparsifiable weight; shades follow the logarithm of the flip rate and \
               are the same for all runs."
                .into(),
        plots,
        legend: shades.legend().map(entry).collect(),
        notes: vec![
            "A cell is the mean of its samples. A dashed line marks a change of phase.".into(),
        ],
        tables,
        ..Figure::default()
    })
}

/// Edges of the columns in steps, and the mean of each layer and column.
fn cells(run: &Record, columns: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
    let samples = &run.layer_flips;
    let parts = ranges(samples.len(), columns);
    let ends = parts.clone().map(|part| samples[part.end - 1].0.into());
    let mean = |layer: usize, part: Range<usize>| {
        Bucket::of(samples[part].iter().map(|(_, rates)| [0.0, rates[layer].into()])).mean
    };
    let row = |layer: usize| parts.clone().map(|part| mean(layer, part)).collect();
    ([0.0].into_iter().chain(ends).collect(), (0..run.layers.len()).map(row).collect())
}

/// Cumulative flips of tiles against their gaps, at the last sample of each run.
pub(super) fn scatter(runs: &[Record]) -> Option<Figure> {
    type Sample = (u32, Vec<[f64; 2]>);
    let sample = |run: &Record| -> Option<Sample> {
        let (step, tiles) = &run.tiles;
        let mut tiles: Vec<_> =
            tiles.iter().map(|&(gap, flips)| [gap.into(), flips.into()]).collect();
        tiles.sort_by(|a: &[f64; 2], b| a[0].total_cmp(&b[0]));
        (!tiles.is_empty()).then_some((*step, tiles))
    };
    let drawn: Vec<_> =
        runs.iter().enumerate().filter_map(|(at, run)| Some((at, run, sample(run)?))).collect();
    let values =
        |of: usize| drawn.iter().flat_map(move |(.., (_, t))| t.iter().map(move |t| t[of]));
    let (low, high) = range(values(0).filter(|gap| *gap > 0.0))?;
    // Smaller gaps are drawn at the left edge.
    let x = Axis::log("L1-norm gap of the tile", low.max(high / 1e5), high);
    let y = Axis::around("flips since the start", values(1).chain([0.0]));
    let (mut plots, mut tables, mut shown) = (Vec::new(), Vec::new(), Vec::new());
    for (at, run, (step, tiles)) in &drawn {
        let tenths: Vec<_> = ranges(tiles.len(), 10)
            .map(|part| (part.clone(), Bucket::of(tiles[part].iter().copied())))
            .collect();
        let rows = tenths.iter().map(|(part, bucket)| {
            let gap = format!("{} to {}", cell(bucket.x[0]), cell(bucket.x[1]));
            vec![gap, part.len().to_string(), cell(bucket.mean), cell(bucket.high)]
        });
        let caption = format!("{}: tiles by their gap, at step {step}", run.name);
        tables.push(
            Table::new(caption, &["gap", "tiles", "mean flips", "most flips"], rows).of_run(*at),
        );
        let mean = |bucket: Option<&(_, Bucket)>| bucket.map_or(f64::NAN, |(_, b)| b.mean);
        let plot = Plot {
            id: format!("scatter-{at}"),
            title: format!("Flips against gap: {}", run.name),
            description: format!(
                "{} of all tiles. Mean flips of the tenth with the smallest gaps: {}; with the \
                 largest: {}.",
                counted(tiles.len(), "sample"),
                number(mean(tenths.first()), 3),
                number(mean(tenths.last()), 3)
            ),
            x: x.clone(),
            run: Some(*at),
            height: 220.0,
            ..Plot::default()
        };
        let middle = |part: &Range<usize>| tiles[part.start + part.len() / 2][0];
        let dots = Curve { style: Style::Dots, ..Curve::new(*at, tiles.iter().copied()) };
        let means = tenths.iter().map(|(part, bucket)| [middle(part), bucket.mean]);
        let curves = [dots, Curve::new(*at, means)];
        plots.push((head(runs, run), plot.with_curves(y.clone(), &curves)));
        shown.extend(curves);
    }
    Some(Figure {
        id: "tiles",
        title: "Flips of a tile against its gap",
        lead: "A dot is a 4×4 tile from an even sample: the L1 norm that its best mask keeps \
               beyond its second best, and the mask bits that have flipped in it over the sampled \
               steps. Where masked decay works, few tiles flip often, and those have a small gap."
            .into(),
        layout: Layout::Beside,
        plots,
        legend: legend(runs, &shown),
        notes: vec![
            "The line joins the means of tenths of the tiles, by gap. All plots share their axes."
                .into(),
        ],
        tables,
        ..Figure::default()
    })
}
