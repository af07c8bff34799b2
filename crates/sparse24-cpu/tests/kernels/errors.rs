//! Operands that do not fit.

use ndarray::{Array1, Array2, s};
use sparse24_core::{
    Mask, MaskKind,
    compressed::Compressed24,
    mvue::Estimator,
    op::{Accumulate, Activation, AttentionMask::Full, Dropout, MaskedDecay},
    philox::{Purpose, Site, Stream},
    prune::ValueMap,
};
use sparse24_cpu::{
    Error,
    activation::{activation_backward, activation_forward},
    add::add,
    attention::attention_forward,
    bias::bias_forward,
    dropout::dropout,
    embedding::embed_forward,
    gemm::{matmul, matmul_bias},
    loss::head_loss,
    mvue::{mvue_compress, mvue_prune},
    norm::norm_forward,
    optimizer::l1_distance,
    permute::permuted_mask,
    prune::compress_weight,
    rows::gather_rows,
    search::mask_search,
    spmm24::spmm24,
    threshold::soft_threshold,
};

use crate::{
    edges::{adamw, mask, shape},
    input::poison,
};

#[test]
fn shape_errors_name_the_operand() {
    let zeros = |shape: [usize; 2]| Array2::<f32>::zeros(shape);
    let product = |b: [usize; 2], c: [usize; 2]| {
        let overwrite = Accumulate::Overwrite;
        matmul(zeros([2, 3]).view(), zeros(b).view(), zeros(c).view_mut(), overwrite)
    };
    let stream = Stream::new(9, Site::new(Purpose::Mvue, 1), 2, 3);
    let attend = |shape, lengths: Option<&[u32]>, words: Option<usize>| {
        let (x, mut o, mut lse) = (zeros([6, 4]), poison([6, 4]), poison([4, 3]));
        let ([q, k, v], mut kept) = ([x.view(); 3], vec![0; words.unwrap_or(0)]);
        let rule = Dropout { p: 0.5, site: Site::new(Purpose::Dropout, 1) };
        let dropout = words.map(|_| (&rule, stream, &mut kept[..]));
        attention_forward(shape, q, k, v, lengths, o.view_mut(), lse.view_mut(), dropout)
    };
    let square = shape([2, 2, 3, 3], Full);
    let norm = || {
        let [x, mut residual, mut y, mut stats] = [[2, 3], [2, 3], [2, 3], [2, 2]].map(zeros);
        let [residual, y, stats] = [&mut residual, &mut y, &mut stats].map(|x| x.view_mut());
        norm_forward(x.view(), None, zeros([1, 4]).row(0), None, 1e-5, residual, y, stats)
    };
    let step = |g: [usize; 2], rows| {
        let mut state = [[6, 8]; 3].map(zeros);
        adamw(&mut state, &zeros(g), 0.95, MaskedDecay::None, &mask([rows, 8]))
    };
    let embed = |context| {
        let (wte, wpe, mut out) = (zeros([3, 2]), zeros([1, 2]), zeros([2, 2]));
        embed_forward(&[1, 2], context, (1.0, wte.view()), Some(wpe.view()), out.view_mut())
    };
    let activate = |h: [usize; 2], dz: [usize; 2]| {
        let (z, mut h) = (zeros([3, 8]), zeros(h));
        activation_forward(Activation::Geglu, z.view(), h.view_mut())?;
        activation_backward(Activation::Geglu, h.view(), z.view(), zeros(dz).view_mut())
    };
    let (w, empty) = (zeros([8, 12]), |rows, columns| Mask::empty(rows, columns).unwrap());
    let search = |columns| mask_search(w.view(), MaskKind::Transposable, &mut empty(8, columns));
    let permute = |order: &[u32]| permuted_mask(w.view(), &empty(8, 12), order, &mut empty(8, 12));
    let compressed = |rows, columns| Compressed24::<f32>::zeros(rows, columns).unwrap();
    let compress = |[mut forward, mut dgrad]: [Compressed24<f32>; 2]| {
        let map = ValueMap::Identity;
        compress_weight(w.view(), &empty(8, 12), map, &mut forward, &mut dgrad)
    };
    let spmm = |b: [usize; 2], d: [usize; 2]| {
        spmm24(&compressed(8, 12), zeros(b).view(), zeros(d).view_mut())
    };
    let soften =
        |out: [usize; 2]| soft_threshold(w.view(), &empty(8, 12), 1.0, zeros(out).view_mut());
    let estimate = |mut out| mvue_compress(w.view(), Estimator::Exact, stream, &mut out);
    let sample =
        |out: [usize; 2]| mvue_prune(w.view(), Estimator::Exact, stream, zeros(out).view_mut());
    let bias = bias_forward(zeros([2, 3]).view_mut(), Array1::zeros(2).view());
    let (ab, mut c) = (zeros([3, 3]), zeros([3, 3]));
    let biased = matmul_bias(ab.view(), ab.view(), Array1::zeros(2).view(), c.view_mut());
    let sum = |x: [usize; 2], delta: [usize; 2]| {
        add(Some(zeros(x).view()), zeros(delta).view(), zeros([2, 3]).view_mut())
    };
    let targets = head_loss(zeros([3, 5]).view_mut(), &[1], None, 0.0, None, 1.0).map(drop);
    for (result, operand) in
        [(embed(0), "context"), (attend(shape([2, 0, 3, 3], Full), None, None), "heads")]
    {
        let error = result.expect_err(operand).to_string();
        assert!(error.contains(&format!("{operand} is 0")), "{error}");
    }
    for (result, operand, expected, found) in [
        (product([4, 5], [2, 5]), "b", [3, 5], [4, 5]),
        (product([3, 5], [5, 2]), "c", [2, 5], [5, 2]),
        (attend(shape([2, 3, 3, 3], Full), None, None), "q", [6, 3], [6, 4]),
        (attend(shape([2, 2, 3, 2], Full), None, None), "k", [4, 4], [6, 4]),
        (attend(square, Some(&[3]), None), "lengths", [2, 3], [1, 3]),
        (attend(square, Some(&[0, 4]), None), "lengths", [2, 3], [2, 4]),
        (attend(square, None, Some(511)), "kept", [1, 512], [1, 511]),
        (norm(), "gamma", [1, 3], [1, 4]),
        (step([1, 47], 4), "g", [1, 48], [1, 47]),
        (step([6, 8], 4), "mask", [1, 48], [1, 32]),
        (l1_distance(&[0.0; 3], &[0.0; 2]).map(drop), "b", [1, 3], [1, 2]),
        (bias, "bias", [1, 3], [1, 2]),
        (biased, "bias", [1, 3], [1, 2]),
        (sum([3, 2], [2, 3]), "x", [2, 3], [3, 2]),
        (sum([2, 3], [2, 4]), "delta", [2, 3], [2, 4]),
        (embed(2), "wpe", [2, 2], [1, 2]),
        (targets, "targets", [3, 1], [1, 1]),
        (activate([3, 5], [3, 8]), "z", [3, 10], [3, 8]),
        (activate([3, 4], [3, 4]), "dz", [3, 8], [3, 4]),
        (search(8), "mask", [8, 12], [8, 8]),
        (permute(&[0, 1, 2]), "order", [1, 8], [1, 3]),
        (compress([compressed(12, 8), compressed(8, 12)]), "dgrad", [12, 8], [8, 12]),
        (spmm([11, 3], [8, 3]), "b", [12, 3], [11, 3]),
        (spmm([12, 3], [8, 4]), "d", [8, 3], [8, 4]),
        (soften([12, 8]), "out", [8, 12], [12, 8]),
        (estimate(compressed(12, 4)), "out", [12, 8], [12, 4]),
        (sample([12, 8]), "out", [8, 12], [12, 8]),
    ] {
        let Err(Error::Shape { operand: named, expected: wanted, found: had, .. }) = result else {
            panic!("{operand}: {result:?}");
        };
        assert_eq!((named, wanted, had), (operand, expected, found));
        assert!(result.unwrap_err().to_string().contains(&format!("{operand} should be")));
    }
}

