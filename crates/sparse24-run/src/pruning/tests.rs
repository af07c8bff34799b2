//! Compares every byte of pruned files with the masks of core.

use std::{collections::HashMap, fs, path::PathBuf};

use half::{bf16, f16};
use ndarray::Array2;
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sparse24_core::{Mask, MaskKind, search};

use super::*;
use crate::tensors::{TensorFile, container::HEADER_LIMIT};

const KINDS: [MaskKind; 3] = [MaskKind::Transposable, MaskKind::RowWise, MaskKind::ColumnWise];

fn all(kind: MaskKind) -> Selection<'static> {
    Selection { kind, include: &|_| true }
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
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
        let elements: Vec<_> = values.iter().map(|&v| convert(v)).collect();
        let searched: Vec<f32> = elements.iter().map(|e| e.1).collect();
        let bytes = elements.iter().flat_map(|e| e.0.clone()).collect();
        let input = folder.write(&[
            ("bias", Dtype::F32, &[3], f32s(&[1.0, 2.0, 3.0])),
            ("w", dtype, &shape, bytes),
        ]);
        let before = fs::read(&input).unwrap();
        for (kind, how) in
            KINDS.into_iter().flat_map(|kind| [(kind, Search::Exact), (kind, Search::Greedy)])
        {
            let output = folder.path("out.safetensors");
            let reports = prune_file(&input, &output, all(kind), how, Unprunable::Copy).unwrap();
            let mask = mask_of(&searched, shape, kind, how);
            let mut expected = before.clone();
            let width = elements[0].0.len();
            let data =
                SafeTensors::deserialize(&before).unwrap().tensor("w").unwrap().data().as_ptr()
                    as usize
                    - before.as_ptr() as usize;
            for at in (0..values.len()).filter(|at| !mask.keeps(at / 12, at % 12)) {
                expected[data + at * width..][..width].fill(0);
            }
            assert!(fs::read(&output).unwrap() == expected, "{dtype} {kind} {how:?}");
            let norm = |kept: bool| -> f64 {
                let all = searched.iter().enumerate();
                all.filter(|(at, _)| !kept || mask.keeps(at / 12, at % 12))
                    .map(|(_, v)| f64::from(v.abs()))
                    .sum()
            };
            let report = reports.iter().find(|report| report.name == "w").unwrap();
            let pruned = report.outcome.clone().unwrap();
            assert!((pruned.kept_norm - norm(true) / norm(false)).abs() <= 1e-6, "{pruned:?}");
            assert_eq!((pruned.nan, pruned.nan_pruned), (0, 0));
            assert_eq!(
                reports.iter().find(|report| report.name == "bias").unwrap().outcome,
                Err(Reason::Dimensions(1))
            );
            for kind in KINDS {
                let verdict = verify_file(&output, all(kind))
                    .unwrap()
                    .into_iter()
                    .find_map(|report| report.outcome.ok())
                    .unwrap();
                let expected = mask.check(kind).is_ok();
                assert_eq!(verdict == Verdict::Holds, expected, "{kind}: {verdict:?}");
            }
        }
    }
}

