//! A Transformer, from training to translations and their BLEU, and its refusals.

use crate::support::{Place, SAVED};

/// Sentences of a grammar that is the same in both languages, word by word.
fn write_pairs(place: &Place) {
    const WORDS: [[&str; 2]; 6] = [
        ["the", "der"],
        ["dog", "Hund"],
        ["sees", "sieht"],
        ["a", "eine"],
        ["cat", "Katze"],
        ["today", "heute"],
    ];
    let lines = |language: usize, from: usize, count: usize| -> String {
        let sentence = |i: usize| {
            let words: Vec<_> =
                (0..2 + i % 4).map(|at| WORDS[(i * 7 + at * 5) % 6][language]).collect();
            words.join(" ") + "\n"
        };
        (from..from + count).map(sentence).collect()
    };
    for (language, name) in ["en", "de"].into_iter().enumerate() {
        place.write(&format!("pairs/train.{name}"), lines(language, 0, 40));
        place.write(&format!("pairs/val.{name}"), lines(language, 3, 6));
    }
}

/// A small Transformer; 64 tokens of each language at most in a batch.
const SMALL: &str = "--set model.kind=transformer --set model.bias=true \
    --set model.activation=relu --set model.label_smoothing=0.1 --set model.dropout=0.1 \
    --set model.sequence_length=16 --set batch.size=4 --set data.path=pairs \
    --set data.tokenizer=bpe --set data.source=en --set data.target=de \
    --set data.vocabulary=300";

#[test]
fn a_run_repeats_its_bits_and_translates() {
    let place = Place::new();
    write_pairs(&place);
    for method in ["dense", "fst"] {
        let summary = place.train(method, &format!("{SMALL} --method {method} {SAVED}"));
        let bleu = summary["scores"]["bleu"].as_f64().unwrap();
        assert!((0.0..=100.0).contains(&bleu), "{bleu}");
        place.repeats(method);
        let report = place.json(&format!("eval {method} --bleu --json"));
        assert_eq!(report["loss"], summary["val_loss"], "{method}");
        assert!(report["scores"]["bleu"].as_f64().is_some(), "{report}");
    }
    place.answer("resume dense --set model.label_smoothing=0 --set steps=13");
    let more = format!("{SMALL} --method fst {SAVED} --set backend.threads=3");
    place.train("threads", &more);
    assert!(place.model("threads", 12) == place.model("fst", 12), "other bits on three threads");
    // In the order of the input, an empty line as it is.
    place.write("input", "the dog\n\na cat sees the dog today\n");
    place.write("reference", "der Hund\n\neine Katze sieht der Hund heute\n");
    let text = place.answer("translate fst --input input");
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.lines().nth(1).unwrap().is_empty(), "{text}");
    let line = place.answer("translate fst --input input --bleu reference --out found");
    assert!(line.starts_with("BLEU ") && line.contains("tok:13a|smooth:exp"), "{line}");
    assert_eq!(place.read("found"), text);
    let first = place.answer("translate fst --input input --json --beam 1");
    let first: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert_eq!(first["source"], "the dog");
    assert!(first["score"].as_f64().is_some_and(|score| score < 0.0), "{first}");
}

