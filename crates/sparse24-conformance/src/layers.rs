//! Activations, norms, attention, embeddings, the head and dropout.

use sparse24_backend::{
    DType, Extent, Op, Region, Tensor,
    op::{
        ActivationBackward, ActivationForward, Add, AttentionBackward, AttentionDropout,
        AttentionForward, DropSequences, DropoutOp, Embed, EmbedBackward, EmbedForward, GatherRows,
        HeadGradients, HeadLoss, Mixed, NormBackward, NormForward, Scale, ScaleGrad, ScatterRows,
        TargetLoss,
    },
};
use sparse24_core::{
    mvue::Estimator,
    op::{Activation, AttentionMask, AttentionShape, Dropout, NonFinite},
    philox::{Purpose, Site},
};

use super::{
    ADDRESS, Bench, Draw, LOSS_SCALE, Matrix, Output, must,
    products::{accumulate, added, plus_row},
    same_bits, sparse, transposed,
};
use crate::oracle::{arithmetic::Arithmetic, layers};

fn activation(draw: &Draw) -> Activation {
    Activation::ALL[draw.sizes[3] % Activation::ALL.len()]
}

/// H = act(Z).
pub(super) fn activation_forward(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let (activation, p, d_ff) = (activation(draw), draw.sizes[0], bench.columns(draw.sizes[2]));
    let (z, z_host) = bench.activation(p, d_ff * activation.columns_in());
    let h = bench.output("h", p, d_ff);
    let op = ActivationForward { activation, z, h: h.tensor };
    bench.check(&[h], &[op.into()], |a| vec![layers::activate(a, activation, &z_host)]);
}

/// dZ = dH act'(Z), and its sample, which has the bits of that of the stored dZ.
pub(super) fn activation_backward(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let (activation, sampled) = (activation(draw), draw.options[0]);
    let (p, d_ff) = (draw.sizes[0].max(usize::from(sampled)), bench.columns(draw.sizes[2]));
    let columns = d_ff * activation.columns_in();
    let (z, z_host) = bench.activation(p, columns);
    let (dh, dh_host) = bench.activation(p, d_ff);
    let dz = bench.output("dz", p, columns);
    let op = ActivationBackward { activation, dh, z, dz: dz.tensor };
    let sampling = sampled.then(|| sparse::sampling(bench, dz.tensor, Estimator::Exact));
    let mut ops = vec![op.into()];
    ops.extend(sampling.map(Op::from));
    let checked = bench
        .check(&[dz], &ops, |a| vec![layers::activate_backward(a, activation, &z_host, &dh_host)]);
    let Some(sampling) = sampling.filter(|_| checked) else { return };
    must(bench.backend.sequence(&ops));
    let fused = sparse::read(bench, &sampling);
    ops.iter().for_each(|op| must(bench.backend.execute(op)));
    let alone = sparse::read(bench, &sampling);
    assert!(same_bits(&[fused], &[alone]), "{ops:?}: another sample");
}

/// Other than the usual ones, so that a backend that has its own is found.
const EPSILON: f32 = 3e-4;

