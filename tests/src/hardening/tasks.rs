//! The files of fine-tuning tasks.

use std::num::NonZeroU32;

use sparse24_run::{
    data::Tokenizer,
    task::{Examples, Layout, TaskBatches, TaskSource, find},
};
use sparse24_train::{
    nn::BatchShape,
    objective::{Batch, Objective},
    schedule::GradientAccumulation,
};

use super::{Files, file, path, refused};

/// Tasks of every kind of label, with a sound file each.
const SOUND: [(&str, &str, &str, &str); 5] = [
    ("cola", "train.tsv", "dev.tsv", "a\t1\t\tone\nb\t0\t*\ttwo\n"),
    ("rte", "train.tsv", "dev.tsv", "1\tone\ttwo\tentailment\n2\tone\tthree\tnot_entailment\n"),
    ("sts-b", "train.tsv", "dev.tsv", "index\tsentence1\tsentence2\tscore\n0\tone\ttwo\t2.5\n"),
    ("classification", "train.csv", "dev.csv", "text,label\n\"a, b\",x\nc,\"y\"\"\"\n"),
    (
        "squad",
        "train.json",
        "dev.json",
        r#"{"data":[{"paragraphs":[{"context":"\u00e9 b c d e f g h i","qas":[
{"id":"1","question":"who?","answers":[{"text":"b c","answer_start":2}]},
{"id":"2","question":"x","answers":[{"text":"i","answer_start":16}]}]}]}]}"#,
    ),
];

/// The number of a task, then its training file.
pub(super) fn examples(bytes: &[u8]) -> bool {
    let Some((&number, rest)) = bytes.split_first() else { return false };
    let (name, train, dev, sound) = SOUND[usize::from(number) % SOUND.len()];
    for (_, train, dev, _) in SOUND {
        for name in [train, dev] {
            // It may be there from the input before.
            let _ = std::fs::remove_file(path(&format!("task/{name}")));
        }
    }
    file(&format!("task/{train}"), rest);
    file(&format!("task/{dev}"), sound.as_bytes());
    let (task, folder) = (find(name).expect("a task"), path("task"));
    let source = TaskSource {
        task,
        folder,
        layout: Layout::Bert,
        classes: Vec::new(),
        max_length: 16,
        stride: 4,
    };
    let examples = match Examples::open(source, &Tokenizer::Byte) {
        Ok(examples) => examples,
        Err(error) => return refused(&error, "task"),
    };
    let shape = BatchShape { size: 3, sequence_length: 16 };
    let single = GradientAccumulation::constant(NonZeroU32::MIN);
    let (batches, mut batch) = (TaskBatches::new(&examples, 1, shape, single), Batch::default());
    for step in 1..=3 {
        Objective::fill(&batches, step, 0, &mut batch).expect("held in memory");
        assert_eq!((batch.tokens.len(), batch.targets.len(), batch.counted), (48, 48, 3));
        assert!(batch.tokens.iter().all(|&id| id <= 256));
    }
    let of_example = if name == "squad" { 16 } else { 1 };
    let (outputs, count) = (vec![0.5; of_example * examples.outputs()], examples.validation.len());
    let kept: Vec<f32> = (0..count).flat_map(|number| examples.keep(number, &outputs)).collect();
    assert!(kept.len() <= 3 * count, "an evaluation must not hold all outputs");
    assert!(examples.judge(&kept).scores.values().all(|score| score.is_finite()));
    true
}

fn sound() -> impl Iterator<Item = Vec<u8>> {
    (0..).zip(SOUND).map(|(number, (.., text))| [&[number], text.as_bytes()].concat())
}

pub(super) fn examples_seeds() -> Files {
    let attacks: [&[u8]; 6] = [
        b"\0\xef\xbb\xbfa\t1\t\tone\n",
        b"\0a\t1\t\t\xff\n",
        b"\x02x\ta\tb\n",
        b"\x021e999\ta\tb\n2\ta\tb\n",
        b"\x03text,label\n\"never closed,x\n",
        b"\x03text,label,text\na,\x1b[31m,b\n",
    ];
    sound().chain(attacks.map(<[u8]>::to_vec)).collect()
}

/// Sound files with a line left out, repeated, or cut at each of its bytes.
pub(super) fn examples_variants() -> Files {
    let cut = |file: Vec<u8>| (1..file.len()).map(|at| file[..at].to_vec()).collect::<Vec<_>>();
    let doubled = |file: &Vec<u8>| [&file[..], &file[1..]].concat();
    sound().flat_map(|file| [vec![doubled(&file)], cut(file)].concat()).collect()
}