#[test]
fn reasons() {
    let folder = Folder::new();
    let zeros = |bytes: usize| vec![0; bytes];
    let input = folder.write(&[
        ("h.mlp.c_fc.weight", Dtype::F32, &[4, 4], zeros(64)),
        ("h.mlp.c_fc.bias", Dtype::F32, &[4], zeros(16)),
        ("out", Dtype::F32, &[4, 4], zeros(64)),
        ("conv", Dtype::F32, &[4, 4, 1], zeros(64)),
        ("empty", Dtype::F32, &[0, 4], zeros(0)),
        ("rows", Dtype::F16, &[6, 4], zeros(48)),
        ("columns", Dtype::F16, &[4, 6], zeros(48)),
        ("ids", Dtype::I64, &[4, 4], zeros(128)),
        ("complex", Dtype::C64, &[4, 4], zeros(128)),
        ("narrow", Dtype::F8_E4M3, &[4, 4], zeros(16)),
        ("transformer.wte.weight", Dtype::F32, &[8, 4], zeros(128)),
    ]);
    let selected = |kind| Selection { kind, include: &|name| name != "out" };
    let reasons = |kind| -> HashMap<String, Result<Verdict, Reason>> {
        verify_file(&input, selected(kind))
            .unwrap()
            .into_iter()
            .map(|report| (report.name, report.outcome))
            .collect()
    };
    for kind in KINDS {
        let mut found = reasons(kind);
        let mut expect =
            |name: &str, outcome| assert_eq!(found.remove(name).unwrap(), outcome, "{name}");
        let divided = |divides: bool| {
            if divides { Ok(Verdict::Holds) } else { Err(Reason::Indivisible(kind)) }
        };
        expect("h.mlp.c_fc.weight", Ok(Verdict::Holds));
        expect("h.mlp.c_fc.bias", Err(Reason::Dimensions(1)));
        expect("out", Err(Reason::Excluded));
        expect("conv", Err(Reason::Dimensions(3)));
        expect("empty", Err(Reason::Empty));
        expect("rows", divided(kind == MaskKind::RowWise));
        expect("columns", divided(kind == MaskKind::ColumnWise));
        expect("ids", Err(Reason::NotFloat));
        expect("complex", Err(Reason::NotFloat));
        expect("narrow", Err(Reason::NarrowFloat));
        expect("transformer.wte.weight", Err(Reason::Embedding));
        assert!(found.is_empty(), "{found:?}");
    }
    let output = folder.path("out.safetensors");
    let message =
        prune_file(&input, &output, selected(MaskKind::RowWise), Search::Exact, Unprunable::Refuse)
            .unwrap_err()
            .to_string();
    assert!(
        message.contains("in.safetensors: strict pruning")
            && message.contains("2 cannot be pruned"),
        "{message}"
    );
    assert!(!output.exists());
}

#[test]
fn embeddings_by_name() {
    for name in [
        "transformer.wte.weight",
        "wpe",
        "model.embed_tokens.weight",
        "bert.embeddings.word_embeddings.weight",
        "tok_emb",
        "Embed_0",
        "lm_head.weight",
    ] {
        assert!(is_embedding(name), "{name}");
    }
    for name in
        ["h.0.mlp.c_fc.weight", "member.weight", "wtex", "head.weight", "remb_x", "assembled"]
    {
        assert!(!is_embedding(name), "{name}");
    }
}

#[test]
fn nans_are_kept_counted_and_never_lost_silently() {
    let folder = Folder::new();
    let mut values = mixed(32);
    // Row 0, columns 0-3: one NaN. Row 0, columns 4-7: three, one must go. Kept NaN payloads stay.
    for at in [1, 4, 5, 7] {
        values[at] = f32::from_bits(0x7fc0_1234);
    }
    let input = folder.write(&[("w", Dtype::F32, &[4, 8], f32s(&values))]);
    let output = folder.path("out.safetensors");
    let reports =
        prune_file(&input, &output, all(MaskKind::RowWise), Search::Exact, Unprunable::Refuse)
            .unwrap();
    let pruned = reports[0].outcome.clone().unwrap();
    assert_eq!((pruned.nan, pruned.nan_pruned), (4, 1));
    assert!(pruned.kept_norm > 0.5 && pruned.kept_norm < 1.0);
    let bytes = fs::read(&output).unwrap();
    let data = SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data().to_vec();
    let bits: Vec<u32> =
        data.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!([bits[1], bits[4], bits[5], bits[7]], [0x7fc0_1234, 0x7fc0_1234, 0x7fc0_1234, 0]);
    assert_eq!(
        verify_file(&output, all(MaskKind::RowWise)).unwrap()[0].outcome,
        Ok(Verdict::Holds)
    );
}

#[test]
fn a_zero_among_the_kept_is_no_offence_but_seven_stalled_are() {
    let folder = Folder::new();
    let verdict = |kind, values: &[f32; 16]| {
        let input = folder.write(&[("w", Dtype::F32, &[4, 4], f32s(values))]);
        verify_file(&input, all(kind)).unwrap()[0].outcome.clone().unwrap()
    };
    let mut values = [0.0; 16];
    values[15] = -0.0;
    assert_eq!(verdict(MaskKind::Transposable, &values), Verdict::Holds);
    values[5] = f32::from_bits(1);
    assert_eq!(verdict(MaskKind::Transposable, &values), Verdict::Holds);
    // At most two a row and column, yet the only open row and column meet at an element that is
    // taken.
    let stalled = [1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1].map(|v| v as f32);
    assert_eq!(verdict(MaskKind::RowWise, &stalled), Verdict::Holds);
    assert_eq!(verdict(MaskKind::ColumnWise, &stalled), Verdict::Holds);
    let offence = Offence { kind: MaskKind::Transposable, row: 0, column: 0, nonzeros: 7 };
    assert_eq!(verdict(MaskKind::Transposable, &stalled), Verdict::Refuted(offence));
    assert_eq!(
        offence.to_string(),
        "no transposable pattern covers the 7 nonzeros of the tile at rows 0-3, columns 0-3"
    );
}

