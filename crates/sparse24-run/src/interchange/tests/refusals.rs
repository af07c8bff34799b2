//! Refusals on the way in and on the way out, and their messages.

use super::*;

#[test]
fn what_does_not_fit_is_named() {
    let (ones, infinite) = ([1.0; 24], [0.0, 1.0, f32::INFINITY, 3.0]);
    let heads = [[0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, -3.0]];
    let untied = heads.each_ref().map(|head| {
        let tied: &[f32] = &[0.0, 1.0, 2.0, 3.0];
        [("wte.weight", &[2_usize, 2][..], tied), ("lm_head.weight", &[2, 2], head)]
    });
    let untied_message = "tensor \"lm_head.weight\" (F32 [2, 2]) differs from \"wte.weight\": the \
        head is not tied, which this model needs";
    type Tensor<'a> = (&'a str, &'a [usize], &'a [f32]);
    type Case<'a> = (&'a [Tensor<'a>], (&'a str, &'a [usize]), &'a str);
    let cases: [Case<'_>; 12] = [
        (
            &[("wpe.weight", &[2, 2], &ones[..4])],
            ("wte.weight", &[3, 2]),
            "\"wpe.weight\" (F32 [2, 2]) does not belong to the model",
        ),
        (
            &[],
            ("wte.weight", &[3, 2]),
            "holds no tensor \"wte.weight\" (nor \"transformer.wte.weight\")",
        ),
        (
            &[],
            ("ln_f.bias", &[2]),
            "(nor \"transformer.ln_f.bias\"); add it, with zeros if the model has no biases",
        ),
        (
            &[("transformer.wte.weight", &[4, 2], &ones[..8])],
            ("wte.weight", &[3, 2]),
            "has a vocabulary of 4 tokens, but the model has 3; use the tokenizer that goes with \
                the weights",
        ),
        (
            &[("head.weight", &[3, 2], &ones[..6])],
            ("head.weight", &[5, 2]),
            "is for 3 classes, but the model has 5",
        ),
        (
            &[("wpe.weight", &[4, 2], &ones[..8])],
            ("wpe.weight", &[3, 2]),
            "has 4 positions, but the model has 3",
        ),
        (
            &[("h.0.mlp.c_fc.weight", &[8, 2], &ones[..16])],
            ("h.0.mlp.c_fc.weight", &[8, 2]),
            "tensor \"h.0.mlp.c_fc.weight\" (F32 [8, 2]) is expected to be [2, 8]",
        ),
        (
            &[("ln_f.weight", &[2], &ones[..2]), ("ln_f.bias", &[2], &ones[..2])],
            ("ln_f.weight", &[2]),
            "tensor \"ln_f.bias\" (F32 [2]) is not zero, and the model has no biases; set \
                model.bias = true",
        ),
        (
            &[("ln_f.weight", &[2], &ones[..2]), ("transformer.ln_f.weight", &[2], &ones[..2])],
            ("ln_f.weight", &[2]),
            "is also stored as \"ln_f.weight\"",
        ),
        (&untied[0], ("wte.weight", &[2, 2]), untied_message),
        (&untied[1], ("wte.weight", &[2, 2]), untied_message),
        (
            &[("wpe.weight", &[2, 2], &infinite)],
            ("wpe.weight", &[2, 2]),
            "holds inf at element 2 (byte 88); only finite values are read",
        ),
    ];
    for (given, wanted, message) in cases {
        let (_directory, path) = foreign(given);
        let found = problem(import(&path, &gpt2::FORMAT, &expected(&[wanted])));
        assert!(found.ends_with(message), "{found}");
        assert!(found.starts_with(&path.display().to_string()), "{found}");
    }
}

