//! Operations on rows: sum, norm, embedding, cross-entropy.

use std::collections::HashSet;

use half::bf16;
use ndarray::{Array1, Array2, ArrayView1, s};
use sparse24_core::op::{Accumulate, StepState};
use sparse24_cpu as cpu;

use super::{
    Bench, Case, OVERWRITE, Prepared, Size, TOKENS,
    check::{BF16, CLOSE, Stop, near, near_in_norm, near_rows, same, same_rows},
    input::{PANEL, panel, random, repeated, upload, widened},
};
use crate::{
    Device, Error, Matrix, add,
    embedding::{Embed, EmbedScratch, embed_backward, embed_forward},
    loss::{HeadLoss, head_loss, loss_forward, loss_sum},
    norm::{
        MAX_WIDTH, NormBackward, NormForward, norm_backward, norm_backward_scratch, norm_forward,
    },
};

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let stream @ [_, width] = size.stream();
    let mut cases = vec![Case::new("add", &["add"], stream, add)];
    if width <= MAX_WIDTH {
        cases.extend([
            Case::new("norm_forward", &["norm_forward_"], stream, norm),
            Case::new(
                "norm_backward",
                &["norm_backward_", "norm_parameters"],
                stream,
                norm_gradients,
            ),
        ]);
    }
    if size.width().is_none() {
        return cases;
    }
    let backward = &["embed_sort", "embed_order", "embed_runs", "embed_join", "embed_positions"];
    cases.extend([
        Case::new("embed_forward", &["embed_forward"], stream, embed),
        Case::new("embed_backward", backward, stream, embed_gradients),
    ]);
    for [rows, columns, vocabulary] in
        [[2048, 50304, 50257], [TOKENS, 128, 65], [1024, 128_256, 128_256]]
    {
        cases.extend([
            Case::new("head_loss", &["head_loss"], [rows, columns], move |bench, shape| {
                loss(bench, shape, vocabulary, Gradient::InPlace)
            }),
            Case::new("loss_forward", &["loss_forward"], [rows, columns], move |bench, shape| {
                loss(bench, shape, vocabulary, Gradient::None)
            }),
        ]);
    }
    cases.push(Case::new("loss_sum", &["loss_sum"], [TOKENS], sum));
    cases
}

/// x + delta in f32, rounded once.
fn added(x: &Array2<bf16>, delta: &Array2<bf16>) -> Array2<bf16> {
    (widened(x) + widened(delta)).mapv(bf16::from_f32)
}

fn add(bench: &mut Bench, shape @ [p, c]: [usize; 2]) -> Result<Prepared, Stop> {
    let ([x, delta], bytes) = ([1, 2].map(|seed| panel(c, seed)), 3 * 2 * p * c);
    let sets = bench.sets(bytes, |device| {
        let (x, delta) = (repeated(device, shape, &x)?, repeated(device, shape, &delta)?);
        Ok((x, delta, device.alloc("out", shape)?))
    })?;
    bench.kernel(
        "every element, bit for bit",
        bytes,
        sets,
        |device, &(x, delta, out)| add::add(device, x, delta, out),
        |device, &(_, _, out)| {
            let expected = added(&x, &delta);
            same_rows(device, "out", out, expected.as_slice().expect("row-major"))
        },
    )
}

/// The CPU's y and statistics.
fn normed(
    x: &Array2<f32>,
    gamma: ArrayView1<'_, f32>,
    beta: Option<ArrayView1<'_, f32>>,
) -> [Array2<f32>; 2] {
    let [mut residual, mut y] = [0; 2].map(|_| Array2::zeros(x.dim()));
    let mut stats = Array2::zeros((PANEL, 2));
    let outputs = (residual.view_mut(), y.view_mut(), stats.view_mut());
    cpu::norm::norm_forward(x.view(), None, gamma, beta, outputs.0, outputs.1, outputs.2)
        .expect("fits");
    [y, stats]
}