#[test]
fn the_first_offence_is_named() {
    let folder = Folder::new();
    let mut values = vec![0.0; 8 * 12];
    for at in [5 * 12 + 8, 5 * 12 + 9, 5 * 12 + 10] {
        values[at] = 1.0;
    }
    let row_wise = folder.write(&[("w", Dtype::F32, &[8, 12], f32s(&values))]);
    let offence = |path: &PathBuf, kind| match verify_file(path, all(kind)).unwrap()[0].outcome {
        Ok(Verdict::Refuted(offence)) => offence.to_string(),
        ref other => panic!("{other:?}"),
    };
    assert_eq!(
        offence(&row_wise, MaskKind::RowWise),
        "3 nonzeros, at most 2 expected, in the group at row 5, columns 8-11"
    );
    assert!(
        offence(&row_wise, MaskKind::Transposable)
            .ends_with("of the tile at rows 4-7, columns 8-11")
    );
    values.fill(0.0);
    for at in [4 * 12 + 7, 5 * 12 + 7, 7 * 12 + 7] {
        values[at] = f32::NAN;
    }
    let column_wise = folder.write(&[("w", Dtype::F32, &[8, 12], f32s(&values))]);
    assert_eq!(
        offence(&column_wise, MaskKind::ColumnWise),
        "3 nonzeros, at most 2 expected, in the group at rows 4-7, column 7"
    );
}

#[test]
fn nothing_to_prune_is_a_refusal() {
    let folder = Folder::new();
    let output = folder.path("out.safetensors");
    for (tensors, expected) in [
        (vec![], "it has no tensors"),
        (
            vec![("b", Dtype::F32, [4_usize].as_slice(), vec![0; 16])],
            "of 1, the first is `b`: of dimension 1, not 2",
        ),
    ] {
        let input = folder.write(&tensors);
        let verified = verify_file(&input, all(MaskKind::RowWise)).unwrap_err().to_string();
        let pruned =
            prune_file(&input, &output, all(MaskKind::RowWise), Search::Exact, Unprunable::Copy)
                .unwrap_err()
                .to_string();
        assert_eq!(verified, pruned);
        assert!(
            verified.contains("in.safetensors: holds no tensor that could be row-wise 2:4 pruned")
                && verified.contains(expected),
            "{verified}"
        );
        assert!(!output.exists());
    }
}

#[test]
fn the_input_is_never_overwritten() {
    let folder = Folder::new();
    let input = folder.write(&[("w", Dtype::F32, &[4, 4], f32s(&mixed(16)))]);
    let before = fs::read(&input).unwrap();
    let message =
        prune_file(&input, &input, all(MaskKind::RowWise), Search::Exact, Unprunable::Copy)
            .unwrap_err()
            .to_string();
    assert!(message.contains("is the input"), "{message}");
    assert_eq!(fs::read(&input).unwrap(), before);
}

