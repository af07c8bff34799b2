//! What works on rows: norm, embedding, cross-entropy.

use half::bf16;
use ndarray::{Array1, Array2, s};
use sparse24_cpu as cpu;

use super::{
    BETA, Bench, Case, Prepared, Size, TOKENS,
    check::{BF16, Stop, near, near_in_norm, repeating, same},
    input::{PANEL, panel, random, repeated, upload, widened},
};
use crate::{
    Device, Error, Matrix,
    embedding::{Embed, EmbedScratch, embed_backward, embed_forward},
    loss::{HeadLoss, head_loss, loss_forward, loss_sum},
    norm::{
        MAX_WIDTH, NormBackward, NormForward, norm_backward, norm_backward_scratch, norm_forward,
    },
};

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let case = |kernel, entries, shape: String, prepare: Box<super::Prepare>| Case {
        kernel,
        shape,
        entries,
        prepare,
    };
    let shape @ [p, c] = size.stream();
    let (named, mut cases) = (|| format!("{p}x{c}"), Vec::new());
    if c <= MAX_WIDTH {
        cases.push(case(
            "norm_forward",
            &["norm_forward_"],
            named(),
            Box::new(move |bench| norms(bench, shape)),
        ));
        cases.push(case(
            "norm_backward",
            &["norm_backward_", "norm_parameters"],
            named(),
            Box::new(move |bench| norm_gradients(bench, shape)),
        ));
    }
    if size.width().is_some() {
        cases.push(case(
            "embed_forward",
            &["embed_forward"],
            named(),
            Box::new(move |bench| embeddings(bench, c)),
        ));
        let backward =
            &["embed_sort", "embed_order", "embed_runs", "embed_join", "embed_positions"];
        cases.push(case(
            "embed_backward",
            backward,
            named(),
            Box::new(move |bench| embedding_gradients(bench, c)),
        ));
        for of @ [rows, columns, _] in
            [[2048, 50304, 50257], [TOKENS, 128, 65], [1024, 128_256, 128_256]]
        {
            let named = || format!("{rows}x{columns}");
            cases.push(case(
                "head_loss",
                &["head_loss"],
                named(),
                Box::new(move |bench| losses(bench, of, Gradient::InPlace)),
            ));
            cases.push(case(
                "loss_forward",
                &["loss_forward"],
                named(),
                Box::new(move |bench| losses(bench, of, Gradient::None)),
            ));
        }
        cases.push(case("loss_sum", &["loss_sum"], TOKENS.to_string(), Box::new(loss_sums)));
    }
    cases
}

fn norms(bench: &mut Bench, shape @ [p, c]: [usize; 2]) -> Result<Prepared, Stop> {
    let ([x, delta], [gamma, beta]) =
        ([1, 2].map(|seed| panel(c, seed)), [3, 4].map(|seed| random([1, c], seed)));
    let bytes = 4 * 2 * p * c + 8 * p;
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let device = &mut bench.device;
        sets.push(NormForward {
            x: repeated(device, shape, &x)?,
            delta: Some(repeated(device, shape, &delta)?),
            gamma: upload(device, gamma.view())?,
            beta: Some(upload(device, beta.view())?),
            residual: device.alloc("residual", shape)?,
            y: device.alloc("y", shape)?,
            stats: device.alloc("stats", [p, 2])?,
        });
    }
    norm_forward(&mut bench.device, &sets[0])?;
    let residual =
        Array2::from_shape_fn(x.dim(), |at| bf16::from_f32(x[at].to_f32() + delta[at].to_f32()));
    let found = repeating(&mut bench.device, "the residual", sets[0].residual, PANEL)?;
    same("the residual", &found, &residual.as_slice().expect("row-major")[..found.len()])?;
    let (mut copy, mut y, mut stats) =
        (Array2::zeros(x.dim()), Array2::zeros(x.dim()), Array2::zeros((PANEL, 2)));
    let (wide, beta) = (widened(residual.view()), Some(beta.row(0)));
    cpu::norm::norm_forward(
        wide.view(),
        None,
        gamma.row(0),
        beta,
        copy.view_mut(),
        y.view_mut(),
        stats.view_mut(),
    )
    .expect("fits");
    let found = repeating(&mut bench.device, "y", sets[0].y, PANEL)?;
    let count = found.len();
    near("y", found.into_iter().map(bf16::to_f32), y.into_iter().take(count), [BF16, 1e-4])?;
    bench.moving("every element, within 5/1024 of the CPU's in f32", bytes, sets, norm_forward)
}

