//! Fine-tuning: from a pre-trained model to scores, through an interruption, and what is refused.

use serde_json::json;

use crate::support::{Place, SAVED};

pub(crate) const BERT: &str =
    "--set model.kind=bert --set model.bias=true --set model.activation=gelu-erf";
const CRAMMED: &str = "--set model.kind=crammed-bert --set model.activation=geglu";

/// A folder of a task whose label is whether the sentence has an x.
pub(crate) fn data(place: &Place) {
    for (name, count) in [("train.tsv", 48), ("dev.tsv", 20)] {
        let row = |i: usize| {
            let label = i % 3 % 2;
            let sentence = if label == 1 { "xx" } else { "aa" };
            format!("s\t{label}\t\t{sentence} {}\n", i % 7)
        };
        place.write(&format!("task/{name}"), (0..count).map(row).collect::<String>());
    }
}

#[test]
fn a_model_is_fine_tuned_from_either_family() {
    for (model, method) in [(BERT, "dense"), ("", "dense"), (BERT, "fst"), (CRAMMED, "fst")] {
        let place = Place::trained(&format!("{model} --set data.tokenizer=byte"));
        data(&place);
        let tune = format!(
            "finetune --task cola --data task --init-from run --method {method} \
             --set batch.size=8 --set optimizer.learning_rate=0.01 {SAVED} --json"
        );
        // Two epochs of 48 examples.
        assert_eq!(place.json(&format!("{tune} --epochs 2 --out short"))["steps"], 12);
        place.repeats("short");
        let summary = place.json(&format!("{tune} --epochs 20 --out tuned"));
        let scores = &summary["scores"];
        assert!(scores["accuracy"].as_f64().is_some_and(|share| share > 0.9), "{summary}");
        assert!(scores["matthews"].as_f64().is_some_and(|score| score > 0.8), "{summary}");
        let report = place.json("eval tuned --json");
        assert_eq!([&report["loss"], &report["scores"]], [&summary["val_loss"], scores]);
        assert_eq!(report["tokens"], 20, "examples are counted");
        assert_eq!(report["perplexity"], json!(null), "the loss is of classes");
        place.refuses("eval tuned --tokens 3", 2, "--tokens: a fine-tuned model*is evaluated on");
        let again = "train --config tuned/config.toml --out no";
        place.refuses(
            again,
            2,
            "task.name: expected \"\", found \"cola\", for `sparse24 finetune`",
        );
        if !model.is_empty() {
            let pretrain = "train --init-from tuned --data text --out no";
            place.refuses(pretrain, 3, "tuned: is fine-tuned and has no head for masked tokens");
        }
        assert_eq!(place.metrics("tuned")[0].get("flip_rate"), None, "run.flip_every is 0");
        let other = place.json("eval tuned --data task --json");
        assert_eq!(other["loss"], report["loss"]);
        place.exits("report tuned --out page.html", 0);
        let page = place.read("page.html");
        assert!(page.contains("Score of the task") && page.contains("matthews"), "no score");
        place.refuses("sample tuned --prompt a", 3, "tuned does not generate text: it is");
        // A fine-tuned model is a start too, with a new head.
        let again = tune.replace("--init-from run", "--init-from tuned --epochs 1 --out again");
        assert_eq!(place.json(&again)["steps"], 6);
    }
}

/// A folder of questions like SQuAD's, whose answer is where the letters x and y are. Some contexts
/// take more than one window.
pub(crate) fn questions(place: &Place) {
    for (name, count) in [("train-v1.1.json", 60), ("dev-v1.1.json", 12)] {
        let paragraph = |i: usize| {
            let letters = |count: usize, by: usize| -> String {
                (0..count).map(|at| char::from(b'a' + (at * by % 7) as u8)).collect()
            };
            let (before, after) = (letters(i * 5 % 11, 1 + i % 6), letters(i * 3 % 13, 1 + i % 5));
            let (context, start) = (format!("\u{e9}{before} xy {after}"), 2 + before.len());
            json!({
                "context": context,
                "qas": [{
                    "id": format!("{name} {i}"),
                    "question": "xy?",
                    "answers": [{"text": "xy", "answer_start": start}],
                }],
            })
        };
        let paragraphs: Vec<_> = (0..count).map(paragraph).collect();
        let file = json!({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]});
        place.write(&format!("squad/{name}"), file.to_string());
    }
}

