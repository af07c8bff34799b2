//! Weights and configurations of Hugging Face's GPT-2.
//!
//! Invariant: an import gives what was asked for, all of it finite.

use sparse24_run::interchange::{Gpt2Config, import};
use sparse24_train::nn::linear24::Bias;

use super::{place, refused, tensors, values};

/// Small enough for a fuzzer to hit.
const TINY: Gpt2Config =
    Gpt2Config { n_layer: 1, n_head: 1, n_embd: 2, n_positions: 2, vocab_size: 3, n_inner: 4 };

pub(super) fn weights(bytes: &[u8]) {
    let path = place::file("model.safetensors", bytes);
    for bias in [Bias::Absent, Bias::Present] {
        let expected = TINY.parameters(bias);
        match import(&path, &expected) {
            Ok(found) => {
                assert!(
                    found
                        .iter()
                        .map(|tensor| (&tensor.name, &tensor.shape))
                        .eq(expected.iter().map(|(name, shape)| (name, shape)))
                );
                for tensor in &found {
                    assert_eq!(tensor.values.len(), tensor.shape.iter().product::<usize>());
                    assert!(tensor.values.iter().all(|value| value.is_finite()), "{}", tensor.name);
                }
            }
            Err(error) => refused(&error, "model.safetensors"),
        }
    }
}

pub(super) fn weights_seeds() -> Vec<Vec<u8>> {
    let mut seeds = tensors::attacks();
    for (dtype, prefix) in [
        (("F32", 32), ""),
        (("F16", 16), "transformer."),
        (("BF16", 16), "transformer."),
        (("F64", 64), ""),
    ] {
        seeds.extend([Bias::Absent, Bias::Present].map(|bias| sound(dtype, prefix, bias)));
    }
    seeds
}

pub(super) fn weights_variants() -> Vec<Vec<u8>> {
    tensors::variants(&sound(("F32", 32), "", Bias::Present))
}

/// A file as Hugging Face's, with elements of a type of so many bits and names that begin so.
fn sound(dtype: (&'static str, usize), prefix: &str, bias: Bias) -> Vec<u8> {
    let mut entries = Vec::new();
    for (name, mut shape) in TINY.parameters(bias) {
        if name.starts_with("h.") {
            shape.reverse();
        }
        entries.push((format!("{prefix}{name}"), dtype, shape));
    }
    entries.push(("h.0.attn.bias".to_owned(), dtype, vec![1]));
    entries.push(("lm_head.weight".to_owned(), dtype, vec![3, 2]));
    tensors::holding(&entries, tensors::FINITE)
}

pub(super) fn config(bytes: &[u8]) {
    let path = place::file("config.json", bytes);
    match Gpt2Config::read(path.parent().expect("a file lies in a folder")) {
        Ok(config) => {
            let parameters = config.parameters(Bias::Present);
            assert!(parameters.len() > 4 * config.n_layer);
            let elements = parameters
                .iter()
                .map(|(_, shape)| shape.iter().map(|&length| length as u128).product::<u128>());
            assert!(elements.sum::<u128>() >= config.n_embd as u128);
        }
        Err(error) => refused(&error, "config.json"),
    }
}

pub(super) fn config_variants() -> Vec<Vec<u8>> {
    let sound = r#"{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":32,"n_positions":64,"vocab_size":256,"n_inner":128,
        "activation_function":"gelu_new","layer_norm_epsilon":1e-05,"tie_word_embeddings":true,"scale_attn_weights":true,
        "add_cross_attention":false,"scale_attn_by_inverse_layer_idx":false,"reorder_and_upcast_attn":false}"#;
    let path = place::file("config.json", sound.as_bytes());
    assert!(
        Gpt2Config::read(path.parent().expect("a file lies in a folder")).is_ok(),
        "is not sound"
    );
    values::files(values::json(
        sound,
        &["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "gpt2", "gpt_neo"],
    ))
}

pub(super) fn config_seeds() -> Vec<Vec<u8>> {
    let sound = r#"{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":32,"n_positions":64,"vocab_size":256"#;
    let mut seeds: Vec<Vec<u8>> =
        ["", "{", "{}", "null", "[1,2]", "{\"model_type\":\"gpt2\"}", "{\"model_type\":7}"]
            .map(Into::into)
            .into();
    let fields = [
        "",
        r#","n_inner":null,"activation_function":"gelu_new","layer_norm_epsilon":1e-05,"tie_word_embeddings":true"#,
        r#","activation_function":"relu""#,
        r#","activation_function":[[[["gelu_new"]]]]"#,
        r#","activation_function":"\u001b[2J""#,
        r#","layer_norm_epsilon":1e999"#,
        r#","layer_norm_epsilon":NaN"#,
        r#","n_layer":2"#,
        r#","n_inner":18446744073709551615"#,
        r#","n_inner":18446744073709551616"#,
        r#","n_inner":-1"#,
        r#","n_inner":4.5"#,
        r#","scale_attn_weights":1,"add_cross_attention":false,"scale_attn_by_inverse_layer_idx":true"#,
        r#","task_specific_params":{"text-generation":{"do_sample":true,"max_length":50}}"#,
    ];
    seeds.extend(fields.map(|field| format!("{sound}{field}}}").into_bytes()));
    for (from, to) in [
        ("256", "0"),
        ("\"n_layer\":2", "\"n_layer\":4097"),
        ("32", "33"),
        ("64", "16777217"),
        ("gpt2", "llama"),
    ] {
        seeds.push(format!("{}}}", sound.replacen(from, to, 1)).into_bytes());
    }
    seeds.push(format!("{sound},\"x\":{}", "[".repeat(5000)).into_bytes());
    seeds.push(format!("{sound},\"activation_function\":\"{}\"}}", "g".repeat(5000)).into_bytes());
    seeds.push(format!("\u{feff}{sound}}}").into_bytes());
    seeds.push([sound.as_bytes(), b",\"\xff\":1}"].concat());
    seeds
}
