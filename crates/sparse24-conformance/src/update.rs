//! Copies, fills, the optimizer and distances.

use sparse24_backend::{
    Backend, DType, ErrorKind, MaskId, Op, OptimizerEntry, Region, Tensor,
    op::{Copy, Fill, GradNorm, MovingAverage, OptimizerStep},
};
use sparse24_core::{
    Mask, MaskKind,
    flip::flip_count,
    op::{Adam, MaskedDecay, NonFinite, Optimizer, UpdateRule},
    search::mask_search,
};

use super::{Bench, Draw, Matrix, Output, Values, must};
use crate::oracle::{
    arithmetic::{Arithmetic, UNIT},
    optimizer::Step,
};

/// Every number to the bit, in f32 and as an activation.
pub(super) fn copy_and_fill(bench: &mut Bench<'_>, draw: &Draw) {
    let [p, _, columns, _] = draw.sizes;
    let columns = bench.columns(columns);
    for dtype in [DType::F32, DType::Activation] {
        let values = bench.matrix([p, columns]);
        let values = if dtype == DType::F32 { values } else { bench.storage.rounded(&values) };
        let (from, _) = bench.given(values.clone(), dtype, Region::Activations);
        let output = |bench: &mut Bench<'_>| match dtype {
            DType::F32 => bench.sum("to", [p, columns], false),
            _ => bench.output("to", p, columns),
        };
        let to = output(bench);
        let tensor = to.tensor;
        if !bench.check(&[to], &[Copy { from, to: tensor }.into()], |_| vec![values.clone()]) {
            return;
        }
        let found = bench.download(tensor);
        assert!(super::same_bits(&[found], &[values]), "a copy has other bits");
        for value in [0.0, -0.0, 1.5, f32::NAN, f32::NEG_INFINITY] {
            let to = output(bench);
            let op = Fill { to: to.tensor, value };
            bench.check(&[to], &[op.into()], |_| {
                vec![Matrix::from_elem((p, columns), value.into())]
            });
        }
    }
}

/// An optimizer and its variant, each without and with clipping.
type Rules = [[Optimizer; 2]; 2];

const fn rules(rule: UpdateRule, variant: UpdateRule) -> Rules {
    const fn clipped(rule: UpdateRule) -> [Optimizer; 2] {
        [Optimizer { rule, clip: f32::INFINITY }, Optimizer { rule, clip: 0.5 }]
    }
    [clipped(rule), clipped(variant)]
}

const ADAM: Adam = Adam { beta1: 0.875, beta2: 0.9375, epsilon: 1e-3 };
/// A frozen second moment.
const FROZEN: Adam = Adam { beta2: 1.0, ..ADAM };
static ADAMW: Rules = rules(UpdateRule::AdamW(ADAM), UpdateRule::AdamW(FROZEN));
static L2: Rules = rules(UpdateRule::Adam(ADAM), UpdateRule::Adam(FROZEN));
static SGD: Rules = rules(UpdateRule::Sgd { momentum: 0.875 }, UpdateRule::Sgd { momentum: 0.0 });
static LION: Rules = rules(
    UpdateRule::Lion { beta1: 0.875, beta2: 0.9375 },
    UpdateRule::Lion { beta1: 0.9375, beta2: 0.875 },
);

/// One row of the optimizer's table.
struct Row {
    gradient: Matrix,
    /// w, m and v before the step.
    before: [Matrix; 3],
    weight_decay: f32,
    mask: Option<Mask>,
}

/// A weight or moment, between guard rows unless they would misalign it.
fn updated_in_place(
    bench: &mut Bench<'_>,
    name: &'static str,
    values: Matrix,
    region: Region,
) -> Output {
    let (rows, columns) = values.dim();
    let guards = usize::from(columns.is_multiple_of(8));
    let whole = bench.alloc([rows + 2 * guards, columns], DType::F32, region);
    Output { name, tensor: whole.rows(guards..rows + guards), whole, before: Some(values) }
}

/// AdamW, see [`optimizer`].
pub(super) fn adamw(bench: &mut Bench<'_>, draw: &Draw) {
    optimizer(bench, draw, &ADAMW);
}

/// Adam with L2 regularization, see [`optimizer`].
pub(super) fn adam(bench: &mut Bench<'_>, draw: &Draw) {
    optimizer(bench, draw, &L2);
}

/// SGD with momentum, see [`optimizer`].
pub(super) fn sgd(bench: &mut Bench<'_>, draw: &Draw) {
    optimizer(bench, draw, &SGD);
}

/// Lion, see [`optimizer`].
pub(super) fn lion(bench: &mut Bench<'_>, draw: &Draw) {
    optimizer(bench, draw, &LION);
}