#[test]
fn answers_are_found_by_either_family() {
    for model in [BERT, CRAMMED, ""] {
        let place = Place::trained(&format!(
            "{model} --set data.tokenizer=byte --set model.sequence_length=24"
        ));
        questions(&place);
        let tune = format!(
            "finetune --task squad --data squad --init-from run --set batch.size=8 \
             --set optimizer.learning_rate=0.01 --set task.stride=8 {SAVED} --json"
        );
        place.json(&format!("{tune} --set steps=12 --out short"));
        place.repeats("short");
        let summary = place.json(&format!("{tune} --epochs 12 --out tuned"));
        let losses: Vec<_> =
            place.metrics("tuned").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
        assert!(losses[losses.len() - 1] < losses[0] / 4.0, "{losses:?}");
        let scores = &summary["scores"];
        for score in ["exact_match", "f1"] {
            assert!(scores[score].as_f64().is_some_and(|share| share > 0.9), "{summary}");
        }
        let report = place.json("eval tuned --json --predictions answers.json");
        assert_eq!([&report["loss"], &report["scores"]], [&summary["val_loss"], scores]);
        let answers = place.value("answers.json");
        let answers: Vec<_> = answers.as_object().unwrap().iter().collect();
        assert_eq!(answers.len(), 12, "an answer for each question");
        assert!(report["tokens"].as_u64().unwrap() > 12, "no context takes two windows");
        let right = answers.iter().filter(|(_, answer)| *answer == "xy").count();
        assert_eq!(Some(right as f64 / 12.0), scores["exact_match"].as_f64(), "{answers:?}");
        let other = place.json("eval tuned --data squad/dev-v1.1.json --json");
        assert_eq!(other["loss"], report["loss"]);
        place.exits("report tuned --out page.html", 0);
        assert!(place.read("page.html").contains("Score of the task"));
        place.refuses("eval tuned short --predictions x", 2, "--predictions: writes the answers");
        place.refuses("eval tuned --predictions answers.json", 3, "answers.json: already exists");
        place.refuses("eval run --predictions x", 2, "--predictions: run answers no questions");
        place.refuses(
            "finetune --task squad --data squad/dev-v1.1.json --init-from run",
            3,
            "is not a folder; expected one with the files of squad",
        );
        place.refuses(&format!("{tune} --set task.stride=0 --out no"), 2, "task.stride: ");
    }
}

#[test]
fn a_model_keeps_the_names_of_its_classes() {
    let place = Place::trained(&format!("{BERT} --set data.tokenizer=byte"));
    let table = |folder: &str, classes: &str| {
        let rows: String = classes.split(' ').map(|class| format!("a {class},{class}\n")).collect();
        for name in ["train.csv", "validation.csv"] {
            place.write(&format!("{folder}/{name}"), format!("text,label\n{}", rows.repeat(9)));
        }
    };
    table("colours", "red green blue");
    table("fewer", "red green");
    table("others", "red green amber");
    place.remove("others/train.csv");
    let tune = "finetune --task classification --data colours --init-from run --epochs 40 \
                --set optimizer.learning_rate=0.02 --set batch.size=9 --out tuned --json";
    assert_eq!(place.json(tune)["scores"]["accuracy"], 1.0);
    let accuracy =
        |run: &str| place.json(&format!("eval {run} --data fewer --json"))["scores"].clone();
    assert_eq!(accuracy("tuned"), json!({"accuracy": 1.0}));
    let refusal =
        "others/validation.csv: line 4: has the label \"amber\", expected a class of the model";
    place.refuses("eval tuned --data others", 3, refusal);
    // Another order of the classes is one of the rows of the head too.
    place.exits("export tuned exported", 0);
    let names = json!({"0": "blue", "1": "green", "2": "red"});
    assert_eq!(place.value("exported/config.json")["id2label"], names);
    place.exits("import exported imported --task classification", 0);
    assert_eq!(accuracy("imported"), json!({"accuracy": 1.0}));
    let said = place.answer("import exported other --task mnli");
    let counts = "class 0 of the model, \"blue\", counts as \"entailment\" of the task mnli";
    assert!(said.contains(counts), "{said}");
    for (class, name) in ["blue", "green", "red"].iter().enumerate() {
        let numbered = format!("\"LABEL_{class}\"");
        place.edit("exported/config.json", &format!("{name:?}"), &numbered);
    }
    place.exits("import exported unnamed --task classification", 0);
    place.refuses("eval unnamed --data fewer", 3, "fewer: has 2 classes, the model 3");
    let (_, said) = place.exits("eval unnamed --data colours", 0);
    assert!(said.contains("in order, blue, green, red"), "{said}");
    table("numbers", "-2 -1 0 1 2 3 4 5 6 7 8 9 10");
    place
        .answer("finetune --task classification --data numbers --init-from run --epochs 1 --out n");
    place.answer("export n numbered");
    assert_eq!(place.value("numbered/config.json")["id2label"]["12"], "10");
    // A configuration that holds these names could not be read again.
    table("long", &["a", "b"].map(|class| class.repeat(40_000)).join(" "));
    place.answer("finetune --task classification --data long --init-from run --epochs 1 --out far");
    place.answer("eval far");
}