fn norm(bench: &mut Bench, shape @ [p, c]: [usize; 2]) -> Result<Prepared, Stop> {
    let [x, delta] = [1, 2].map(|seed| panel(c, seed));
    let [gamma, beta] = [3, 4].map(|seed| random([1, c], seed));
    let bytes = 4 * 2 * p * c + 8 * p;
    let sets = bench.sets(bytes, |device| {
        Ok(NormForward {
            x: repeated(device, shape, &x)?,
            delta: Some(repeated(device, shape, &delta)?),
            gamma: upload(device, gamma.view())?,
            beta: Some(upload(device, beta.view())?),
            residual: device.alloc("residual", shape)?,
            y: device.alloc("y", shape)?,
            stats: device.alloc("stats", [p, 2])?,
        })
    })?;
    bench.kernel(CLOSE, bytes, sets, norm_forward, |device, op| {
        let residual = added(&x, &delta);
        let expected = residual.as_slice().expect("row-major");
        same_rows(device, "the residual", op.residual, expected)?;
        let [y, _] = normed(&widened(&residual), gamma.row(0), Some(beta.row(0)));
        near_rows(device, "y", op.y, &y, [BF16, 1e-4])
    })
}

fn norm_gradients(bench: &mut Bench, shape @ [p, c]: [usize; 2]) -> Result<Prepared, Stop> {
    let ([dy, residual, from_above], gamma) =
        ([1, 2, 5].map(|seed| panel(c, seed)), random([1, c], 3));
    let wide = widened(&residual);
    let [_, stats] = normed(&wide, gamma.row(0), None);
    let bytes = 4 * 2 * p * c + 8 * p;
    let sets = bench.sets(bytes, |device| {
        let scratch = norm_backward_scratch(device, c);
        Ok(NormBackward {
            dy: repeated(device, shape, &dy)?,
            residual: repeated(device, shape, &residual)?,
            stats: repeated(device, [p, 2], &stats)?,
            gamma: upload(device, gamma.view())?,
            dx: repeated(device, shape, &from_above)?,
            accumulate_dx: Accumulate::Add,
            dgamma: device.alloc("dgamma", [1, c])?,
            dbeta: Some(device.alloc("dbeta", [1, c])?),
            accumulate: OVERWRITE,
            scratch: device.alloc("scratch", scratch)?,
        })
    })?;
    let verified = "every element, within 5/1024 of the CPU's in f32; column sums in norm";
    bench.kernel(verified, bytes, sets, norm_backward, |device, op| {
        let (dy, mut dresidual) = (widened(&dy), widened(&from_above));
        let mut of_panel = Array1::zeros(c);
        cpu::norm::norm_backward(
            dy.view(),
            wide.view(),
            stats.view(),
            gamma.row(0),
            dresidual.view_mut(),
            Accumulate::Add,
            of_panel.view_mut(),
            None,
            OVERWRITE,
        )
        .expect("fits");
        near_rows(device, "dresidual", op.dx, &dresidual, [BF16, 1e-4])?;
        // Sums over all repetitions of the panel's rows.
        let [mut dgamma, mut dbeta] = [0; 2].map(|_| Array2::<f64>::zeros((1, c)));
        for ((row, column), &dy) in dy.indexed_iter().filter(|((row, _), _)| *row < p) {
            let dy = (p - row).div_ceil(PANEL) as f64 * f64::from(dy);
            let n = (wide[[row, column]] - stats[[row, 0]]) * stats[[row, 1]];
            dgamma[[0, column]] += dy * f64::from(n);
            dbeta[[0, column]] += dy;
        }
        let of_beta = op.dbeta.expect("asked for");
        for (what, found, expected) in [("dgamma", op.dgamma, dgamma), ("dbeta", of_beta, dbeta)] {
            let expected = expected.mapv(|sum| sum as f32);
            near_in_norm(what, &downloaded(device, found)?, &expected, 1e-4)?;
        }
        Ok(())
    })
}

fn downloaded(device: &mut Device, from: Matrix<f32>) -> Result<Array2<f32>, Error> {
    Ok(Array2::from_shape_vec(from.shape(), device.download(from)?).expect("as many"))
}

