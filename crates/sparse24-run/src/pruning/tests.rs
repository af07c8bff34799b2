//! Compares every byte of pruned files with the masks of core.

use std::{
    collections::HashMap,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
};

use half::{bf16, f16};
use ndarray::Array2;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sparse24_core::{Mask, MaskKind, search};

use super::*;
fn all(kind: MaskKind) -> Selection<'static> {
    Selection { kind, include: &|_| true, embeddings: Embeddings::Skip }
}

fn verify_file(path: &Path, selection: Selection<'_>) -> Result<Vec<TensorReport<Verdict>>, Error> {
    verify(path, selection, &mut |_, _| Ok(()))
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Prunes the file that [`Folder::write`] wrote; returns the output and the reports.
    fn prune(&self, kind: MaskKind, search: Search) -> (PathBuf, Vec<TensorReport<Pruned>>) {
        let (input, output) = (self.path("in.safetensors"), self.path("out.safetensors"));
        let reports =
            prune(&input, &output, all(kind), search, Unprunable::Copy, &mut |_, _| Ok(()))
                .unwrap();
        (output, reports)
    }

    fn write(&self, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> PathBuf {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap())
        });
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = self.path("in.safetensors");
        fs::write(&path, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
        path
    }
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Values without order or ties.
fn mixed(count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| ((i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32) - 1.0)
        .collect()
}

fn mask_of(values: &[f32], [rows, columns]: [usize; 2], kind: MaskKind, how: Search) -> Mask {
    let w = Array2::from_shape_vec((rows, columns), values.to_vec()).unwrap();
    match how {
        Search::Greedy if kind == MaskKind::Transposable => {
            search::mask_search_greedy(w.view()).unwrap()
        }
        _ => search::mask_search(w.view(), kind).unwrap(),
    }
}

#[test]
fn every_dtype_kind_and_search_prunes_what_core_prunes() {
    let folder = Folder::new();
    let (values, shape) = (mixed(8 * 12), [8, 12]);
    type Convert = fn(f32) -> (Vec<u8>, f32);
    let dtypes: [(Dtype, Convert); 4] = [
        (Dtype::F32, |v| (v.to_le_bytes().to_vec(), v)),
        (Dtype::F16, |v| (f16::from_f32(v).to_le_bytes().to_vec(), f16::from_f32(v).to_f32())),
        (Dtype::BF16, |v| (bf16::from_f32(v).to_le_bytes().to_vec(), bf16::from_f32(v).to_f32())),
        (Dtype::F64, |v| {
            ((f64::from(v) + 1e-12).to_le_bytes().to_vec(), (f64::from(v) + 1e-12) as f32)
        }),
    ];
    for (dtype, convert) in dtypes {
        let (elements, searched): (Vec<_>, Vec<f32>) = values.iter().map(|&v| convert(v)).unzip();
        let bias = ("bias", Dtype::F32, [3].as_slice(), f32s(&[1.0, 2.0, 3.0]));
        let input = folder.write(&[bias, ("w", dtype, &shape, elements.concat())]);
        let before = fs::read(&input).unwrap();
        let w = SafeTensors::deserialize(&before).unwrap().tensor("w").unwrap().data().as_ptr();
        let (data, width) = (w as usize - before.as_ptr() as usize, elements[0].len());
        for (kind, how) in
            MaskKind::ALL.iter().flat_map(|&k| [(k, Search::Exact), (k, Search::Greedy)])
        {
            let (output, reports) = folder.prune(kind, how);
            let mask = mask_of(&searched, shape, kind, how);
            let keeps = |at: usize| mask.keeps(at / 12, at % 12);
            let mut expected = before.clone();
            for at in (0..values.len()).filter(|&at| !keeps(at)) {
                expected[data + at * width..][..width].fill(0);
            }
            assert!(fs::read(&output).unwrap() == expected, "{dtype} {kind} {how:?}");
            let norm = |among: &dyn Fn(usize) -> bool| -> f64 {
                let magnitudes = searched.iter().map(|v| f64::from(v.abs())).enumerate();
                magnitudes.filter(|&(at, _)| among(at)).map(|(_, magnitude)| magnitude).sum()
            };
            let outcome =
                |name| &reports.iter().find(|report| report.name == name).unwrap().outcome;
            let pruned = outcome("w").clone().unwrap();
            assert!(
                (pruned.kept_share() - norm(&keeps) / norm(&|_| true)).abs() <= 1e-6,
                "{pruned:?}"
            );
            assert_eq!((pruned.nan, pruned.nan_pruned), (0, 0));
            assert_eq!(*outcome("bias"), Err(Reason::Dimensions(1)));
            for kind in MaskKind::ALL {
                let reports = verify_file(&output, all(kind)).unwrap();
                let verdict = reports.into_iter().find_map(|report| report.outcome.ok()).unwrap();
                let holds = mask.check(kind).is_ok();
                assert_eq!(verdict == Verdict::Holds, holds, "{kind}: {verdict:?}");
            }
        }
    }
}