#[test]
fn what_cannot_be_fine_tuned_is_refused() {
    let place = Place::trained(&format!("{BERT} --set data.tokenizer=byte"));
    data(&place);
    place.folder("empty");
    for name in ["train.csv", "dev.csv"] {
        place.write(&format!("large/{name}"), "text,label\r\na,1e20\r\n");
    }
    ["csv", "tsv"].iter().for_each(|kind| place.write(&format!("both/train.{kind}"), ""));
    let tune = "finetune --init-from run --out other";
    for (line, code, pattern) in [
        (
            format!("{tune} --task coal --data task"),
            2,
            "task.name: \"coal\" is not known; did you mean",
        ),
        (format!("{tune} --task cola"), 2, "--data: name the folder with the files of cola"),
        (format!("{tune} --task cola --data nowhere"), 3, "nowhere: is not a folder"),
        (format!("{tune} --task cola --data empty"), 3, "empty: has no training file of cola"),
        (
            format!("{tune} --task rte --data task"),
            3,
            "line 1: has the label \"aa 0\", expected entailment",
        ),
        (
            format!("{tune} --task cola --data task --set task.max_length=9999"),
            2,
            "task.max_length: expected at most model.sequence_length",
        ),
        (
            format!("{tune} --task cola --data task --set model.heads=1 --set data.tokenizer=char"),
            3,
            "run: model.heads=1, but the initial weights have 2*data.tokenizer=*have \"byte\"; \
             use settings and data",
        ),
        (
            format!("{tune} --task cola --data task --method half"),
            3,
            "the method half has a d_ff of",
        ),
        (format!("{tune} --task cola --data task --epochs 0"), 2, "--epochs"),
        (
            format!("{tune} --task regression --data large"),
            3,
            "large/train.csv: line 2: has the label \"1e20\", expected a number from -1e15 to 1e15",
        ),
        (format!("{tune} --task regression --data both"), 3, "both: *train.csv*train.tsv"),
        (
            format!("{tune} --task classification --data large --set task.classes=[\"a\",\"a\"]"),
            2,
            "task.classes: *\"a\" twice",
        ),
        (
            format!("{tune} --task cola --data task --set task.name=rte"),
            2,
            "task.name: expected \"cola\", as --task, found \"rte\"",
        ),
        (
            format!("{tune} --task cola --data task --set task.outputs=3"),
            2,
            "task.outputs: expected 2, the classes of the training split, found 3",
        ),
        ("finetune --task cola --data task --init-from task".to_owned(), 3, "task/config.json"),
    ] {
        place.refuses(&line, code, pattern);
        assert!(!place.has("other"), "{line}: left something behind");
    }
}