/// x + delta, and its norm; the addition alone and in place.
pub(super) fn norm_forward(bench: &mut Bench<'_>, draw: &Draw) {
    bench.tame();
    let (p, d) = (draw.sizes[0], bench.columns(draw.sizes[2]));
    let [residual, biased, ..] = draw.options;
    let ((x, x_host), (delta, delta_host)) = (bench.activation(p, d), bench.activation(p, d));
    let ((gamma, gamma_host), (beta, beta_host)) =
        (bench.parameter([1, d]), bench.parameter([1, d]));
    let (sum, y) = (bench.output("sum", p, d), bench.output("y", p, d));
    let stats = bench.sum("stats", [p, 2], false);
    let add = Add { x, delta, out: sum.tensor };
    let norm = NormForward {
        x: if residual { sum.tensor } else { x },
        gamma,
        beta: biased.then_some(beta),
        epsilon: EPSILON,
        y: y.tensor,
        stats: stats.tensor,
    };
    let storage = bench.storage;
    let normed = |a: &mut Arithmetic, x: &Matrix| {
        let normed = layers::norm(a, x, &gamma_host, biased.then_some(&beta_host), EPSILON);
        let mean: Vec<f64> =
            x.rows().into_iter().map(|row| a.sum(row.iter().map(|x| x / d as f64))).collect();
        let stats =
            Matrix::from_shape_fn((p, 2), |(i, j)| if j == 0 { mean[i] } else { normed.rstd[i] });
        [normed.y, stats]
    };
    if !residual {
        bench.check(&[y, stats], &[norm.into()], |a| normed(a, &x_host).into());
        return;
    }
    bench.check(&[sum, y, stats], &[add.into(), norm.into()], |a| {
        let sum = a.plus(&x_host, &delta_host);
        let [y, stats] = normed(a, &storage.rounded(&sum));
        vec![storage.rounded(&sum), y, stats]
    });
    let in_place = Output { before: Some(x_host.clone()), ..bench.output("x", p, d) };
    let add = Op::from(Add { x: in_place.tensor, delta, out: in_place.tensor });
    bench.check(&[in_place], &[add], |a| vec![a.plus(&x_host, &delta_host)]);
    let (delta, delta_host) = bench.parameter([p, d]);
    let sum = bench.sum("f32 sum", [p, d], true);
    let before = sum.before.clone().expect("it is added to");
    let add = Op::from(Add { x: sum.tensor, delta, out: sum.tensor });
    bench.check(&[sum], &[add], |a| vec![a.plus(&before, &delta_host)]);
}

/// The gradients of x, gamma and beta.
pub(super) fn norm_backward(bench: &mut Bench<'_>, draw: &Draw) {
    bench.tame();
    let (p, d) = (draw.sizes[0], bench.columns(draw.sizes[2]));
    let [add, add_dx, biased, _] = draw.options;
    let ((x, x_host), (dy, dy_host)) = (bench.activation(p, d), bench.activation(p, d));
    let (gamma, gamma_host) = bench.parameter([1, d]);
    let rows = x_host.rows().into_iter();
    let stats = rows.flat_map(|row| {
        let mean = row.sum() / d as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
        [mean, 1.0 / (variance + f64::from(EPSILON)).sqrt()].map(|x| f64::from(x as f32))
    });
    let stats = Matrix::from_shape_vec((p, 2), stats.collect()).expect("two per row");
    let (stats, _) = bench.given(stats, DType::F32, Region::Activations);
    let mut dx = bench.output("dx", p, d);
    if add_dx {
        let values = bench.matrix([p, d]);
        dx.before = Some(bench.storage.rounded(&values));
    }
    let (dgamma, dbeta) = (bench.sum("dgamma", [1, d], add), bench.sum("dbeta", [1, d], add));
    let op = NormBackward {
        dy,
        x,
        stats,
        gamma,
        dx: dx.tensor,
        accumulate_dx: accumulate(add_dx),
        dgamma: dgamma.tensor,
        dbeta: biased.then_some(dbeta.tensor),
        accumulate: accumulate(add),
    };
    let mut outputs = vec![dx, dgamma];
    outputs.extend(biased.then_some(dbeta));
    let before: Vec<_> = outputs.iter().map(|output| output.before.clone()).collect();
    bench.check(&outputs, &[op.into()], |a| {
        let normed = layers::norm(a, &x_host, &gamma_host, None, EPSILON);
        let (dx, dgamma, dbeta) = layers::norm_backward(a, &dy_host, &normed, &gamma_host);
        let gradients = [(dx, 1), (dgamma, p + 2), (dbeta, p + 2)].into_iter().zip(&before);
        gradients.map(|((sum, terms), before)| added(a, before.as_ref(), sum, terms)).collect()
    });
}