/// The norm of all gradients, and a step with masked decay on pruned, dense and vector parameters;
/// nothing where a gradient is not finite.
fn optimizer(bench: &mut Bench<'_>, draw: &Draw, rules: &'static Rules) {
    bench.tame();
    let [_, q, r, n] = draw.sizes;
    let [clips, varies, on_gradients, on_weights] = draw.options;
    let optimizer = &rules[usize::from(varies)][usize::from(clips)];
    let has_v = optimizer.rule.adam().is_some();
    let [q, r] = [q, r].map(|size| bench.columns(size.next_multiple_of(4)));
    let (mut rows, mut entries, mut outputs) = (Vec::new(), Vec::new(), Vec::<Output>::new());
    for (shape, masked, weight_decay) in
        [([r, q], true, 0.125), ([draw.sizes[1], 8], false, 0.125), ([1, n], false, 0.0)]
    {
        let w = bench.matrix(shape);
        let (m, v) = (bench.matrix(shape), bench.matrix(shape).map(|x| (x * x) as f32));
        let before = [w, m, v.map(|&v| v.into())];
        let gradient = bench.matrix(shape);
        let mask = masked.then(|| {
            let w = before[0].map(|&w| w as f32);
            let mask = mask_search(w.view(), MaskKind::Transposable).expect("tiles");
            let id = bench.mask(shape);
            bench.backend.upload_mask(id, &mask).expect("one shape");
            (id, mask)
        });
        let mut output = |name, region, at: usize| {
            outputs.push(updated_in_place(bench, name, before[at].clone(), region));
            outputs[outputs.len() - 1].tensor
        };
        let (weight, first_moment) =
            (output("w", Region::Parameters, 0), output("m", Region::Moments, 1));
        let second_moment = has_v.then(|| output("v", Region::Moments, 2));
        let (gradient, host) = bench.given(gradient, DType::F32, Region::Gradients);
        let id: Option<MaskId> = mask.as_ref().map(|(id, _)| *id);
        entries.push(OptimizerEntry {
            weight,
            gradient,
            first_moment,
            second_moment,
            weight_decay,
            mask: id,
        });
        rows.push(Row { gradient: host, before, weight_decay, mask: mask.map(|(_, mask)| mask) });
    }
    let table = must(bench.backend.alloc_table(&entries));
    let decay = match (on_gradients, on_weights) {
        (true, _) => MaskedDecay::OnGradients(0.25),
        (_, true) => MaskedDecay::OnWeights(0.25),
        _ => MaskedDecay::None,
    };
    let ops = [Op::from(GradNorm { table }), OptimizerStep { table, optimizer, decay }.into()];
    if !bench.check(&outputs, &ops, |a| updated(a, &rows, optimizer, decay)) {
        return;
    }
    let losses = bench.alloc([1, 1], DType::F32, Region::Activations);
    let norm = norm(&rows);
    let report = bench.backend.report(losses).expect("a report");
    assert!((f64::from(report.grad_norm) - norm).abs() <= 2.0 * UNIT * norm, "{report:?}: {norm}");
    assert_eq!(report.non_finite, None);
    let overflow = Matrix::from_elem(rows[1].gradient.dim(), 3e38);
    for (at, poison, expected) in [
        (1, f64::NAN, NonFinite::Gradient(1)),
        (2, f64::INFINITY, NonFinite::Gradient(2)),
        (1, 3e38, NonFinite::Norm),
    ] {
        let gradient: Tensor = entries[at].gradient;
        let mut values = rows[at].gradient.clone();
        values[[0, 0]] = poison;
        bench.upload(gradient, if expected == NonFinite::Norm { &overflow } else { &values });
        let unchanged: Vec<_> = rows.iter().flat_map(|row| kept(optimizer, &row.before)).collect();
        let found = bench.execute("a step that is not finite", &outputs, |b| b.sequence(&ops));
        assert!(
            super::same_bits(&found.expect("shapes fit"), &unchanged),
            "{expected:?}: an update"
        );
        for expected in [Some(expected), None] {
            let report = bench.backend.report(losses).expect("a report");
            assert_eq!(report.non_finite, expected, "the flag of {poison} in gradient {at}");
        }
        bench.upload(gradient, &rows[at].gradient);
    }
}

fn norm(rows: &[Row]) -> f64 {
    rows.iter().flat_map(|row| row.gradient.iter()).map(|g| g * g).sum::<f64>().sqrt()
}

/// w, m and, where the rule has it, v.
fn kept(optimizer: &Optimizer, state: &[Matrix; 3]) -> Vec<Matrix> {
    state[..if optimizer.rule.adam().is_some() { 3 } else { 2 }].to_vec()
}