/// A part of a parameter, a head, a copy and a head's tensor of the wrong kind.
#[test]
fn what_does_not_fit_a_bert_is_named() {
    let ones = [1.0; 6];
    let query = "bert.encoder.layer.0.attention.self.query.bias";
    type Tensor<'a> = (&'a str, &'a [usize], &'a [f32]);
    type Case<'a> = (&'a [Tensor<'a>], (&'a str, &'a [usize]), &'a str);
    let qkv: (&str, &[usize]) = ("encoder.layer.0.attention.self.qkv.bias", &[6]);
    let bias: (&str, &[usize]) = ("cls.predictions.bias", &[3]);
    let cases: [Case<'_>; 5] = [
        (
            &[(query, &[2], &ones[..2])],
            qkv,
            "(nor \"bert.encoder.layer.0.attention.self.key.bias\
            \"); add it, with zeros if the model has no biases",
        ),
        (&[(query, &[3], &ones[..3])], qkv, "(F32 [3]) is expected to be [2]"),
        (
            &[("pooler.dense.bias", &[2], &ones[..2])],
            bias,
            "holds no tensor \"cls.predictions.bias\": it has another head, or none",
        ),
        (
            &[
                ("cls.predictions.bias", &[3], &ones[..3]),
                ("cls.predictions.decoder.bias", &[3], &[1.0, 1.0, 2.0]),
            ],
            bias,
            "differs from \"cls.predictions.bias\": the head is not tied, which this model needs",
        ),
        (
            &[("cls.predictions.bias", &[3], &ones[..3]), ("cls.predictions.x", &[1], &ones[..1])],
            bias,
            "tensor \"cls.predictions.x\" (F32 [1]) does not belong to the model",
        ),
    ];
    for (given, wanted, message) in cases {
        let (_directory, path) = foreign(given);
        let found = problem(import(&path, &bert::FORMAT, &expected(&[wanted])));
        assert!(found.ends_with(message), "{found}");
    }
}

#[test]
fn models_without_a_class_are_not_exported() {
    let ModelSpec::Bert(bert) = BERT else { unreachable!("it is one") };
    let gated = ModelSpec::Gpt2(Gpt2Spec { activation: Activation::Geglu, ..GPT2 });
    for (model, start) in [
        (gated, "model.activation: no Hugging Face model has GPT-2's layers with a gated"),
        (ModelSpec::CrammedBert(bert), "model.kind: Hugging Face's library has no crammed BERT"),
    ] {
        let message = Format::of(&model).unwrap_err().to_string();
        assert!(message.starts_with(start), "{message}");
    }
    let prediction = Some(Prediction::Value);
    let wide = ModelSpec::Bert(BertSpec { pooler: 12, prediction, ..bert });
    let (folder, out) = (tempfile::tempdir().unwrap(), weights(&wide));
    let exported = export(folder.path(), &out, describe(&wide), Dtype::F32, Values::Dense);
    let message = problem(exported);
    let end = "the weight \"pooler.dense.weight\" is [12, 8], BERT expects [8, 8]";
    assert!(message.ends_with(end), "{message}");
}

#[test]
fn other_types_are_refused() {
    let (_directory, path) = foreign(&[("wte.weight", &[1, 2], &[0.0, 1.0])]);
    let mut bytes = fs::read(&path).unwrap();
    let dtype = bytes.windows(3).position(|word| word == b"F32").unwrap();
    bytes[dtype] = b'I';
    fs::write(&path, bytes).unwrap();
    let message = problem(import(&path, &gpt2::FORMAT, &expected(&[("wte.weight", &[1, 2])])));
    let end = "tensor \"wte.weight\" (I32 [1, 2]) is expected to be F32, F16 or BF16";
    assert!(message.ends_with(end), "{message}");
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let directory = tempfile::tempdir().unwrap();
    for (file, end) in [
        ("README.md", "holds no \"model.safetensors\""),
        ("pytorch_model.bin", "is not read: save the weights again as safetensors"),
    ] {
        fs::write(directory.path().join(file), "").unwrap();
        let message = problem(import(directory.path(), &gpt2::FORMAT, &[]));
        assert!(message.ends_with(end), "{message}");
    }
}

/// A change of a sound file, and the message about it.
type Change<'a> = (&'a str, &'a str, &'a str);