fn raw(folder: &Folder, header: &str, data: &[u8]) -> PathBuf {
    let path = folder.path("raw.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat())
        .unwrap();
    path
}

#[test]
fn malformed_files_say_what_is_wrong() {
    let folder = Folder::new();
    let refusal =
        |path: &PathBuf| verify_file(path, all(MaskKind::RowWise)).unwrap_err().to_string();
    let tensor = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let deep = "[".repeat(100_000);
    let long = format!("[{}1]", "1,".repeat(3000));
    for (header, data, expected) in [
        ("{".to_owned(), 0, "malformed header: EOF"),
        ("[]".to_owned(), 0, "expected an object of tensors"),
        (deep, 0, "malformed header"),
        (
            r#"{"w":{"dtype":"F31","shape":[4],"data_offsets":[0,16]}}"#.to_owned(),
            16,
            "tensor `w`: unknown variant `F31`",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}"#.to_owned(),
            16,
            "tensor `w`: invalid value",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[4]}}"#.to_owned(),
            16,
            "tensor `w`: missing field `data_offsets`",
        ),
        (format!(r#"{{"w":{}}}"#, tensor(&long, 0, 4)), 4, "tensor `w`: an entry of"),
        (format!(r#"{{"w":{}}}"#, tensor("[4]", 0, 12)), 12, "tensor `w` F32 [4] takes 16 bytes"),
        (format!(r#"{{"w":{}}}"#, tensor("[4]", 16, 0)), 16, "tensor `w` starts at offset"),
        (format!(r#"{{"w":{}}}"#, tensor("[4]", 0, 16)), 12, "tensor `w` ends at offset"),
        (format!(r#"{{"w":{}}}"#, tensor("[4]", 0, 16)), 20, "the file at"),
        (
            format!(r#"{{"w":{}}}"#, tensor("[4294967296,4294967296,16]", 0, 16)),
            16,
            "tensor `w` cannot have the shape",
        ),
        (format!(r#"{{"w":{}}}"#, tensor("[4]", 0, u64::MAX)), 16, "tensor `w`"),
        (
            format!(r#"{{"v":{},"w":{}}}"#, tensor("[4]", 0, 16), tensor("[4]", 8, 24)),
            24,
            "tensor `w` starts at offset",
        ),
        (
            format!(r#"{{"v":{},"w":{}}}"#, tensor("[4]", 0, 16), tensor("[4]", 20, 36)),
            36,
            "tensor `w` starts at offset",
        ),
        (
            format!(r#"{{"w":{},"w":{}}}"#, tensor("[4]", 0, 16), tensor("[4]", 16, 32)),
            32,
            "names the tensor `w` twice",
        ),
    ] {
        let message = refusal(&raw(&folder, &header, &vec![0; data]));
        assert!(
            message.contains("raw.safetensors: not a valid safetensors file")
                && message.contains(expected),
            "{message}"
        );
    }
    let path = folder.path("raw.safetensors");
    for (bytes, expected) in [
        (vec![0; 7], "7 bytes cannot hold"),
        (vec![0xff; 64], "header length 18446744073709551615 exceeds"),
        ([64, 0, 0, 0, 0, 0, 0, 0, b'{'].to_vec(), "header length 64 exceeds the 1 bytes after it"),
    ] {
        fs::write(&path, bytes).unwrap();
        assert!(refusal(&path).contains(expected), "{}", refusal(&path));
    }
    assert!(
        refusal(&folder.path("none")).contains("none: does not exist, expected a safetensors file")
    );
    assert!(refusal(&folder.path("")).contains("is a folder"));
}

#[test]
fn every_reader_has_the_same_header_limit() {
    let folder = Folder::new();
    let path = folder.path("x.safetensors");
    let tensor = r#"{"w":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}}"#;
    for (length, is_read) in [(HEADER_LIMIT, true), (HEADER_LIMIT + 1, false)] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(tensor.as_bytes());
        bytes.resize(8 + length as usize, b' ');
        bytes.resize(bytes.len() + 16, 0);
        fs::write(&path, bytes).unwrap();
        let answers = [
            TensorFile::open(&path).map(drop),
            verify_file(&path, all(MaskKind::RowWise)).map(drop),
        ]
        .map(|answer| answer.map_err(|e| e.to_string()));
        assert_eq!(answers[0].is_ok(), is_read);
        assert_eq!(answers[0], answers[1]);
    }
}

proptest! {
    // Each case writes files.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_was_pruned_verifies(
        tiles in (1_usize..4, 1_usize..4),
        bits in prop::collection::vec(any::<u32>(), 144),
        kind in 0..3_usize,
        greedy in any::<bool>(),
    ) {
        let folder = Folder::new();
        let shape = [4 * tiles.0, 4 * tiles.1];
        let bits = &bits[..shape[0] * shape[1]];
        let values: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let input = folder.write(&[("w", Dtype::F32, &shape, f32s(&values))]);
        let output = folder.path("out.safetensors");
        let how = if greedy { Search::Greedy } else { Search::Exact };
        prune_file(&input, &output, all(KINDS[kind]), how, Unprunable::Refuse).unwrap();
        let verified = verify_file(&output, all(KINDS[kind])).unwrap();
        prop_assert_eq!(&verified[0].outcome, &Ok(Verdict::Holds));
    }

    #[test]
    fn no_flip_of_the_header_panics(at in 0_usize..200, bit in 0_u8..8) {
        let folder = Folder::new();
        let input = folder.write(&[
            ("w", Dtype::F32, &[4, 4], f32s(&mixed(16))),
            ("v", Dtype::F16, &[4, 4], vec![0; 32]),
        ]);
        let mut bytes = fs::read(&input).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        fs::write(&input, &bytes).unwrap();
        if let Err(e) = verify_file(&input, all(MaskKind::RowWise)) {
            prop_assert!(e.to_string().contains("in.safetensors"));
        }
    }
}