/// The state of every row after the step.
fn updated(
    a: &mut Arithmetic,
    rows: &[Row],
    optimizer: &Optimizer,
    decay: MaskedDecay,
) -> Vec<Matrix> {
    let [rate, first, second] = [0.03125_f32, 0.4, 0.2].map(f64::from);
    let step = Step { optimizer: *optimizer, decay, rate, corrections: [first, second] };
    let norm = norm(rows);
    let norm = a.rounded(norm, 1.0, norm);
    let mut all: Vec<_> = rows.iter().map(|row| row.before.clone()).collect();
    let parameters = all.iter_mut().zip(rows).map(|(state, row)| {
        let keeps = |mask: &Mask, at: usize| mask.keeps(at / mask.columns(), at % mask.columns());
        let pruned = move |at| row.mask.as_ref().is_some_and(|mask| !keeps(mask, at));
        (state.each_mut(), &row.gradient, row.weight_decay.into(), pruned)
    });
    step.apply(a, norm, parameters);
    all.iter().flat_map(|state| kept(optimizer, state)).collect()
}

/// The moving average of a weight; nothing where the loss or a gradient is not finite.
pub(super) fn moving_average(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [rows, columns, ..] = draw.sizes;
    let (w, host) = bench.parameter([rows, columns]);
    let before = bench.matrix([rows, columns]);
    let output = updated_in_place(bench, "average", before.clone(), Region::Moments);
    let average = output.tensor;
    let decay = if draw.options[0] { 0.99996 } else { 0.0 };
    let ops = [MovingAverage { w, average, decay }.into()];
    let oracle = |a: &mut Arithmetic| {
        let [kept, new] = [f64::from(decay), f64::from(1.0 - decay)];
        vec![Matrix::from_shape_fn(before.dim(), |at| {
            let [old, w] = [kept * before[at], new * host[at]];
            a.rounded(old + w, 2.0, old.abs() + w.abs())
        })]
    };
    let outputs = [output];
    if !bench.check(&outputs, &ops, oracle) {
        return;
    }
    let [m, gradient] = [Region::Moments, Region::Gradients].map(|region| {
        let values = Matrix::from_elem((1, 4), f64::NAN);
        bench.given(values, DType::F32, region).0
    });
    let entry = OptimizerEntry {
        weight: bench.parameter([1, 4]).0,
        gradient,
        first_moment: m,
        second_moment: None,
        weight_decay: 0.0,
        mask: None,
    };
    let table = must(bench.backend.alloc_table(&[entry]));
    let raised = |backend: &mut dyn Backend| {
        backend.run(GradNorm { table })?;
        backend.sequence(&ops)
    };
    let found = bench.execute("a step that is not finite", &outputs, raised).expect("shapes fit");
    assert!(super::same_bits(&found, &[before]), "the average of a skipped step changes");
    let losses = bench.alloc([1, 1], DType::F32, Region::Activations);
    bench.backend.report(losses).expect("a report that lowers the flag");
}

/// Flips of two masks; the L1 distance of two tensors.
pub(super) fn distances(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [_, q, r, _] = draw.sizes.map(|size| bench.columns(size.next_multiple_of(4)));
    let [(a, a_host), (b, b_host)] = [0; 2].map(|_| bench.parameter([r, q]));
    let masks = [&a_host, &b_host].map(|w| {
        let w = w.map(|&w| w as f32);
        mask_search(w.view(), MaskKind::Transposable).expect("tiles")
    });
    let ids = masks.each_ref().map(|mask| {
        let id = bench.mask([r, q]);
        bench.backend.upload_mask(id, mask).expect("one shape");
        id
    });
    let expected = flip_count(&masks[0], &masks[1]).expect("one shape");
    let few = q * r < 128 || bench.values != Values::Plain;
    assert!(expected > 0 || few, "masks of random weights are equal");
    assert_eq!(bench.backend.flip_count(ids[0], ids[1]).expect("one shape"), expected);
    assert_eq!(bench.backend.flip_count(ids[0], ids[0]).expect("one shape"), 0);
    let expected: f64 = a_host.iter().zip(&b_host).map(|(a, b)| (a - b).abs()).sum();
    let found = bench.backend.l1_distance(a, b).expect("one shape");
    let bound = (q * r + 2) as f64 * f64::EPSILON * expected;
    assert!((found - expected).abs() <= bound, "{found} instead of {expected}");
    let mixed = |at: (usize, usize)| if at.1 == 0 { a_host[at] } else { b_host[at] };
    let mixed = Matrix::from_shape_fn((r, q), mixed);
    let (c, _) = bench.given(mixed, DType::F32, Region::Parameters);
    match bench.backend.l1_distance(a.columns(0..1), c.columns(0..1)) {
        Ok(found) => assert_eq!(found, 0.0, "the distance of equal columns"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Contract, "{error}"),
    }
}
