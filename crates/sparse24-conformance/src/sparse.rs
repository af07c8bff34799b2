//! Masks and compressed operands, bit for bit with core.

use ndarray::{Array2, s};
use sparse24_backend::{
    DType, Gradient24, Region, Tensor, Weight24,
    op::{
        CompressWeight, Gradient, LinearDgrad, LinearForward, LinearWgrad, MaskSearch,
        MvueCompress, Orientation, PermutedMask, Weight,
    },
};
use sparse24_core::{
    Mask, MaskKind,
    mvue::{self, Estimator},
    op::Accumulate,
    permute,
    philox::{Purpose, Site, Stream},
    prune::{self, ValueMap},
    search,
};

use super::{ADDRESS, Bench, Draw, Matrix, must, transposed};

const SITE: Site = Site::new(Purpose::Mvue, 3);

fn stream(site: Site) -> Stream {
    Stream::new(ADDRESS.seed, site, ADDRESS.micro_step, ADDRESS.step)
}

fn narrow(x: &Matrix) -> Array2<f32> {
    x.map(|&x| x as f32)
}

/// Rows and columns of a weight that consists of tiles.
fn tiled(bench: &Bench<'_>, draw: &Draw) -> [usize; 2] {
    let [_, q, r, _] = draw.sizes.map(|size| bench.columns(size.next_multiple_of(4)));
    [r, q]
}

fn kind(draw: &Draw) -> MaskKind {
    if draw.options[0] { MaskKind::Transposable } else { MaskKind::RowWise }
}

/// The mask that core finds.
fn searched(w: &Matrix, kind: MaskKind) -> Mask {
    search::mask_search(narrow(w).view(), kind).expect("tiles")
}

/// S(W) of an identity map, allocated and compressed, and its values as a product reads them.
pub(super) fn pruned(
    bench: &mut Bench<'_>,
    w: Tensor,
    values: &Matrix,
    kind: MaskKind,
) -> (Weight24, Matrix) {
    let (orientation, map) = (orientation(kind), ValueMap::Identity);
    let mask = bench.mask(w.shape);
    let out = must(bench.backend.alloc_weight24(w.shape, orientation));
    bench.run(MaskSearch { w, kind, mask });
    bench.run(CompressWeight { w, mask, orientation, map, out });
    let pruned = prune::masked(narrow(values).view(), &searched(values, kind)).expect("one shape");
    (out, bench.storage.rounded(&pruned.map(|&x| f64::from(x))))
}

fn orientation(kind: MaskKind) -> Orientation {
    match kind {
        MaskKind::Transposable => Orientation::Both,
        _ => Orientation::Forward,
    }
}

fn sample(dz: &Matrix, estimator: Estimator) -> Matrix {
    let sampled = mvue::compress(narrow(dz).view(), estimator, stream(SITE)).expect("padded");
    sampled.decode().map(|&x| f64::from(x))
}

/// The sampling of dZ into new memory: for a larger batch, as in training.
pub(super) fn sampling(bench: &mut Bench<'_>, dz: Tensor, estimator: Estimator) -> MvueCompress {
    let [p, r] = dz.shape;
    let out = must(bench.backend.alloc_gradient24([p + 3, r]));
    MvueCompress { dz, site: SITE, estimator, out }
}

/// The present values of a sample `[r, p]`.
pub(super) fn read(bench: &mut Bench<'_>, sample: &MvueCompress) -> Matrix {
    let [p, r] = sample.dz.shape;
    let columns = bench.columns(p);
    let identity = Matrix::eye(columns).slice_move(s![..p, ..]);
    let (x, _) = bench.given(identity, DType::Activation, Region::Activations);
    let dw = bench.sum("MVUE(dZ^T)", [r, columns], false).tensor;
    let (dz, accumulate) = (Gradient::Sampled(sample.out), Accumulate::Overwrite);
    bench.run(LinearWgrad { dz, x, dw, accumulate });
    bench.download(dw)
}

/// MVUE(dZ^T), allocated and sampled, and its values `[r, p]`.
pub(super) fn sampled(
    bench: &mut Bench<'_>,
    dz: Tensor,
    values: &Matrix,
    exact: bool,
) -> (Gradient24, Matrix) {
    let estimator = if exact { Estimator::Exact } else { Estimator::Approximate };
    let op = sampling(bench, dz, estimator);
    let out = op.out;
    bench.work(op, None);
    if bench.prepared.is_some() {
        return (out, Matrix::zeros((dz.shape[1], 0)));
    }
    let sampled = sample(values, estimator);
    let sampled = sampled.slice(s![.., ..dz.shape[0]]).to_owned();
    (out, bench.storage.rounded(&sampled))
}

/// Every kind of mask, of any values.
pub(super) fn mask_search(bench: &mut Bench<'_>, draw: &Draw) {
    let shape = tiled(bench, draw);
    let (w, values) = bench.parameter(shape);
    let mask = bench.mask(shape);
    let kind = if draw.options[1] { MaskKind::ColumnWise } else { kind(draw) };
    if bench.prepared.is_some() {
        return bench.work(MaskSearch { w, kind, mask }, Some(mask));
    }
    let expected = searched(&values, kind);
    // A search overwrites what was there.
    for before in [Mask::empty(shape[0], shape[1]).expect("tiles"), expected.clone()] {
        bench.backend.upload_mask(mask, &before).expect("one shape");
        bench.run(MaskSearch { w, kind, mask });
        let found = bench.backend.download_mask(mask).expect("a mask");
        assert!(found == expected, "{kind:?}: {found:?} instead of {expected:?}");
    }
}

