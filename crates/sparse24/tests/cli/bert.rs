//! BERT: masked tokens instead of next ones, from training to evaluation.

use serde_json::Value;

use crate::support::{Place, SAVED, TINY};

const BERT: &str = "--set model.kind=bert --set model.bias=true --set model.activation=gelu-erf";
const CRAMMED: &str = "--set model.kind=crammed-bert --set model.activation=geglu";

#[test]
fn a_run_repeats_its_bits_and_its_losses() {
    let place = Place::new();
    for (run, model) in [("bert", BERT), ("crammed", CRAMMED)] {
        let more = format!("{model} --method fst {SAVED} --set model.dropout=0.1");
        let summary = place.train(run, &more);
        place.repeats(run);
        let report = place.json(&format!("eval {run} --json"));
        assert_eq!(report["loss"], summary["val_loss"], "{run}");
        // 15 % of 400 tokens, give or take four standard deviations.
        let tokens = report["tokens"].as_u64().unwrap();
        assert!((32..=88).contains(&tokens), "{tokens} masked tokens");
        // Sequences are masked by number, whatever the batch.
        let large = format!("{run}-large");
        place.train(&large, &format!("{more} --set batch.size=30"));
        assert_eq!(place.json(&format!("eval {large} --json"))["tokens"], report["tokens"]);
    }
}

#[test]
fn a_bert_reads_wordpiece() {
    let place = Place::new();
    let prepare = "prepare --data text --json --tokenizer";
    let pieces = place.json(&format!("{prepare} wordpiece --pieces 100 --out pieces"));
    let data = "--set data.path=pieces --set data.tokenizer=wordpiece --set steps=12";
    place.train("run", &format!("{BERT} {data} {SAVED} --method fst --set batch.size=2"));
    place.repeats("run");
    // The vocabulary has a mask token of its own.
    let model = place.model("run", 12);
    let length = u64::from_le_bytes(model[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&model[8..8 + length]).unwrap();
    let table = &header["embeddings.word_embeddings.weight"]["shape"];
    assert_eq!(table[0], pieces["vocabulary"]);
    let again = place.json(&format!("{prepare} run/tokenizer.json --out again"));
    assert_eq!(again["fingerprint"], pieces["fingerprint"]);
}

#[test]
fn what_a_bert_cannot_do_is_refused() {
    let place = Place::trained(BERT);
    place.write("few", "abcdefghij klmnopqrst");
    let untrained = format!("train {TINY} {BERT} --data few --out other");
    for (line, code, pattern) in [
        ("sample run", 3, "run does not generate text: it is a BERT"),
        ("eval run --data few", 3, "few: none of its validation tokens is a target"),
        (&untrained, 3, "few: none of its validation tokens is a target"),
        (
            "train --init-from run --data text --set model.kind=gpt2 --out other",
            3,
            "run: model.kind=\"gpt2\", but the initial weights have \"bert\"; use settings",
        ),
        ("config --set model.kind=bert", 2, "model.bias: expected true for a BERT"),
        (
            "config --set model.kind=crammed-bert --set model.bias=true",
            2,
            "model.bias: expected false for a crammed BERT",
        ),
        ("config --set model.kind=elmo", 2, "model.kind: *elmo*bert"),
        (
            "config --preset bert-tiny-cpu --set model.activation_checkpointing=blocks",
            2,
            "model.activation_checkpointing: this model keeps all activations",
        ),
    ] {
        place.refuses(line, code, pattern);
        assert!(!place.has("other"), "{line}: left something behind");
    }
    let (out, _) = place.exits("resume run --set steps=14", 0);
    assert!(out.contains("next            sparse24 export run DIR\n"), "{out}");
}