/// Sequence length.
const CONTEXT: usize = 1024;
const VOCABULARY: usize = 50257;

/// Token ids like text, of which small ones are frequent, on the host and on the device, and the
/// bytes of the rows of the tables that they touch.
fn text(device: &mut Device, width: usize) -> Result<(Vec<u32>, Matrix<u32>, usize), Error> {
    let share = |i: usize| (i * 7919 % TOKENS) as f64 / TOKENS as f64;
    let token = |i: usize| (VOCABULARY as f64).powf(share(i)) as u32 - 1;
    let text: Vec<u32> = (0..TOKENS).map(token).collect();
    let tokens = device.alloc("tokens", [TOKENS, 1])?;
    device.upload(tokens, &text)?;
    let distinct = text.iter().collect::<HashSet<_>>().len();
    Ok((text, tokens, 4 * width * (distinct + CONTEXT)))
}

fn embed(bench: &mut Bench, shape @ [_, width]: [usize; 2]) -> Result<Prepared, Stop> {
    let device = &mut bench.device;
    let (text, tokens, of_tables) = text(device, width)?;
    let tables = [1, 2].map(|seed| random([PANEL, width], seed));
    let token_table = repeated(device, [VOCABULARY, width], &tables[0])?;
    let position_table = Some(repeated(device, [CONTEXT, width], &tables[1])?);
    let sets = bench.sets(2 * TOKENS * width, |device| {
        let rows = device.alloc("rows", shape)?;
        Ok(Embed { tokens, context: CONTEXT, token_table, position_table, rows })
    })?;
    let (verified, bytes) = ("every element, bit for bit", 2 * TOKENS * width + of_tables);
    bench.kernel(verified, bytes, sets, embed_forward, |device, op| {
        let element = |(row, column): (usize, usize)| {
            let [token, position] = [text[row] as usize, row % CONTEXT].map(|at| at % PANEL);
            bf16::from_f32(tables[0][[token, column]] + tables[1][[position, column]])
        };
        let expected = Array2::from_shape_fn(shape, element);
        same("rows", &device.download(op.rows)?, expected.as_slice().expect("row-major"))
    })
}

fn embed_gradients(bench: &mut Bench, shape @ [_, width]: [usize; 2]) -> Result<Prepared, Stop> {
    let device = &mut bench.device;
    let (text, tokens, of_tables) = text(device, width)?;
    let token_table = device.alloc("gradient of tokens", [VOCABULARY, width])?;
    let positions = device.alloc("gradient of positions", [CONTEXT, width])?;
    let scratch = EmbedScratch {
        order: device.alloc("order", EmbedScratch::order_shape(shape))?,
        pieces: device.alloc("pieces", EmbedScratch::pieces_shape(shape))?,
    };
    let gradient = panel(width, 3);
    let sets = bench.sets(2 * TOKENS * width, |device| {
        let (rows, position_table) = (repeated(device, shape, &gradient)?, Some(positions));
        Ok(Embed { tokens, context: CONTEXT, token_table, position_table, rows })
    })?;
    let launch = move |device: &mut Device, op: &Embed| embed_backward(device, op, &scratch);
    let check = |device: &mut Device, _: &Embed| {
        let wide = widened(&gradient);
        let mut check = |what, found: Matrix<f32>, is_of: &dyn Fn(usize) -> bool| {
            let mut sum = Array1::<f64>::zeros(width);
            for row in (0..TOKENS).filter(|&row| is_of(row)) {
                sum.zip_mut_with(&wide.row(row % PANEL), |sum, &x| *sum += f64::from(x));
            }
            let expected = sum.into_iter().map(|sum| sum as f32);
            near(what, device.download(found)?, expected, [1e-4, 1e-3])
        };
        // Frequent tokens, rare ones, and one that does not occur.
        for token in [0, 1, 2, 17, 255, 4096, 50_000, VOCABULARY - 1] {
            let found = token_table.rows(token..token + 1);
            check("the gradient of a token", found, &|row| text[row] as usize == token)?;
        }
        for position in [0, 1, 511, CONTEXT - 1] {
            let found = positions.rows(position..position + 1);
            check("the gradient of a position", found, &|row| row % CONTEXT == position)?;
        }
        Ok(())
    };
    let verified = "the rows of eight tokens and four positions, against sums in f64";
    bench.kernel(verified, 2 * TOKENS * width + 2 * of_tables, sets, launch, check)
}