/// Geometry, operands and options of an attention.
struct Attended {
    shape: AttentionShape,
    host: [Matrix; 3],
    lengths: Option<Vec<u32>>,
    p: Option<f32>,
    op: AttentionForward,
    outputs: [Output; 2],
}

const DROPOUT: Site = Site::new(Purpose::Dropout, 3);

fn dropped(p: f32) -> layers::Dropout {
    layers::Dropout { address: ADDRESS, number: 3, p: p.into() }
}

impl Attended {
    fn new(bench: &mut Bench<'_>, draw: &Draw) -> Self {
        bench.tame();
        let [queries, width, keys, heads] = draw.sizes;
        let [causal, padded, drops, joint] = draw.options;
        let (queries, batch) = (queries.max(1), draw.batch);
        let keys = if joint { queries } else { keys };
        let d = heads * bench.size(Extent::HeadDim, width);
        let mask = if causal { AttentionMask::Causal } else { AttentionMask::Full };
        let shape = AttentionShape { batch, heads, queries, keys, mask };
        let (tensors, host) = if joint {
            let (qkv, host) = bench.activation(batch * queries, 3 * d);
            (qkv.split(), layers::split(&host))
        } else {
            let [q, k, v] = [queries, keys, keys].map(|rows| bench.activation(batch * rows, d));
            ([q.0, k.0, v.0], [q.1, k.1, v.1])
        };
        let lengths = padded.then(|| bench.random_ids(batch, keys + 1));
        let (o, lse) = (
            bench.output("o", batch * queries, d),
            bench.sum("lse", [batch * heads, queries], false),
        );
        let p = drops.then_some(0.25);
        let [q, k, v] = tensors;
        let op = AttentionForward {
            shape,
            q,
            k,
            v,
            lengths: lengths.as_ref().map(|lengths| bench.ids(lengths)),
            dropout: p.map(|p| {
                let (drawn, words) = (Dropout { p, site: DROPOUT }, shape.tile_words());
                let kept = bench.alloc([batch * heads, words], DType::U32, Region::Activations);
                AttentionDropout { drawn, kept }
            }),
            o: o.tensor,
            lse: lse.tensor,
        };
        Self { shape, host, lengths, p, op, outputs: [o, lse] }
    }