#[test]
fn configurations_that_compute_something_else_are_refused() {
    let gpt2: &[Change<'_>] = &[
        (
            "gelu_new",
            "silu",
            "is \"silu\", expected \"gelu_new\" or \"gelu_pytorch_tanh\" or \"gelu\"",
        ),
        ("0.00001", "0.000001", "layer_norm_epsilon is 1e-6, expected 0.00001"),
        (
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
            "tie_word_embeddings is false, expected true",
        ),
        (
            "\"model_type\": \"gpt2\"",
            "\"model_type\": \"llama\", \"n_layer\": true",
            "model_type is \"llama\", expected \"gpt2\" or \"bert\"",
        ),
        ("\"n_head\": 2", "\"n_head\": 3", "n_embd is 8, expected a multiple of n_head = 3"),
        ("\"n_head\": 2", "\"n_head\": 0", "n_head is 0, expected 1..=16777216"),
        (
            "\"n_layer\": 2",
            "\"n_layer\": 1000000000000",
            "n_layer is 1000000000000, expected 1..=4096",
        ),
    ];
    let bert: &[Change<'_>] = &[
        ("\"gelu\"", "\"silu\"", "hidden_act is \"silu\", expected \"gelu_new\" or"),
        ("\"absolute\"", "\"relative_key\"", "position_embedding_type is \"relative_key\""),
        ("\"type_vocab_size\": 2", "\"type_vocab_size\": 1", "type_vocab_size is 1, expected 2"),
        ("\"is_decoder\": false", "\"is_decoder\": true", "is_decoder is true, expected false"),
        (
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
            "tie_word_embeddings is false, expected true",
        ),
        ("1e-12", "1e-5", "layer_norm_eps is 0.00001, expected 1e-12"),
        ("\"hidden_size\": 8", "\"hidden_size\": 9", "expected a multiple of num_attention_heads"),
        ("\"hidden_size\": 8", "\"hidden\": 8", "not a BERT configuration: missing field"),
        ("\"1\": \"LABEL_1\"", "\"4\": \"LABEL_1\"", "id2label: expected the classes from 0 on"),
    ];
    let classifier = BERT.predicting(Some(Prediction::Class(3)));
    for (model, changes) in [(UNBIASED, gpt2), (classifier, bert)] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(CONFIG);
        let json = folder::to_json(format(&model), &describe(&model), "float32", None);
        let good = String::from_utf8(json).unwrap();
        for (from, to, message) in changes {
            let text = good.replace(from, to);
            assert_ne!(text, good, "{from}");
            fs::write(&path, text).unwrap();
            let found = problem(FolderModel::read(directory.path()));
            assert!(found.contains(message), "{found}");
        }
    }
}

/// Settings with several spellings, and heads that a head of ours does not compute.
#[test]
fn configurations_may_differ_where_the_model_does_not() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(WEIGHTS), "").unwrap();
    let read = |text: &str| {
        fs::write(directory.path().join(CONFIG), text).unwrap();
        FolderModel::read(&directory.path().join(WEIGHTS)).unwrap().spec
    };
    let json = |model: &ModelSpec| {
        let json = folder::to_json(format(model), &describe(model), "float32", None);
        String::from_utf8(json).unwrap()
    };
    let gpt2 = ModelSpec::Gpt2(GPT2);
    let other = json(&gpt2).replace("\"n_inner\": null", "\"n_inner\": 20");
    let d_ff = 20;
    let other = read(&other.replace("0.00001", "1e-05"));
    assert_eq!(other, ModelSpec::Gpt2(Gpt2Spec { d_ff, ..GPT2 }));
    let exact = ModelSpec::Gpt2(Gpt2Spec { activation: Activation::GeluErf, ..GPT2 });
    assert_eq!(read(&json(&exact)), exact);
    let [three, one] = [Prediction::Class(3), Prediction::Value]
        .map(|prediction| BERT.predicting(Some(prediction)));
    let span = BERT.predicting(Some(Prediction::Span));
    let (class, value) = ("\"single_label_classification\"", "\"regression\"");
    for (model, from, to, expected) in [
        (&three, class, "null", &three),
        (&three, class, "\"multi_label_classification\"", &BERT),
        (&three, class, value, &BERT),
        (&one, value, "null", &one),
        (&one, value, class, &BERT),
        (&three, "SequenceClassification", "TokenClassification", &BERT),
        (&three, "SequenceClassification", "QuestionAnswering", &span),
    ] {
        let text = json(model);
        assert!(text.contains(from), "{text}");
        assert_eq!(read(&text.replace(from, to)), *expected, "{from} {to}");
    }
}