#[test]
fn bad_tokens_and_layouts_are_errors() {
    let mut logits = Array2::zeros([3, 5]);
    let error = head_loss(logits.view_mut(), &[1, 5, 2], Some(2), 0.0, None, 1.0).unwrap_err();
    assert!(matches!(error, Error::Token { token: 5, position: 1, vocabulary: 5, .. }), "{error}");
    assert!(error.to_string().contains("id 5 at position 1"), "{error}");
    let (wte, mut out) = (Array2::zeros([3, 2]), poison([2, 2]));
    let error = embed_forward(&[1, 3], 2, (1.0, wte.view()), None, out.view_mut()).unwrap_err();
    assert!(matches!(error, Error::Token { token: 3, position: 1, vocabulary: 3, .. }), "{error}");
    let [x, mut out] = [[4, 2], [2, 2]].map(Array2::zeros);
    let error = gather_rows(x.view(), &[0, 9], out.view_mut()).unwrap_err();
    assert!(error.to_string().contains("id 9 at position 1 is not below 4"), "{error}");
    let gaps = logits.slice_mut(s![.., 1..]);
    let error = head_loss(gaps, &[1, 0, 1], None, 0.0, None, 1.0).unwrap_err();
    assert!(matches!(error, Error::Layout { operand: "logits", .. }), "{error}");
    let rule = Dropout { p: 0.3, site: Site::new(Purpose::Dropout, 1) };
    let stream = Stream::new(9, rule.site, 2, 3);
    let error = dropout(logits.slice_mut(s![.., 1..3]), &rule, stream).unwrap_err();
    assert!(matches!(error, Error::Layout { operand: "x", .. }), "{error}");
}

#[test]
fn errors_of_core_are_passed_on() {
    use sparse24_core::Error::{NotTiled, Structure};
    let (ragged, mut mask) = (Array2::<f32>::zeros([8, 6]), Mask::empty(8, 8).unwrap());
    let error = mask_search(ragged.view(), MaskKind::RowWise, &mut mask).unwrap_err();
    assert!(matches!(error, Error::Semantics(NotTiled { rows: 8, columns: 6, .. })), "{error}");
    let mut w = Array2::<f32>::zeros([8, 8]);
    let row_wise = Mask::from_tiles(8, 8, vec![0x3333; 4]).unwrap();
    let [mut forward, mut dgrad] = [(); 2].map(|()| Compressed24::<f32>::zeros(8, 8).unwrap());
    let map = ValueMap::Identity;
    for (error, wanted) in [
        (
            compress_weight(w.view(), &row_wise, map, &mut forward, &mut dgrad),
            MaskKind::Transposable,
        ),
        (soft_threshold(w.clone().view(), &mask, 1.0, w.view_mut()), MaskKind::RowWise),
    ] {
        let Err(Error::Semantics(Structure { expected, .. })) = error else { panic!("{error:?}") };
        assert_eq!(expected, wanted);
    }
}