    fn oracle(&self, bench: &Bench<'_>) -> layers::Attention<'_> {
        layers::Attention {
            shape: self.shape,
            qkv: &self.host,
            lengths: self.lengths.as_deref(),
            dropout: self.p.map(dropped),
            operand_units: bench.storage.operand_units(),
        }
    }
}

/// O and the log-sum-exps.
pub(super) fn attention_forward(bench: &mut Bench<'_>, draw: &Draw) {
    let attended = Attended::new(bench, draw);
    let oracle = attended.oracle(bench);
    bench.check(&attended.outputs, &[attended.op.into()], |a| {
        let layers::Attended { o, lse, .. } = oracle.forward(a);
        vec![o, lse]
    });
}

/// The gradients of q, k and v, in one buffer or three.
pub(super) fn attention_backward(bench: &mut Bench<'_>, draw: &Draw) {
    let attended = Attended::new(bench, draw);
    let oracle = attended.oracle(bench);
    let mut kept = None;
    // The backend's own record of what dropout keeps.
    bench.run(attended.op);
    if bench.prepared.is_none() {
        let kept = kept.insert(oracle.forward(&mut Arithmetic::Exact));
        kept.o = bench.storage.rounded(&kept.o);
        bench.upload(attended.op.o, &kept.o);
        bench.upload(attended.op.lse, &kept.lse);
    }
    let AttentionShape { batch, queries, keys, .. } = attended.shape;
    let d = attended.op.o.shape[1];
    let (d_o, d_o_host) = bench.activation(batch * queries, d);
    let joint = draw.options[3];
    let (outputs, dqkv): (Vec<_>, [Tensor; 3]) = if joint {
        let dqkv = bench.output("dqkv", batch * queries, 3 * d);
        let parts = dqkv.tensor.split();
        (vec![dqkv], parts)
    } else {
        let rows = [("dq", queries), ("dk", keys), ("dv", keys)];
        let outputs = rows.map(|(name, rows)| bench.output(name, batch * rows, d));
        let parts = outputs.each_ref().map(|output| output.tensor);
        (outputs.into(), parts)
    };
    let op = AttentionBackward { forward: attended.op, d_o, dqkv };
    bench.check(&outputs, &[op.into()], |a| {
        let kept = kept.as_ref().expect("the oracle's forward pass");
        let gradients = oracle.backward(a, kept, &d_o_host);
        if joint { vec![layers::join(&gradients)] } else { gradients.into() }
    });
}

/// The operands of an embedding: tables, positions or not, repeated tokens.
fn embed(bench: &mut Bench<'_>, draw: &Draw) -> (Embed, Vec<u32>, [Matrix; 2]) {
    bench.finite();
    let [length, d, vocabulary, size] = draw.sizes;
    let (length, d) = (length.max(1), bench.columns(d));
    let ids = bench.random_ids(length * size, vocabulary);
    let tokens = bench.ids(&ids);
    let ((table, table_host), (positions, positions_host)) =
        (bench.parameter([vocabulary, d]), bench.parameter([length + 1, d]));
    let op = Embed {
        tokens,
        sequence_length: length,
        scale: if draw.options[1] { 1.0 } else { 2.75 },
        token_table: table,
        position_table: draw.options[0].then_some(positions),
        rows: table,
    };
    (op, ids, [table_host, positions_host])
}

/// x = E[tokens] + P[positions].
pub(super) fn embed_forward(bench: &mut Bench<'_>, draw: &Draw) {
    let (op, ids, [table, positions]) = embed(bench, draw);
    let rows = bench.output("rows", ids.len(), table.ncols());
    let has_positions = op.position_table.is_some();
    let (length, scale) = (op.sequence_length, f64::from(op.scale));
    let op = EmbedForward(Embed { rows: rows.tensor, ..op });
    bench.check(&[rows], &[op.into()], |a| {
        vec![Matrix::from_shape_fn((ids.len(), table.ncols()), |(i, j)| {
            let position = if has_positions { positions[[i % length, j]] } else { 0.0 };
            let scaled = scale * table[[ids[i] as usize, j]];
            let value = scaled + position;
            a.rounded(value, 1.0, value.abs() + scaled.abs())
        })]
    });
}

/// The gradients of the tables, added to what they hold.
pub(super) fn embed_backward(bench: &mut Bench<'_>, draw: &Draw) {
    let (op, ids, [table, positions]) = embed(bench, draw);
    let (rows, rows_host) = bench.activation(ids.len(), table.ncols());
    let mut outputs = vec![bench.unguarded("dE", table.clone(), Region::Gradients)];
    let position_table = op.position_table.map(|_| {
        outputs.push(bench.unguarded("dP", positions.clone(), Region::Gradients));
        outputs[1].tensor
    });
    let (token_table, length) = (outputs[0].tensor, op.sequence_length);
    let scale = f64::from(op.scale);
    let op = EmbedBackward(Embed { rows, token_table, position_table, ..op });
    let tables = [table, positions];
    bench.check(&outputs, &[op.into()], |a| {
        let of_row: [(&dyn Fn(usize) -> usize, f64); 2] =
            [(&|i| ids[i] as usize, scale), (&|i| i % length, 1.0)];
        let tables = tables.iter().zip(of_row).take(outputs.len());
        let gradient = |(before, (row_of, scale)): (&Matrix, (&dyn Fn(usize) -> usize, f64))| {
            Matrix::from_shape_fn(before.dim(), |(row, j)| {
                let mine = (0..ids.len()).filter(|&i| row_of(i) == row);
                a.sum(mine.map(|i| scale * rows_host[[i, j]]).chain([before[[row, j]]]))
            })
        };
        tables.map(gradient).collect()
    });
}

/// Loss and gradients, a few rows of logits at a time, with ignored targets, smoothing, second
/// targets and a bias; a vocabulary of one has the squared error.
pub(super) fn head_loss(bench: &mut Bench<'_>, draw: &Draw) {
    bench.tame();
    let [p, _, vocabulary, chunk] = draw.sizes;
    let (p, vocabulary) = (p.max(1), vocabulary.max(1));
    let [_, _, ignores, smoothed] = draw.options;
    let mut targets = match vocabulary {
        1 => bench.matrix([p, 1]).iter().map(|&t| (t as f32).to_bits()).collect(),
        _ => bench.random_ids(p, vocabulary),
    };
    if ignores {
        targets[0] = HeadLoss::IGNORE;
    }
    let smoothing = if smoothed { 0.125 } else { 0.0 };
    let (seconds, shares) = (bench.random_ids(p, vocabulary), bench.matrix([p, 1]));
    // From 0 to 1, both included.
    let shares: Vec<f32> = shares.iter().map(|&x| (x.abs() as f32).min(1.0)).collect();
    let mixed = (vocabulary > 1 && draw.seed.is_multiple_of(2)).then_some((&*seconds, &*shares));
    let on_device = mixed.map(|(seconds, _)| Mixed {
        targets: bench.ids(seconds),
        shares: {
            let shares = Matrix::from_shape_fn((p, 1), |(i, _)| shares[i].into());
            bench.given(shares, DType::F32, Region::Activations).0
        },
    });
    let kind = match vocabulary {
        1 => TargetLoss::SquaredError,
        _ => TargetLoss::CrossEntropy { smoothing, mixed: on_device },
    };
    let held = p.div_ceil(chunk);
    head(bench, draw, [vocabulary, held], kind, &targets, |a, logits, scale| match kind {
        TargetLoss::SquaredError => layers::squared_error(a, logits, &targets, scale),
        _ => layers::mixed_loss(a, logits, &targets, mixed, smoothing.into(), scale),
    });
}

/// Spans of one token to all, in sequences of every length, some of them without a target.
pub(super) fn span_loss(bench: &mut Bench<'_>, draw: &Draw) {
    bench.tame();
    let [tokens, _, of_length, n] = draw.sizes;
    // Several sequences of p tokens, unless there are many.
    let rows = tokens.clamp(1, 300);
    let mut lengths: Vec<u32> = bench.random_ids(n, rows).into_iter().map(|id| id + 1).collect();
    lengths[0] = rows.min(of_length.max(1)) as u32;
    let mut targets = vec![HeadLoss::IGNORE; n * rows];
    for (i, &length) in lengths.iter().enumerate() {
        let ends = bench.random_ids(2, length as usize);
        let (first, last) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        if i == 0 || !draw.options[2] {
            targets[i * rows + first as usize] = last;
        }
    }
    let kind = TargetLoss::Span { lengths: bench.ids(&lengths) };
    head(bench, draw, [2, n * rows], kind, &targets, |a, logits, scale| {
        layers::span_loss(a, logits, &targets, &lengths, scale)
    });
}

/// A head with this many outputs and rows of logits, and its loss and gradient of the logits.
fn head(
    bench: &mut Bench<'_>,
    draw: &Draw,
    [vocabulary, held]: [usize; 2],
    kind: TargetLoss,
    targets: &[u32],
    compared: impl Fn(&mut Arithmetic, &Matrix, f64) -> (f64, Matrix),
) {
    let [trains, add, ..] = draw.options;
    let biased = draw.batch == 2;
    let (p, d) = (targets.len(), bench.columns(draw.sizes[1]));
    let (x, x_host) = bench.activation(p, d);
    let (embedding, e_host) = bench.parameter([vocabulary, d]);
    let e_host = bench.storage.rounded(&e_host);
    let (bias, bias_host) = bench.bias(vocabulary);
    let logits = bench.alloc([held, vocabulary], DType::Activation, Region::Activations);
    let (loss, dx) = (bench.sum("loss", [1, 1], false), bench.output("dx", p, d));
    let before = bench.matrix([vocabulary, d]);
    let mut dembedding = bench.unguarded("dE", before.clone(), Region::Gradients);
    if !add {
        dembedding.before = Some(Matrix::from_elem(before.dim(), f64::NAN));
    }
    let dbias = bench.sum("db", [1, vocabulary], add);
    let gradients = HeadGradients {
        dx: dx.tensor,
        dembedding: dembedding.tensor,
        dbias: biased.then_some(dbias.tensor),
        accumulate: accumulate(add),
    };
    let op = HeadLoss {
        x,
        embedding,
        bias: biased.then_some(bias),
        targets: bench.ids(targets),
        kind,
        logits,
        loss: loss.tensor,
        gradients: trains.then_some(gradients),
    };
    let storage = bench.storage;
    let of_loss = loss.tensor;
    let bias_before = dbias.before.clone().filter(|_| add);
    let mut outputs = if trains { vec![loss, dx, dembedding] } else { vec![loss] };
    outputs.extend((trains && biased).then_some(dbias));
    let checked = bench.check(&outputs, &[op.into()], |a| {
        let mut logits = storage.product(a, &x_host, &transposed(&e_host));
        if biased {
            logits = plus_row(a, &logits, &bias_host);
        }
        let logits = storage.between(a, &logits);
        let scale = LOSS_SCALE.into();
        let (sum, dlogits) = compared(a, &logits, scale);
        let sum = Matrix::from_elem((1, 1), sum);
        if !trains {
            return vec![sum];
        }
        let dlogits = storage.between(a, &dlogits);
        let dx = storage.product(a, &dlogits, &e_host);
        let de = storage.product(a, &transposed(&dlogits), &x_host);
        let db = a.column_sums(&dlogits);
        let mut sums = vec![sum, dx, added(a, add.then_some(&before), de, p + 2)];
        if biased {
            sums.push(added(a, bias_before.as_ref(), db, p + 2));
        }
        sums
    });
    if !checked {
        return;
    }
    // A loss that is not finite raises the flag, in training alone.
    let poison = Matrix::from_elem((p, d), f64::NAN);
    bench.upload(x, &poison);
    bench.run(op);
    let counted = targets.iter().any(|&target| target != HeadLoss::IGNORE);
    for expected in [(trains && counted).then_some(NonFinite::Loss), None] {
        let report = bench.backend.report(of_loss).expect("a report");
        assert_eq!(report.non_finite, expected, "after a loss of {:?}", report.losses);
    }
}

/// An output and the tensor of these values that it is made of: itself, or another.
fn dropped_rows(bench: &mut Bench<'_>, draw: &Draw, values: &Matrix) -> (Output, Tensor) {
    let out = bench.output("out", values.nrows(), values.ncols());
    if draw.options[1] {
        let x = bench.output("x", values.nrows(), values.ncols()).tensor;
        bench.upload(x, values);
        return (out, x);
    }
    let x = out.tensor;
    (Output { before: Some(values.clone()), ..out }, x)
}

/// The elements dropped are those of the stream; the others are scaled.
pub(super) fn dropout(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [p, _, columns, _] = draw.sizes;
    let columns = bench.columns(columns);
    let values = bench.matrix([p, columns]);
    let values = bench.storage.rounded(&values);
    let (out, x) = dropped_rows(bench, draw, &values);
    let rate = if draw.options[0] { 0.25 } else { 0.625 };
    let op = DropoutOp { x, out: out.tensor, dropout: Dropout { p: rate, site: DROPOUT } };
    let oracle =
        |a: &mut Arithmetic| layers::Dropout::apply(Some(dropped(rate)), a, values.clone());
    if !bench.check(&[out], &[op.into()], |a| vec![oracle(a)]) {
        return;
    }
    let found = bench.download(op.out);
    let zero = |x: &Matrix| x.map(|&x| x == 0.0);
    assert_eq!(zero(&found), zero(&oracle(&mut Arithmetic::Exact)), "other elements are dropped");
}

/// The sequences dropped are those of the stream; the others are scaled.
pub(super) fn drop_sequences(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [sequence_length, _, columns, _] = draw.sizes;
    let columns = bench.columns(columns);
    // Several calls of the stream, and more sequences than a block has threads.
    let sequences = 3 + draw.seed as usize % 7;
    let values = bench.matrix([sequences * sequence_length, columns]);
    let values = bench.storage.rounded(&values);
    let (out, x) = dropped_rows(bench, draw, &values);
    let rate = if draw.options[0] { 0.25 } else { 0.625 };
    let dropout = Dropout { p: rate, site: DROPOUT };
    let op = DropSequences { x, out: out.tensor, sequence_length, dropout };
    bench.check(&[out], &[op.into()], |a| {
        let dropped = Some(dropped(rate));
        vec![layers::Dropout::apply_to_sequences(dropped, a, sequence_length, values.clone())]
    });
}

/// Rows by number, among them no row, and their way back: exact copies.
pub(super) fn rows(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [p, _, columns, every] = draw.sizes;
    let columns = bench.columns(columns);
    // Different rows, in no order.
    let mut numbers: Vec<u32> = (0..p as u32).step_by(every).collect();
    if draw.options[0] {
        numbers.reverse();
    }
    if draw.options[1] {
        numbers.push(HeadLoss::IGNORE);
    }
    let rows = bench.ids(&numbers);
    let (x, x_host) = bench.activation(p, columns);
    let out = bench.output("out", numbers.len(), columns);
    let op = GatherRows { x, rows, out: out.tensor };
    bench.check(&[out], &[op.into()], |_| {
        vec![Matrix::from_shape_fn((numbers.len(), columns), |(i, j)| {
            if numbers[i] == HeadLoss::IGNORE { 0.0 } else { x_host[[numbers[i] as usize, j]] }
        })]
    });
    let (dout, dout_host) = bench.activation(numbers.len(), columns);
    let dx = bench.output("dx", p, columns);
    let op = ScatterRows { dout, rows, dx: dx.tensor };
    bench.check(&[dx], &[op.into()], |_| {
        vec![Matrix::from_shape_fn((p, columns), |(row, j)| {
            let from = numbers.iter().position(|&number| number as usize == row);
            from.map_or(0.0, |i| dout_host[[i, j]])
        })]
    });
}

/// out = s x, and ds = sum of x * dout.
pub(super) fn scale(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let shape = [draw.sizes[0], draw.sizes[2]];
    let (scale, scale_host) = bench.parameter([1, 1]);
    let given = |bench: &mut Bench<'_>| {
        let values = bench.matrix(shape);
        bench.given(values, DType::F32, Region::Activations)
    };
    let ((x, x_host), (dout, dout_host)) = (given(bench), given(bench));
    let out = bench.sum("out", shape, false);
    let op = Scale { x, scale, out: out.tensor };
    bench.check(&[out], &[op.into()], |a| {
        vec![a.map(&x_host, 1.0, |x| (scale_host[[0, 0]] * x, scale_host[[0, 0]] * x))]
    });
    let add = draw.options[0];
    let ds = bench.sum("ds", [1, 1], add);
    let op = ScaleGrad { x, dout, ds: ds.tensor, accumulate: accumulate(add) };
    let before = ds.before.clone();
    bench.check(&[ds], &[op.into()], |a| {
        // Summed in f64: fewer than 2^29 terms err by less than a unit of their magnitudes.
        let terms = &x_host * &dout_host;
        let sum = a.rounded(terms.sum(), 1.0, terms.mapv(f64::abs).sum());
        vec![added(a, before.as_ref(), Matrix::from_elem((1, 1), sum), 1)]
    });
}