fn norm_gradients(bench: &mut Bench, shape @ [p, c]: [usize; 2]) -> Result<Prepared, Stop> {
    let ([dy, residual, from_above], gamma) =
        ([1, 2, 5].map(|seed| panel(c, seed)), random([1, c], 3));
    let [of_dy, wide, mut dresidual] = [&dy, &residual, &from_above].map(|x| widened(x.view()));
    let (mut copy, mut y, mut stats) = (wide.clone(), wide.clone(), Array2::zeros((PANEL, 2)));
    cpu::norm::norm_forward(
        wide.view(),
        None,
        gamma.row(0),
        None,
        copy.view_mut(),
        y.view_mut(),
        stats.view_mut(),
    )
    .expect("fits");
    let bytes = 4 * 2 * p * c + 8 * p;
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let device = &mut bench.device;
        let scratch = norm_backward_scratch(device, c);
        sets.push(NormBackward {
            dy: repeated(device, shape, &dy)?,
            residual: repeated(device, shape, &residual)?,
            stats: repeated(device, [p, 2], &stats)?,
            gamma: upload(device, gamma.view())?,
            dresidual: repeated(device, shape, &from_above)?,
            dgamma: device.alloc("dgamma", [1, c])?,
            dbeta: Some(device.alloc("dbeta", [1, c])?),
            accumulate: BETA,
            scratch: device.alloc("scratch", scratch)?,
        });
    }
    norm_backward(&mut bench.device, &sets[0])?;
    let [mut dgamma, mut dbeta] = [0, 1].map(|_| Array1::zeros(c));
    let (in_place, of_gamma, of_beta) =
        (dresidual.view_mut(), dgamma.view_mut(), Some(dbeta.view_mut()));
    cpu::norm::norm_backward(
        of_dy.view(),
        wide.view(),
        stats.view(),
        gamma.row(0),
        in_place,
        sparse24_core::op::Accumulate::Add,
        of_gamma,
        of_beta,
        sparse24_core::op::Accumulate::Overwrite,
    )
    .expect("fits");
    let found = repeating(&mut bench.device, "dresidual", sets[0].dresidual, PANEL)?;
    let count = found.len();
    near(
        "dresidual",
        found.into_iter().map(bf16::to_f32),
        dresidual.into_iter().take(count),
        [BF16, 1e-4],
    )?;
    // Of so many rows as repeat each of the panel's.
    let mut sums = [0, 1].map(|_| Array2::<f32>::zeros((1, c)));
    for column in 0..c {
        let mut sum = [0.0; 2];
        for row in 0..PANEL.min(p) {
            let times = (p - row).div_ceil(PANEL) as f64;
            let dy = times * f64::from(of_dy[[row, column]]);
            sum[0] += dy * f64::from((wide[[row, column]] - stats[[row, 0]]) * stats[[row, 1]]);
            sum[1] += dy;
        }
        (sums[0][[0, column]], sums[1][[0, column]]) = (sum[0] as f32, sum[1] as f32);
    }
    for (what, found, expected) in
        [("dgamma", Some(sets[0].dgamma), &sums[0]), ("dbeta", sets[0].dbeta, &sums[1])]
    {
        near_in_norm(
            what,
            &downloaded(&mut bench.device, found.expect("asked for"))?,
            expected,
            1e-4,
        )?;
    }
    bench.moving(
        "every element, within 5/1024 of the CPU's in f32; column sums in norm",
        bytes,
        sets,
        |device, op| norm_backward(device, op),
    )
}

fn downloaded(device: &mut Device, from: Matrix<f32>) -> Result<Array2<f32>, Error> {
    let [rows, columns] = from.shape();
    Ok(Array2::from_shape_vec((rows, columns), device.download(from)?).expect("as many"))
}

/// Tokens a sequence.
const CONTEXT: usize = 1024;
const VOCABULARY: usize = 50257;