/// A row-wise mask, and the two largest of four rows in an order.
pub(super) fn permuted_mask(bench: &mut Bench<'_>, draw: &Draw) {
    let shape = tiled(bench, draw);
    let (w, values) = bench.parameter(shape);
    let [mask, out] = [0; 2].map(|_| bench.mask(shape));
    bench.run(MaskSearch { w, kind: MaskKind::RowWise, mask });
    let forward = searched(&values, MaskKind::RowWise);
    let order = permute::row_order(&forward, stream(Site::new(Purpose::Permutation, 3)));
    bench.run(PermutedMask { w, mask, order: &order, out });
    let expected = permute::permuted_mask(narrow(&values).view(), &forward, &order);
    let found = bench.backend.download_mask(out).expect("a mask");
    assert!(found == expected.expect("one shape"), "in the order {order:?}");
    if values.iter().any(|x| !x.is_finite()) {
        return;
    }
    let (orientation, map) = (Orientation::Permuted, ValueMap::Identity);
    let weight = must(bench.backend.alloc_weight24(shape, orientation));
    bench.run(CompressWeight { w, mask: out, orientation, map, out: weight });
    let expected = prune::masked(narrow(&values).view(), &found).expect("one shape");
    assert_dgrad_reads(bench, weight, &expected.map(|&x| f64::from(x)));
}

/// dZ = I reads S(W) through the product.
fn assert_dgrad_reads(bench: &mut Bench<'_>, weight: Weight24, expected: &Matrix) {
    let (r, q) = expected.dim();
    let probe = bench.probe(r);
    let (dz, _) = bench.given(probe, DType::Activation, Region::Activations);
    let dx = bench.output("S(W)", dz.shape[0], q);
    let op = LinearDgrad { dz, weight: Weight::Pruned(weight), dx: dx.tensor };
    let expected = bench.storage.rounded(expected);
    bench.check(&[dx], &[op.into()], |_| vec![expected.clone()]);
}

/// Both maps of kept values, read through the products that the mask allows.
pub(super) fn compress_weight(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let (shape, kind) = (tiled(bench, draw), kind(draw));
    let (w, values) = bench.parameter(shape);
    let orientation = orientation(kind);
    let mask = bench.mask(shape);
    let out = must(bench.backend.alloc_weight24(shape, orientation));
    let searched = searched(&values, kind);
    bench.backend.upload_mask(mask, &searched).expect("one shape");
    let soft = draw.options[1] && kind == MaskKind::RowWise;
    let map = if soft { ValueMap::SoftThreshold { scale: 1.25 } } else { ValueMap::Identity };
    bench.work(CompressWeight { w, mask, orientation, map, out }, None);
    let values = narrow(&values);
    let expected = if soft {
        let groups = values.as_slice().expect("row-major").as_chunks::<4>().0.iter();
        let mapped = groups.flat_map(|&x| prune::group(x, prune::largest_two(x), map));
        Array2::from_shape_vec(shape, mapped.collect()).expect("whole groups")
    } else {
        prune::masked(values.view(), &searched).expect("one shape")
    };
    let expected = expected.map(|&x| f64::from(x));
    let q = shape[1];
    let probe = bench.probe(q);
    let (x, _) = bench.given(probe, DType::Activation, Region::Activations);
    let z = bench.output("S(W)^T", x.shape[0], shape[0]);
    let op = LinearForward { x, weight: Weight::Pruned(out), bias: None, z: z.tensor };
    let read = bench.storage.rounded(&transposed(&expected));
    bench.check(&[z], &[op.into()], |_| vec![read.clone()]);
    assert_dgrad_reads(bench, out, &expected);
}

/// Both estimators: the sampled indices are core's, and the values within a few roundings.
pub(super) fn mvue_compress(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [p, _, r, _] = draw.sizes;
    let (p, r) = (p.max(1), bench.columns(r));
    let (dz, values) = bench.activation(p, r);
    let (out, expected) = sampled(bench, dz, &values, draw.options[0]);
    let columns = bench.columns(p);
    let mut probe = bench.probe(columns);
    probe = transposed(&probe).slice_move(s![..p, ..]);
    let columns = probe.ncols();
    let (x, _) = bench.given(probe, DType::Activation, Region::Activations);
    let dw = bench.sum("MVUE(dZ^T)", [r, columns], false);
    let accumulate = Accumulate::Overwrite;
    let op = LinearWgrad { dz: Gradient::Sampled(out), x, dw: dw.tensor, accumulate };
    let storage = bench.storage;
    let known = expected.ncols();
    let value = |(i, j)| if j < known { expected[[i, j]] } else { 0.0 };
    let wide = Matrix::from_shape_fn((r, columns), value);
    let tensor = dw.tensor;
    let checked = bench.check(&[dw], &[op.into()], |a| {
        // Kept values may round to a neighbour where they are stored.
        vec![a.map(&wide, 8.0 + storage.operand_units(), |x| (x, x))]
    });
    if !checked {
        return;
    }
    let found = bench.download(tensor);
    let indices = |x: &Matrix| x.map(|&x| x != 0.0);
    assert_eq!(indices(&found), indices(&wide), "other indices are sampled");
}