#[test]
fn what_is_not_24_is_not_exported_as_24() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    let out = weights(&UNBIASED);
    let renamed = |names: [&str; 2]| {
        let mut masks = gpt2_masks();
        masks.iter_mut().zip(names).for_each(|(mask, name)| mask.0 = name.into());
        masks
    };
    let mut broken = gpt2_masks();
    broken[1].1.tiles_mut()[9] ^= 1;
    for (phase, masks, expected) in [
        (
            PhaseKind::Dense,
            gpt2_masks(),
            "the checkpoint is of a dense phase with 2 masks, so it is not a 2:4 model",
        ),
        (PhaseKind::Sparse, Vec::new(), "of a sparse phase with 0 masks, so it is not a 2:4 model"),
        (
            PhaseKind::Sparse,
            broken,
            "mask check: the mask is not transposable: tile (1, 1) holds 0x",
        ),
        (
            PhaseKind::Sparse,
            renamed(["h.0.mlp.c_proj.weight", "h.1.mlp.c_proj.weight"]),
            "the mask of \"h.0.mlp.c_proj.weight\" is [32, 8], its weight [8, 32]",
        ),
        (
            PhaseKind::Sparse,
            renamed(["h.7.mlp.c_fc.weight", "h.1.mlp.c_proj.weight"]),
            "\"h.7.mlp.c_fc.weight\" does not exist in Hugging Face's GPT-2",
        ),
    ] {
        let structure = MaskKind::Transposable;
        let values = Values::Sparse24 { phase, masks: &masks, structure };
        let message = problem(export(&folder, &out, describe(&UNBIASED), Dtype::F32, values));
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn exports_that_cannot_be_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    let good = weights(&UNBIASED);
    type Change = fn(&mut Vec<NamedTensor>);
    let changes: [(Change, Dtype, &str); 5] = [
        (
            |weights| drop(weights.remove(0)),
            Dtype::F32,
            "cannot be exported to: the weight \"wte.weight\" is missing",
        ),
        (
            |weights| weights[4].shape = vec![16, 4],
            Dtype::F32,
            "the weight \"h.0.attn.c_proj.weight\" is [16, 4], GPT-2 expects [8, 8]",
        ),
        (
            |weights| {
                let name = "h.0.mlp.gate.weight".to_owned();
                weights.push(NamedTensor { name, shape: vec![0], values: Vec::new() });
            },
            Dtype::F32,
            "\"h.0.mlp.gate.weight\" does not exist in Hugging Face's GPT-2",
        ),
        (
            |weights| weights[0].values[3] = 1e5,
            Dtype::F16,
            "\"wte.weight\" holds 100000 at element 3, which is not finite in F16",
        ),
        (
            |weights| weights[4].values.truncate(63),
            Dtype::F32,
            "h.0.attn.c_proj.weight: has shape [8, 8] and 63 values",
        ),
    ];
    for (change, dtype, end) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let message = problem(export(&folder, &bad, describe(&UNBIASED), dtype, Values::Dense));
        assert!(message.ends_with(end), "{message}");
    }
    let mut operations = 0;
    loop {
        fault::plan(Plan::Fail(operations, Fault::NoSpace));
        match export(&folder, &good, describe(&UNBIASED), Dtype::F32, Values::Dense) {
            Ok(_) => break,
            Err(error) => assert!(error.to_string().contains("No space left on device"), "{error}"),
        }
        let left = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, usize::from(folder.exists()), "operation {operations}");
        let _ = fs::remove_dir_all(&folder);
        operations += 1;
    }
    assert!(operations > 20, "{operations}");
    fault::plan(Plan::Healthy);
}