/// Like text: the frequency of a token falls with its number.
fn text() -> Vec<u32> {
    let token =
        |i: usize| (VOCABULARY as f64).powf((i * 7919 % TOKENS) as f64 / TOKENS as f64) as u32 - 1;
    (0..TOKENS).map(token).collect()
}

/// Bytes of the rows of the tables that are touched.
fn table_bytes(tokens: &[u32], width: usize) -> usize {
    let distinct = tokens.iter().collect::<std::collections::HashSet<_>>().len();
    4 * width * (distinct + CONTEXT)
}

fn embeddings(bench: &mut Bench, width: usize) -> Result<Prepared, Stop> {
    let (text, shape) = (text(), [TOKENS, width]);
    let tables = [1, 2].map(|seed| random([PANEL, width], seed));
    let device = &mut bench.device;
    let tokens = device.alloc("tokens", [TOKENS, 1])?;
    device.upload(tokens, &text)?;
    let token_table = repeated(device, [VOCABULARY, width], &tables[0])?;
    let position_table = Some(repeated(device, [CONTEXT, width], &tables[1])?);
    let mut sets = Vec::new();
    for _ in 0..bench.sets(2 * TOKENS * width) {
        let rows = bench.device.alloc("rows", shape)?;
        sets.push(Embed { tokens, context: CONTEXT, token_table, position_table, rows });
    }
    embed_forward(&mut bench.device, &sets[0])?;
    let element = |(row, column): (usize, usize)| {
        let [token, position] = [text[row] as usize, row % CONTEXT].map(|at| at % PANEL);
        bf16::from_f32(tables[0][[token, column]] + tables[1][[position, column]])
    };
    let expected = Array2::from_shape_fn(shape, element);
    same("rows", &bench.device.download(sets[0].rows)?, expected.as_slice().expect("row-major"))?;
    let bytes = 2 * TOKENS * width + table_bytes(&text, width);
    bench.moving("every element, bit for bit", bytes, sets, embed_forward)
}

fn embedding_gradients(bench: &mut Bench, width: usize) -> Result<Prepared, Stop> {
    let (text, shape, gradient) = (text(), [TOKENS, width], panel(width, 3));
    let device = &mut bench.device;
    let tokens = device.alloc("tokens", [TOKENS, 1])?;
    device.upload(tokens, &text)?;
    let token_table = device.alloc("gradient of tokens", [VOCABULARY, width])?;
    let positions = device.alloc("gradient of positions", [CONTEXT, width])?;
    let scratch = EmbedScratch {
        order: device.alloc("order", EmbedScratch::order_shape(shape))?,
        pieces: device.alloc("pieces", EmbedScratch::pieces_shape(shape))?,
    };
    let mut sets = Vec::new();
    for _ in 0..bench.sets(2 * TOKENS * width) {
        let rows = repeated(&mut bench.device, shape, &gradient)?;
        sets.push(Embed {
            tokens,
            context: CONTEXT,
            token_table,
            position_table: Some(positions),
            rows,
        });
    }
    embed_backward(&mut bench.device, &sets[0], &scratch)?;
    let wide = widened(gradient.view());
    let sum = |rows: &mut dyn Iterator<Item = usize>| {
        let mut sum = Array1::<f64>::zeros(width);
        rows.for_each(|row| {
            sum.zip_mut_with(&wide.row(row % PANEL), |sum, &x| *sum += f64::from(x))
        });
        sum.mapv(|sum| sum as f32).insert_axis(ndarray::Axis(0))
    };
    // The most frequent, some rarer ones, and one that does not occur.
    for token in [0, 1, 2, 17, 255, 4096, 50_000, VOCABULARY - 1] {
        let expected = sum(&mut (0..TOKENS).filter(|&row| text[row] as usize == token));
        let found = downloaded(&mut bench.device, token_table.rows(token..token + 1))?;
        near("the gradient of a token", found, expected.iter().copied(), [1e-4, 1e-3])?;
    }
    for position in [0, 1, 511, CONTEXT - 1] {
        let expected = sum(&mut (0..TOKENS).filter(|&row| row % CONTEXT == position));
        let found = downloaded(&mut bench.device, positions.rows(position..position + 1))?;
        near("the gradient of a position", found, expected.iter().copied(), [1e-4, 1e-3])?;
    }
    let bytes = 2 * TOKENS * width + 2 * table_bytes(&text, width);
    bench.moving(
        "the rows of eight tokens and four positions, beside sums in f64",
        bytes,
        sets,
        move |device, op| embed_backward(device, op, &scratch),
    )
}