/// References in pieces count like the words that they spell.
#[test]
fn a_run_of_pieces_is_judged_by_words() {
    let place = Place::new();
    write_pairs(&place);
    let words = "the der dog Hund sees sieht a eine cat Katze today heute";
    let dictionary: String = words.split(' ').map(|word| format!("{word} 1\n")).collect();
    for name in ["en", "de"] {
        place.write(&format!("pairs/dict.{name}.txt"), &dictionary);
    }
    let more = "--set data.tokenizer=dictionary --set model.dropout=0 --steps 100";
    place.train("run", &format!("{SMALL} {more}"));
    let translate = "translate run --input pairs/val.en --out found --bleu";
    place.answer(&format!("{translate} pairs/val.de"));
    let found = place.read("found");
    // A word that the dictionary lacks is wrong, and the tokenizer must not hide that.
    let reference = place.read("pairs/val.de");
    place.write("pairs/val.de", reference.replace("Hund", "Hunde").replace("der", "dem"));
    let line = place.answer(&format!("{translate} pairs/val.de"));
    let bleu = place.json("eval run --data pairs --bleu --json")["scores"]["bleu"].clone();
    assert!(line.starts_with(&format!("BLEU {:.2} ", bleu.as_f64().unwrap())), "{line} {bleu}");
    place.write("pairs/val.de", reference);
    let spell =
        |text: String, word: &str| text.replace(word, &format!("{}@@ {}", &word[..1], &word[1..]));
    let spelled = words.split(' ').filter(|word| word.len() > 1).fold(found.clone(), spell);
    // A reference may end within a word.
    let spelled: String = spelled.lines().map(|line| format!("{line}@@\n")).collect();
    place.write("pieces", spelled);
    let line = place.answer(&format!("{translate} pieces"));
    assert!(line.starts_with("BLEU 100.00 "), "{line} {found}");
}