/// Whether the gradient overwrites the logits.
#[derive(Clone, Copy, PartialEq)]
enum Gradient {
    InPlace,
    None,
}

fn loss(
    bench: &mut Bench,
    shape @ [rows, columns]: [usize; 2],
    vocabulary: usize,
    gradient: Gradient,
) -> Result<Prepared, Stop> {
    const SCALE: f32 = 1.0;
    let logits = panel(columns, 1);
    let device = &mut bench.device;
    device.set_step(&StepState { loss_scale: SCALE, ..StepState::default() })?;
    let of_panel = Array2::from_shape_fn((PANEL, 1), |(row, _)| (row * 7919 % vocabulary) as u32);
    let targets = repeated(device, [rows, 1], &of_panel)?;
    let losses = device.alloc("losses", [rows, 1])?;
    let (passes, verified) = match gradient {
        Gradient::InPlace => {
            (2, "every loss against f64, every gradient within 5/1024 of the CPU's")
        }
        Gradient::None => (1, "every loss against f64"),
    };
    let bytes = 2 * rows * columns * passes;
    let sets = bench.sets(bytes, |device| {
        let logits = repeated(device, shape, &logits)?;
        Ok(HeadLoss { logits, targets, vocabulary, smoothing: 0.0, losses })
    })?;
    let launch = move |device: &mut Device, op: &HeadLoss| match gradient {
        // Later launches read gradients instead of logits; the work is the same.
        Gradient::InPlace => head_loss(device, op),
        Gradient::None => loss_forward(device, op),
    };
    let check = |device: &mut Device, op: &HeadLoss| {
        let mut wide = widened(&logits);
        let mut wide = wide.slice_mut(s![.., ..vocabulary]);
        let expected = Array2::from_shape_fn((PANEL, 1), |(row, _)| {
            let sum = wide.row(row).iter().map(|&x| f64::from(x).exp()).sum::<f64>();
            (sum.ln() - f64::from(wide[[row, of_panel[[row, 0]] as usize]])) as f32
        });
        near_rows(device, "the losses", losses, &expected, [1e-5, 1e-5])?;
        if gradient == Gradient::None {
            return Ok(());
        }
        let mut expected = Array2::zeros((PANEL, columns));
        let targets = of_panel.as_slice().expect("a column");
        cpu::loss::head_loss(wide.view_mut(), targets, None, 0.0, SCALE)
            .expect("targets are of the vocabulary");
        expected.slice_mut(s![.., ..vocabulary]).assign(&wide);
        near_rows(device, "dlogits", op.logits, &expected, [BF16, 1e-9])
    };
    bench.kernel(verified, bytes, sets, launch, check)
}

fn sum(bench: &mut Bench, [rows]: [usize; 1]) -> Result<Prepared, Stop> {
    let (values, bytes) = (random([rows, 1], 1), 4 * rows);
    let sum = bench.device.alloc("loss", [1, 1])?;
    let sets = bench.sets(bytes, |device| upload(device, values.view()))?;
    let launch = move |device: &mut Device, &losses: &Matrix<f32>| {
        loss_sum(device, losses, sum, OVERWRITE, None)
    };
    bench.kernel("the sum, against f64", bytes, sets, launch, |device, _| {
        let exact = values.iter().map(|&x| f64::from(x)).sum::<f64>();
        let absolute = values.iter().map(|&x| f64::from(x.abs())).sum::<f64>();
        let bound = [0.0, absolute * 2_f64.powi(-20)];
        near("the sum", device.download(sum)?, [exact as f32], bound)
    })
}
