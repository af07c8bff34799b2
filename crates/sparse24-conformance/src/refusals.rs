//! Operands that do not fit: a backend refuses them, and goes on.

use sparse24_backend::{
    Backend, DType, Error, ErrorKind, Op, OptimizerEntry, Region,
    op::{
        Add, AttentionBackward, AttentionForward, BiasGrad, CompressWeight, Copy, DropSequences,
        DropoutOp, Embed, EmbedForward, Fill, GatherRows, Gradient, HeadGradients, HeadLoss,
        LinearForward, LinearWgrad, MaskSearch, MvueCompress, NormForward, Orientation,
        PermutedMask, Scale, TargetLoss, Weight,
    },
};
use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    op::{Accumulate, AttentionMask, AttentionShape, Dropout},
    philox::{Purpose, Site},
    prune::ValueMap,
};

/// Checks that a backend refuses operands that do not fit, with an error that names the operation,
/// and that its tensors can be used afterwards.
///
/// # Panics
/// If it does not.
pub fn refusals(backend: &mut dyn Backend) {
    let mut of = |rows, columns, dtype| {
        let region = match dtype {
            DType::F32 => Region::Parameters,
            DType::Activation | DType::U32 => Region::Activations,
        };
        let t = backend.alloc("conformance", [rows, columns], dtype, region);
        t.expect("little memory")
    };
    let mut x = |rows, columns| of(rows, columns, DType::Activation);
    let [x12, x22, x24, x32, x33] = [x(1, 2), x(2, 2), x(2, 4), x(3, 2), x(3, 3)];
    let [x42, x44, x84, none] = [x(4, 2), x(4, 4), x(8, 4), x(0, 0)];
    let [out22, out24, out44, out32] = [x(2, 2), x(2, 4), x(4, 4), x(3, 2)];
    let [qkv, dqkv] = [x(4, 12), x(4, 12)];
    let mut w = |rows, columns| of(rows, columns, DType::F32);
    let [w14, w22, w24, w32, w33] = [w(1, 4), w(2, 2), w(2, 4), w(3, 2), w(3, 3)];
    let [w42, w44, w84, one, nothing] = [w(4, 2), w(4, 4), w(8, 4), w(1, 1), w(0, 0)];
    let [dw22, dw42, dw44] = [w(2, 2), w(4, 2), w(4, 4)];
    let [ids, many] = [of(2, 1, DType::U32), of(2, 2, DType::U32)];
    let [mask44, mask84, other84] =
        [[4, 4], [8, 4], [8, 4]].map(|shape| backend.alloc_mask(shape).expect("little memory"));
    let mut pruned = |shape, orientation| backend.alloc_weight24(shape, orientation);
    let both = pruned([4, 4], Orientation::Both).expect("little memory");
    let permuted_only = pruned([4, 4], Orientation::Permuted).expect("little memory");
    let untiled = pruned([5, 7], Orientation::Both).map(drop);
    let g44 = backend.alloc_gradient24([4, 4]).expect("little memory");

    let dropout = Dropout { p: 0.0, site: Site::new(Purpose::Dropout, 0) };
    let site = Site::new(Purpose::Mvue, 0);
    let forward = |w, bias, z| LinearForward { x: x24, weight: Weight::Dense(w), bias, z };
    let head = |logits, targets| HeadLoss {
        x: x24,
        embedding: w44,
        bias: None,
        targets,
        kind: TargetLoss::CrossEntropy { smoothing: 0.0, mixed: None },
        logits,
        loss: one,
        gradients: None,
    };
    let [q, k, v] = qkv.split();
    let shape =
        AttentionShape { batch: 1, heads: 2, queries: 4, keys: 4, mask: AttentionMask::Causal };
    let attention =
        AttentionForward { shape, q, k, v, lengths: None, dropout: None, o: out44, lse: w24 };
    let backward = |dqkv| AttentionBackward { forward: attention, d_o: x44, dqkv };
    let [dq, dk, dv] = dqkv.split();
    let embed = |tokens, rows| Embed {
        tokens,
        sequence_length: 1,
        scale: 1.0,
        token_table: w42,
        position_table: None,
        rows,
    };
    let compress = |w, mask, out| CompressWeight {
        w,
        mask,
        orientation: Orientation::Both,
        map: ValueMap::Identity,
        out,
    };
    let permuted = |order| PermutedMask { w: w44, mask: mask44, order, out: mask84 };
    let sampled = Gradient::Sampled(g44);
    let accumulate = Accumulate::Overwrite;
    let gradients = HeadGradients { dx: out24, dembedding: w44, dbias: None, accumulate };
    let refused: &[Op<'_>] = &[
        Copy { from: x22, to: x33 }.into(),
        Copy { from: x12, to: out32 }.into(),
        Copy { from: ids, to: x42.rows(0..2).columns(0..1) }.into(),
        Copy { from: x42.rows(0..2), to: x42.rows(2..4) }.into(),
        Fill { to: ids, value: 0.0 }.into(),
        DropoutOp { x: x22, out: out32, dropout }.into(),
        DropoutOp { x: x42.rows(0..2), out: x42.rows(2..4), dropout }.into(),
        DropSequences { x: x12, out: out32, sequence_length: 1, dropout }.into(),
        Add { x: x22, delta: x32, out: out22 }.into(),
        Add { x: x22, delta: out22, out: out22 }.into(),
        NormForward { x: x24, gamma: w22, beta: None, epsilon: 0.0, y: out24, stats: dw22 }.into(),
        forward(w33, None, out24).into(),
        forward(w44, Some(w42.columns(0..1)), out24).into(),
        forward(w44, Some(w14), x24).into(),
        LinearWgrad { dz: sampled, x: x84, dw: dw44, accumulate }.into(),
        BiasGrad { dz: x24, db: dw42.columns(0..1), accumulate }.into(),
        head(none, ids).into(),
        head(out24.first_rows(0), ids).into(),
        head(out24, ids.first_rows(1)).into(),
        head(out24, many.columns(0..1)).into(),
        head(out24, x42.rows(0..2).columns(0..1)).into(),
        HeadLoss { gradients: Some(gradients), ..head(out24, ids) }.into(),
        AttentionForward { shape: AttentionShape { heads: 0, ..shape }, ..attention }.into(),
        AttentionForward { o: q, ..attention }.into(),
        backward([dv, dk, dq]).into(),
        backward([dq, dk, out44]).into(),
        EmbedForward(embed(x42.rows(0..2).columns(0..1), out22)).into(),
        EmbedForward(embed(ids, out32)).into(),
        GatherRows { x: x42, rows: ids, out: out32 }.into(),
        Scale { x: w22, scale: nothing, out: dw22 }.into(),
        MaskSearch { w: w84, kind: MaskKind::RowWise, mask: mask44 }.into(),
        compress(w84, mask44, both).into(),
        compress(w84, mask84, both).into(),
        MvueCompress { dz: x84, site, estimator: Estimator::Exact, out: g44 }.into(),
        MvueCompress { dz: x42, site, estimator: Estimator::Exact, out: g44 }.into(),
        // Activations are f32 on some devices only.
        forward(x44, None, out24).into(),
        Scale { x: x22, scale: one, out: dw22 }.into(),
        Add { x: w22, delta: x22, out: out22 }.into(),
        MaskSearch { w: x44, kind: MaskKind::RowWise, mask: mask44 }.into(),
        MvueCompress { dz: w44, site, estimator: Estimator::Exact, out: g44 }.into(),
        permuted(&[0, 1, 2]).into(),
        permuted(&[0, 1, 2, 4]).into(),
        permuted(&[0, 1, 2, 2]).into(),
    ];
    let names = |what: &dyn core::fmt::Debug, result: Result<(), Error>| {
        let error = result.map(|()| panic!("{what:?} is not refused")).expect_err("no panic");
        let kinds = [ErrorKind::Contract, ErrorKind::Input];
        assert!(kinds.contains(&error.kind()), "{what:?}: {error}");
    };
    for op in refused {
        names(op, backend.execute(op));
        names(op, backend.sequence(&[*op]));
    }
    let norm = NormForward { x: out24, gamma: w22, beta: None, epsilon: 0.0, y: x24, stats: dw22 };
    let fused = [Add { x: x24, delta: x84.rows(0..2), out: out24 }.into(), norm.into()];
    names(&fused, backend.sequence(&fused));

    // wgpu multiplies S(W) densely in any orientation.
    if backend.device().backend != "wgpu" {
        let (weight, z) = (Weight::Pruned(permuted_only), out24);
        let forward = LinearForward { x: x24, weight, bias: None, z };
        names(&forward, backend.execute(&forward.into()));
    }

    let entry = OptimizerEntry {
        weight: w22,
        gradient: w42.rows(0..2),
        first_moment: dw22,
        second_moment: None,
        weight_decay: 0.0,
        mask: None,
    };
    let mut table = |entry| backend.alloc_table(&[entry]).map(drop);
    names(&"gaps", table(OptimizerEntry { gradient: w24.columns(0..2), ..entry }));
    names(&"a shape", table(OptimizerEntry { first_moment: w32, ..entry }));
    names(&"one buffer", table(OptimizerEntry { first_moment: w22, ..entry }));
    names(&"a mask", table(OptimizerEntry { mask: Some(mask44), ..entry }));
    names(&"an untiled weight", untiled);
    names(&"two shapes", backend.l1_distance(w24, w42).map(drop));
    names(&"two masks", backend.flip_count(mask44, other84).map(drop));
    names(&"floats for ids", backend.upload(ids, &[0.0; 2]));
    names(&"ids for floats", backend.upload_ids(x12, &[0; 2]));
    names(&"few floats", backend.upload(x12, &[0.0]));
    names(&"few ids", backend.upload_ids(ids, &[0]));
    names(&"ids as floats", backend.download(ids).map(drop));
    names(&"ids as losses", backend.report(ids).map(drop));

    for t in [x22, out22, out24, out32, out44, x42, dqkv, dw22, dw44, w44] {
        backend.download(t).expect("a tensor that an operation could not write");
    }
}