#[test]
fn a_panic_of_the_observer_leaves_nothing() {
    let folder = Folder::new();
    let input = folder.write(&[("w", Dtype::F32, &[4, 4], f32s(&mixed(16)))]);
    let model = folder.path("model");
    fs::create_dir(&model).unwrap();
    fs::copy(&input, model.join("model.safetensors")).unwrap();
    let before = fs::read_dir(folder.0.path()).unwrap().count();
    for from in [input, model] {
        let (output, panics) = (folder.path("out"), &mut |_, _| panic!("as planned"));
        let pruned = AssertUnwindSafe(|| {
            prune(
                &from,
                &output,
                all(MaskKind::Transposable),
                Search::Exact,
                Unprunable::Copy,
                panics,
            )
        });
        assert!(catch_unwind(pruned).is_err());
        assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), before, "{from:?}");
    }
}

#[test]
fn reasons() {
    let folder = Folder::new();
    for kind in MaskKind::ALL {
        let divided = |by: MaskKind| {
            if kind == by { Ok(Verdict::Holds) } else { Err(Reason::Indivisible(kind)) }
        };
        type Case<'a> = (&'a str, Dtype, &'a [usize], Result<Verdict, Reason>);
        let cases: [Case<'_>; 11] = [
            ("h.mlp.c_fc.weight", Dtype::F32, &[4, 4], Ok(Verdict::Holds)),
            ("h.mlp.c_fc.bias", Dtype::F32, &[4], Err(Reason::Dimensions(1))),
            ("out", Dtype::F32, &[4, 4], Err(Reason::Excluded)),
            ("conv", Dtype::F32, &[4, 4, 1], Err(Reason::Dimensions(3))),
            ("empty", Dtype::F32, &[0, 4], Err(Reason::Empty)),
            ("rows", Dtype::F16, &[6, 4], divided(MaskKind::RowWise)),
            ("columns", Dtype::F16, &[4, 6], divided(MaskKind::ColumnWise)),
            ("ids", Dtype::I64, &[4, 4], Err(Reason::NotFloat)),
            ("complex", Dtype::C64, &[4, 4], Err(Reason::NotFloat)),
            ("narrow", Dtype::F8_E4M3, &[4, 4], Err(Reason::NarrowFloat)),
            ("transformer.wte.weight", Dtype::F32, &[8, 4], Err(Reason::Embedding)),
        ];
        let input = folder.write(&cases.clone().map(|(name, dtype, shape, _)| {
            (name, dtype, shape, vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        }));
        let selection = Selection { include: &|name| name != "out", ..all(kind) };
        let reports = verify_file(&input, selection).unwrap();
        assert_eq!(reports.len(), cases.len());
        for report in reports {
            let (name, .., expected) = cases.iter().find(|case| case.0 == report.name).unwrap();
            assert_eq!(report.outcome, *expected, "{name}, {kind}");
        }
        let output = folder.path("out.safetensors");
        let (search, none) = (Search::Exact, &mut |_, _| Ok(()));
        let strict = prune(&input, &output, selection, search, Unprunable::Refuse, none);
        let message = strict.unwrap_err().to_string();
        let count = if kind == MaskKind::Transposable { 3 } else { 2 };
        assert!(message.contains(&format!("{count} matrices cannot be pruned")), "{message}");
        assert!(message.contains("in.safetensors: --strict") && !output.exists());
    }
}

#[test]
fn embeddings_and_the_head_are_known_by_name() {
    let embeddings = [
        "transformer.wte.weight",
        "wpe",
        "model.embed_tokens.weight",
        "bert.embeddings.word_embeddings.weight",
        "tok_emb",
        "Embed_0",
        "shared.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ];
    let heads = [
        "lm_head.weight",
        "cls.predictions.decoder.weight",
        "vocab_projector.weight",
        "output.weight",
    ];
    let others = [
        "h.0.mlp.c_fc.weight",
        "member.weight",
        "wtex",
        "head.weight",
        "remb_x",
        "assembled",
        "layers.0.attention.output.weight",
        "mlp.shared_expert.up_proj.weight",
        "cls.predictions.transform.dense.weight",
    ];
    for (names, reason) in
        [(&embeddings[..], Some(Reason::Embedding)), (&heads, Some(Reason::Head)), (&others, None)]
    {
        names.iter().for_each(|name| assert_eq!(name_reason(name), reason, "{name}"));
    }
}

#[test]
fn nans_and_infinities_are_never_lost_silently() {
    let folder = Folder::new();
    let mut values = mixed(32);
    // Row 0, columns 0-3: one NaN. Row 0, columns 4-7: three, one must go. Kept NaN payloads stay.
    const NAN: u32 = 0x7fc0_1234;
    for at in [1, 4, 5, 7] {
        values[at] = f32::from_bits(NAN);
    }
    // Three infinities in a group of row 1, one in the next.
    for at in [8, 9, 11, 12] {
        values[at] = f32::NEG_INFINITY;
    }
    folder.write(&[("w", Dtype::F32, &[4, 8], f32s(&values))]);
    let (output, reports) = folder.prune(MaskKind::RowWise, Search::Exact);
    let pruned = reports[0].outcome.clone().unwrap();
    assert_eq!((pruned.nan, pruned.nan_pruned), (4, 1));
    assert_eq!((pruned.infinite, pruned.infinite_pruned), (4, 1));
    assert!(pruned.kept_share() > 0.5 && pruned.kept_share() < 1.0);
    let bytes = fs::read(output).unwrap();
    let data = SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data();
    let bits: Vec<_> = data.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
    assert_eq!([bits[1], bits[4], bits[5], bits[7]], [NAN, NAN, NAN, 0]);
}

/// Matrices of zeros but for some elements, and what verification finds.
#[test]
fn the_first_offence_is_named() {
    let folder = Folder::new();
    let tiny = f32::from_bits(1);
    // At most two a row and column, yet the only open row and column meet at an element that is
    // taken.
    let stalled = [0, 1, 12, 14, 25, 26, 39].map(|at| (at, 1.0));
    let three = [5 * 12 + 8, 5 * 12 + 9, 5 * 12 + 10].map(|at| (at, 1.0));
    let column = [4 * 12 + 7, 5 * 12 + 7, 7 * 12 + 7].map(|at| (at, f32::NAN));
    type Case<'a> = (&'a [(usize, f32)], MaskKind, Option<&'a str>);
    let cases: [Case<'_>; 7] = [
        (&[(39, -0.0), (13, tiny)], MaskKind::Transposable, None),
        (&stalled, MaskKind::RowWise, None),
        (&stalled, MaskKind::ColumnWise, None),
        (
            &stalled,
            MaskKind::Transposable,
            Some("transposable pattern covers the 7 nonzeros of the tile at rows 0-3, columns 0-3"),
        ),
        (
            &three,
            MaskKind::RowWise,
            Some("3 nonzeros, at most 2 expected, in the group at row 5, columns 8-11"),
        ),
        (
            &three,
            MaskKind::Transposable,
            Some(
                "transposable pattern covers the 3 nonzeros of the tile at rows 4-7, columns 8-11",
            ),
        ),
        (
            &column,
            MaskKind::ColumnWise,
            Some("3 nonzeros, at most 2 expected, in the group at rows 4-7, column 7"),
        ),
    ];
    for (elements, kind, expected) in cases {
        let mut values = vec![0.0; 8 * 12];
        elements.iter().for_each(|&(at, value)| values[at] = value);
        let path = folder.write(&[("w", Dtype::F32, &[8, 12], f32s(&values))]);
        match verify_file(&path, all(kind)).unwrap().remove(0).outcome.unwrap() {
            Verdict::Holds => assert_eq!(expected, None),
            Verdict::Refuted(offence) => {
                let message = offence.to_string();
                assert!(expected.is_some_and(|end| message.ends_with(end)), "{message}");
            }
        }
    }
}

/// A matrix longer than a piece, which is processed in parts.
#[test]
fn a_long_matrix_is_pruned_as_a_whole() {
    let folder = Folder::new();
    let shape = [4 * 700 + 4, 1024];
    let values = mixed(shape[0] * shape[1]);
    let input = folder.write(&[("w", Dtype::F32, &shape, f32s(&values))]);
    assert!(fs::metadata(&input).unwrap().len() > PIECE as u64);
    for kind in MaskKind::ALL {
        let (output, _) = folder.prune(kind, Search::Exact);
        let mask = mask_of(&values, shape, kind, Search::Exact);
        let mut bytes = fs::read(&output).unwrap();
        let data = SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data();
        let found = data.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b));
        for (at, (found, value)) in found.zip(&values).enumerate() {
            let keeps = mask.keeps(at / shape[1], at % shape[1]);
            assert_eq!(found.to_bits(), if keeps { value.to_bits() } else { 0 }, "{kind} {at}");
        }
        // Nothing of the last tile is zero.
        let last = bytes.len() - 16;
        for row in 0..4 {
            bytes[last - row * 4 * shape[1]..][..16].fill(1);
        }
        fs::write(&output, bytes).unwrap();
        let verdict = verify_file(&output, all(kind)).unwrap().remove(0).outcome;
        let Ok(Verdict::Refuted(Offence { row, column, .. })) = verdict else { panic!("{kind}") };
        assert_eq!([row, column], shape.map(|length| length - 4), "{kind}");
    }
}