/// What becomes of the logits.
#[derive(Clone, Copy, PartialEq)]
enum Gradient {
    InPlace,
    None,
}

fn losses(
    bench: &mut Bench,
    [rows, columns, vocabulary]: [usize; 3],
    gradient: Gradient,
) -> Result<Prepared, Stop> {
    const SCALE: f32 = 1.0;
    let (shape, logits) = ([rows, columns], panel(columns, 1));
    let of_panel: Vec<u32> = (0..PANEL).map(|row| (row * 7919 % vocabulary) as u32).collect();
    let host: Vec<u32> = (0..rows).map(|row| of_panel[row % PANEL]).collect();
    let device = &mut bench.device;
    let (targets, losses) =
        (device.alloc("targets", [rows, 1])?, device.alloc("losses", [rows, 1])?);
    device.upload(targets, &host)?;
    let bytes = 2 * rows * columns * if gradient == Gradient::InPlace { 2 } else { 1 };
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let logits = repeated(&mut bench.device, shape, &logits)?;
        sets.push(HeadLoss { logits, targets, vocabulary, smoothing: 0.0, losses });
    }
    let launch = move |device: &mut Device, op: &HeadLoss| match gradient {
        // Over gradients instead of logits the work is the same.
        Gradient::InPlace => head_loss(device, op, SCALE),
        Gradient::None => loss_forward(device, op),
    };
    launch(&mut bench.device, &sets[0])?;
    let mut wide = logits.slice(s![.., ..vocabulary]).mapv(bf16::to_f32);
    let loss = |row: usize| {
        let sum = wide.row(row).iter().map(|&x| f64::from(x).exp()).sum::<f64>();
        (sum.ln() - f64::from(wide[[row, of_panel[row] as usize]])) as f32
    };
    let expected: Vec<f32> = (0..PANEL).map(loss).collect();
    let found = repeating(&mut bench.device, "the losses", losses, PANEL)?;
    let count = found.len();
    near("the losses", found, expected.into_iter().take(count), [1e-5, 1e-5])?;
    if gradient == Gradient::InPlace {
        cpu::loss::head_loss(wide.view_mut(), &of_panel, None, 0.0, SCALE)
            .expect("targets are of the vocabulary");
        let found = repeating(&mut bench.device, "dlogits", sets[0].logits, PANEL)?;
        let expected = wide.rows().into_iter().flat_map(|row| {
            let padding = std::iter::repeat_n(0.0, columns - vocabulary);
            row.to_vec().into_iter().chain(padding)
        });
        near(
            "dlogits",
            found.iter().map(|x| x.to_f32()),
            expected.take(found.len()),
            [BF16, 1e-9],
        )?;
    }
    let verified = match gradient {
        Gradient::InPlace => "every loss beside f64's, every gradient within 5/1024 of the CPU's",
        Gradient::None => "every loss beside f64's",
    };
    bench.moving(verified, bytes, sets, launch)
}

fn loss_sums(bench: &mut Bench) -> Result<Prepared, Stop> {
    let values = random([TOKENS, 1], 1);
    let sum = bench.device.alloc("loss", [1, 1])?;
    let sets = (0..bench.sets(4 * TOKENS))
        .map(|_| upload(&mut bench.device, values.view()))
        .collect::<Result<Vec<_>, Error>>()?;
    loss_sum(&mut bench.device, sets[0], sum, BETA, None)?;
    let (exact, absolute) = values.iter().fold((0.0, 0.0), |(sum, absolute), &x| {
        (sum + f64::from(x), absolute + f64::from(x.abs()))
    });
    near(
        "the sum",
        bench.device.download(sum)?,
        [exact as f32],
        [0.0, absolute * 2_f64.powi(-20)],
    )?;
    bench.moving("the sum, beside f64's", 4 * TOKENS, sets, move |device, &losses| {
        loss_sum(device, losses, sum, BETA, None)
    })
}