#[test]
fn several_tasks_and_seeds_make_a_table() {
    let place = Place::trained(&format!("{BERT} --set data.tokenizer=byte"));
    data(&place);
    place.rename("task", "glue/CoLA");
    place.folder("glue/other");
    let glue =
        "glue --init-from run --data glue --seeds 3,5 --epochs 2 --set batch.size=8 --out all";
    let table = place.json(&format!("{glue} --json"));
    let scores = &table["tasks"]["cola"]["accuracy"];
    for (at, seed) in [3, 5].into_iter().enumerate() {
        let run = format!("all/cola/seed-{seed}");
        assert_eq!(scores[at], place.metrics(&run)[11]["scores"]["accuracy"]);
    }
    let both = |at: usize| {
        let score = |name| table["tasks"]["cola"][name][at].as_f64().unwrap();
        (score("accuracy") + score("matthews")) / 2.0
    };
    assert_eq!(table["averages"], json!([both(0), both(1)]));
    let all = "--set run.checkpoint_every=1 --set run.keep_last=16777216";
    let huge = glue.replace("--epochs 2", "--epochs 1000000000").replace("all", "huge");
    place.refuses(&format!("{huge} {all}"), 4, "huge: the checkpoints of 2 runs need *MiB of disk");
    assert!(!place.has("huge"));
    // Again, with one run lost and one kept.
    place.remove("all/cola/seed-5");
    let kept = place.bytes("all/cola/seed-3/metrics.jsonl");
    assert_eq!(place.json(&format!("{glue} --json")), table);
    assert_eq!(place.bytes("all/cola/seed-3/metrics.jsonl"), kept);
    let text = place.answer(glue);
    assert!(text.contains("cola") && text.contains("average"), "{text}");
    // Again, with a damaged checkpoint.
    place.write("all/cola/seed-3/checkpoints/step-00000012/model.safetensors", "");
    assert_eq!(place.json(&format!("{glue} --json")), table);
    assert_eq!(place.timeless("all/cola/seed-3").len(), 12);
    place.train("other", &format!("{BERT} --set data.tokenizer=char"));
    let tokenizer = place.read("all/cola/seed-3/tokenizer.json");
    place.write("all/cola/seed-3/tokenizer.json", place.read("other/tokenizer.json"));
    place.refuses(glue, 3, "was fine-tuned with another tokenizer; remove it");
    place.write("all/cola/seed-3/tokenizer.json", tokenizer);
    // Labels that are all the same correlate with nothing.
    for name in ["train.tsv", "dev.tsv"] {
        place.write(&format!("glue/sts-b/{name}"), "1.0\taa\tab\n".repeat(9));
    }
    let undefined = place.json(&format!("{glue} --tasks sts-b --json"));
    assert_eq!(undefined["tasks"]["sts-b"]["pearson"], json!([null, null]), "{undefined}");
    assert_eq!(undefined["averages"], json!([null, null]), "{undefined}");
    place.answer("export all/sts-b/seed-3 exported");
    place.train("second", &format!("{BERT} --set data.tokenizer=byte --seed 8"));
    for name in ["train.tsv", "dev.tsv"] {
        place.write(&format!("moved/cola/{name}"), place.read(&format!("glue/CoLA/{name}")));
    }
    for (line, code, pattern) in [
        (
            format!("{glue} --set optimizer.learning_rate=1.0"),
            3,
            "was fine-tuned with optimizer.learning_rate = *, expected 1.0",
        ),
        (
            glue.replace("--init-from run", "--init-from second"),
            3,
            "all/cola/seed-3: was fine-tuned from other weights",
        ),
        (glue.replace("--data glue", "--data moved"), 3, "seed-3: was fine-tuned on *glue/CoLA"),
        (format!("{glue} --seed 3"), 2, "--seed: each run has one of --seeds"),
        (format!("{glue} --steps 3"), 2, "--epochs*cannot be used with*--steps"),
        (glue.replace("3,5", "3,5,3"), 2, "seeds: 3 is listed twice"),
        (format!("{glue} --tasks colla"), 2, "--tasks: \"colla\" is not known; did you mean"),
        (format!("{glue} --tasks cola,cola"), 2, "--tasks: cola is listed twice"),
        (format!("{glue} --tasks rte"), 3, "glue: has no folder rte"),
        (glue.replace("--data glue", "--data glue/other"), 3, "no folder named after a task"),
        (glue.replace("--data glue ", ""), 2, "--data: name a folder with a folder for each task"),
    ] {
        place.refuses(&line, code, pattern);
    }
    let dev = place.read("glue/CoLA/dev.tsv");
    place.write("glue/CoLA/dev.tsv", dev.replacen("aa", "ab", 1));
    place.refuses(glue, 3, "undo the change, remove all/cola/seed-3 to train it again, or");
    // A run of others names no file for us to read.
    let config = "all/cola/seed-3/config.toml";
    place.edit(config, "flip_reference = \"\"", "flip_reference = \"/nowhere\"");
    place.refuses(glue, 3, "seed-3: was fine-tuned with another run.flip_reference");
}