#[test]
fn what_a_transformer_cannot_read_or_do_is_refused() {
    let place = Place::trained("--method dense");
    write_pairs(&place);
    place.train("en-de", &format!("{SMALL} --method dense"));
    place.write(
        "long",
        "the dog\nthe dog sees a cat and a dog and a cat and a dog and a cat today\n",
    );
    place.write("one", "der Hund\n");
    place.write("endless", ["the dog\n", &"\0".repeat(2 << 20)].concat());
    place.write("binary", b"the dog\n\xff");
    for (line, code, pattern) in [
        ("translate run --input one", 3, "run does not translate"),
        (
            "translate en-de --input long",
            3,
            "long: line 2: has * tokens, but the model reads at most 15",
        ),
        ("translate en-de --input none", 3, "none: cannot be read as text"),
        ("translate en-de --input endless", 3, "endless: line 2: is longer than 1 MiB"),
        ("translate en-de --input binary", 3, "binary: line 2: *UTF-8"),
        ("translate en-de --input long --bleu one", 3, "one: has 1 line, but long has 2"),
        ("translate en-de --input one --beam 0", 2, "--beam: expected 1 to 4"),
        ("translate en-de --input one --out no/found", 4, "cannot write no/found"),
        ("translate en-de --input one --out pairs", 3, "pairs: is a folder"),
        ("translate en-de --input one --out ./one", 2, "--out: would replace one"),
        ("translate en-de --input long --bleu one --out one", 2, "--out: would replace one"),
        ("translate en-de --input one --length-penalty nan", 2, "--length-penalty: expected"),
        ("eval run --bleu", 2, "--bleu: run does not translate"),
        ("sample en-de", 3, "does not generate text"),
    ] {
        let (_, error) = place.exits(line, code);
        let parts: Vec<_> = pattern.split('*').collect();
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    let train = format!("train {SMALL} --set steps=1 --out other");
    for (set, expected) in [
        ("model.sequence_length=12", "a multiple of 8"),
        ("data.tokenizer=byte", "bpe or dictionary"),
        ("data.vocabulary=259", "0 or at least 260"),
        ("data.target=en", "a language other than"),
        ("data.source=fr", "set data.source and data.target"),
        ("data.path=none", "is not a folder"),
        ("model.label_smoothing=1.0", "a number in [0, 1)"),
        ("data.tokenizer=dictionary", "holds no dict.en.txt"),
    ] {
        let (code, _, error) = place.run(&format!("{train} --set {set}"));
        assert!(code != Some(0) && error.contains(expected), "{set}: {code:?} {error}");
        assert!(!place.has("other"), "{set}");
    }
    place.edit("pairs/train.de", "der", "die");
    let (code, _, error) = place.run("resume en-de --set steps=13");
    assert!(code != Some(0) && error.contains("data of"), "{error}");
}

/// The run keeps its vocabulary, so that a setting of another size would only seem to act.
#[test]
fn a_resume_has_the_vocabulary_of_the_run() {
    let place = Place::new();
    write_pairs(&place);
    place.train("run", SMALL);
    let line = "resume run --set steps=20 --set data.vocabulary=400";
    place.refuses(line, 3, "data.vocabulary = 300*data.vocabulary = 400*start a new run");
}

/// As FSMT, with the dictionary; a run that starts from it must have the same one.
#[test]
fn a_transformer_goes_out_and_comes_back() {
    let place = Place::new();
    write_pairs(&place);
    let pieces = "the 9\ndog 8\nder 7\nHund 6\nsieht 5\neine@@ 4\n";
    let write = |text: &str| {
        for language in ["en", "de"] {
            place.write(&format!("pairs/dict.{language}.txt"), text);
        }
    };
    write(pieces);
    let small = SMALL.replace("=bpe", "=dictionary").replace("--set data.vocabulary=300", "");
    place.train("run", &format!("{small} --method fst {SAVED}"));
    place.answer("export run out");
    assert_eq!(place.value("out/tokenizer_config.json")["langs"], serde_json::json!(["en", "de"]));
    place.answer("import out imported");
    let [ours, theirs] = ["eval run", "eval imported --data pairs"]
        .map(|line| place.json(&format!("{line} --json"))["loss"].as_f64().unwrap());
    // Batches of another size are summed in another order, in f32.
    assert!((ours - theirs).abs() <= 1e-6, "{ours} and {theirs}");
    let [ours, theirs] = ["run", "imported"]
        .map(|run| place.answer(&format!("translate {run} --input pairs/val.en")));
    assert_eq!(ours, theirs);
    let line = place.answer("export run/checkpoints/step-00000010 out24 --sparse24");
    assert!(line.contains("sparse24 verify out24/model.safetensors --include layers"), "{line}");
    place.answer("verify out24/model.safetensors --include layers --exclude attn");

    let start = "train --preset transformer-multi30k-cpu --data pairs --set steps=2 \
        --set batch.size=4 --init-from out";
    place.answer(&format!("{start} --out next"));
    for other in [pieces.replace("dog", "cat"), format!("{pieces}more 1\n")] {
        write(&other);
        for line in [&*format!("{start} --out other"), "eval imported --data pairs"] {
            place.refuses(line, 3, "pairs/dict.en.txt: *not the model's dictionary");
        }
    }
    write(pieces);
    place.edit("out/vocab-tgt.json", "dog", "cat");
    place.refuses(&format!("{start} --out other"), 3, "out: *vocab-src.json and vocab-tgt.json");
    for name in ["vocab-src.json", "vocab-tgt.json"] {
        place
            .write(&format!("out/{name}"), "{\"<s>\": 0, \"<pad>\": 1, \"</s>\": 2, \"<unk>\": 3}");
    }
    place.refuses("import out other", 3, "vocab-src.json: *4 pieces*10 ids");
}

/// A vocabulary that is trained on the data is not that of weights without one.
#[test]
fn weights_without_a_vocabulary_take_no_trained_one() {
    let place = Place::new();
    write_pairs(&place);
    place.train("run", SMALL);
    let line = place.answer("export run out");
    assert!(line.contains("wrote no tokenizer: those of the kind bpe"), "{line}");
    let line = place.answer("import out imported");
    assert!(line.contains("no vocab-src.json and vocab-tgt.json"), "{line}");
    place.refuses("translate imported --input pairs/val.en", 3, "imported*no tokenizer.json");
    let start = "train --preset transformer-multi30k-cpu --data pairs --init-from out --out next";
    place.refuses(start, 3, "pairs: holds no dict.en.txt and dict.de.txt");
    let trained = format!("{start} --set data.tokenizer=bpe --set data.vocabulary=300");
    place.refuses(&trained, 3, "out: *no vocab-src.json*is not that of the weights");
}
