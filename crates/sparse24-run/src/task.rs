//! Fine-tuning: labelled sentences and pairs of them, questions about paragraphs, and the scores by
//! which a model is judged.
//!
//! | step | type |
//! | --- | --- |
//! | the files of a task, and what they hold | [`Task`], the rows of [`TASKS`] |
//! | files to sentences and labels, or to questions | `read`, `squad` |
//! | sentences to tokens, questions to windows of tokens | [`Examples`], [`Spans`] |
//! | the batch of a step, and an evaluation | [`TaskBatches`], a pure function of (seed, step) |
//! | predictions to scores | [`Score`] |

mod batch;
mod example;
mod examples;
mod read;
mod score;
mod spans;
mod squad;

pub use batch::TaskBatches;
pub use example::{Example, Layout, Target, TaskSource};
pub use examples::{Examples, Judgement, Split};
pub use score::Score;
pub use spans::{LONGEST_QUESTION, Spans};

/// A task: its files, and how a prediction is judged.
#[derive(Debug, PartialEq, Eq)]
pub struct Task {
    /// The name that commands take.
    pub name: &'static str,
    /// The prediction in words.
    pub about: &'static str,
    /// Source.
    pub source: &'static str,
    /// Names that the column of the first sentence has, in a file whose first line names columns.
    first: &'static [&'static str],
    /// The same for the second sentence; empty for a task of single sentences.
    second: &'static [&'static str],
    /// The same for the label.
    label: &'static [&'static str],
    /// The columns of a file without such a line.
    bare: &'static [Bare],
    /// Its labels.
    pub labels: Labels,
    /// Files of the training split; the first that exists is read.
    train: &'static [&'static str],
    /// Files of the validation split: of the first group that exists, all are read.
    validation: &'static [&'static [&'static str]],
    /// The scores, the one that the task is judged by first.
    pub scores: &'static [Score],
}

impl Task {
    /// The names of its files, in words.
    #[must_use]
    pub fn files(&self) -> String {
        let groups = self.validation.iter().map(|names| names.join(" + "));
        let validation = groups.collect::<Vec<_>>().join(" or ");
        format!("{}, {validation}", self.train.join(" or "))
    }
}

/// The columns of a line of a file that does not name them.
#[derive(Debug, PartialEq, Eq)]
struct Bare {
    /// Columns per line.
    columns: usize,
    first: usize,
    second: usize,
    label: usize,
}

/// The labels of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Labels {
    /// One of these; class i is the i-th.
    Named(&'static [&'static str]),
    /// A class; the classes are those of the training split, in ascending order.
    Found,
    /// A number.
    Value,
    /// A part of a text that answers a question, in files like SQuAD's.
    Span,
}

/// In the order of Hugging Face's `glue` dataset.
const ENTAILMENT: Labels = Labels::Named(&["entailment", "not_entailment"]);
const SENTENCE: &[&str] = &["sentence", "text"];

/// Common to most tasks of GLUE.
const PAIR_TASK: Task = Task {
    name: "",
    about: "",
    source: "GLUE, Wang et al. 2019, arXiv 1804.07461",
    first: &["sentence1", "sentence_A"],
    second: &["sentence2", "sentence_B"],
    label: &["label"],
    bare: &[],
    labels: Labels::Named(&["0", "1"]),
    train: &["train.tsv"],
    validation: &[&["dev.tsv"], &["val.tsv"]],
    scores: &[Score::Accuracy],
};

const SICK: Task = Task {
    source: "SICK, Marelli et al. 2014",
    train: &["SICK_train.txt"],
    validation: &[&["SICK_trial.txt"]],
    ..PAIR_TASK
};

/// Files of users.
const OWN: Task = Task {
    source: "files of your own",
    first: &["text", "sentence", "sentence1"],
    second: &["text2", "sentence2"],
    labels: Labels::Found,
    train: &["train.csv", "train.tsv"],
    validation: &[&["validation.csv"], &["validation.tsv"], &["dev.csv"], &["dev.tsv"]],
    ..PAIR_TASK
};

/// Every task.
pub const TASKS: &[Task] = &[
    Task {
        name: "cola",
        about: "whether a sentence is grammatical",
        first: SENTENCE,
        second: &[],
        bare: &[Bare { columns: 4, first: 3, second: 3, label: 1 }],
        train: &["train.tsv", "in_domain_train.tsv"],
        validation: &[&["dev.tsv"], &["in_domain_dev.tsv", "out_of_domain_dev.tsv"]],
        scores: &[Score::Matthews, Score::Accuracy],
        ..PAIR_TASK
    },
    Task {
        name: "sst-2",
        about: "whether a review is positive",
        first: SENTENCE,
        second: &[],
        bare: &[Bare { columns: 2, first: 0, second: 0, label: 1 }],
        ..PAIR_TASK
    },
    Task {
        name: "mrpc",
        about: "whether two sentences mean the same",
        first: &["#1 String"],
        second: &["#2 String"],
        label: &["Quality"],
        train: &["train.tsv", "msr_paraphrase_train.txt"],
        validation: &[&["dev.tsv"], &["val.tsv"], &["msr_paraphrase_test.txt"]],
        scores: &[Score::F1, Score::Accuracy],
        ..PAIR_TASK
    },
    Task {
        name: "qqp",
        about: "whether two questions mean the same",
        first: &["question1"],
        second: &["question2"],
        label: &["is_duplicate"],
        scores: &[Score::F1, Score::Accuracy],
        ..PAIR_TASK
    },
    Task {
        name: "sts-b",
        about: "how similar two sentences are, from 0 to 5",
        label: &["score"],
        bare: &[Bare { columns: 3, first: 1, second: 2, label: 0 }],
        labels: Labels::Value,
        train: &["train.tsv", "2015.train.tsv"],
        validation: &[&["dev.tsv"], &["2015.val.tsv"]],
        scores: &[Score::Pearson, Score::Spearman],
        ..PAIR_TASK
    },
    Task {
        name: "mnli",
        about: "whether a sentence entails or contradicts another",
        label: &["gold_label"],
        labels: Labels::Named(&["entailment", "neutral", "contradiction"]),
        validation: &[&["dev_matched.tsv"], &["dev_mismatched.tsv"]],
        ..PAIR_TASK
    },
    Task {
        name: "qnli",
        about: "whether a sentence answers a question",
        first: &["question"],
        second: &["sentence"],
        labels: ENTAILMENT,
        ..PAIR_TASK
    },
    Task {
        name: "rte",
        about: "whether a sentence entails another",
        bare: &[Bare { columns: 4, first: 1, second: 2, label: 3 }],
        labels: ENTAILMENT,
        ..PAIR_TASK
    },
    Task { name: "wnli", about: "whether a sentence with a pronoun replaced follows", ..PAIR_TASK },
    Task {
        name: "sick-r",
        about: "how related two sentences are, from 1 to 5",
        label: &["relatedness_score"],
        labels: Labels::Value,
        scores: &[Score::Pearson, Score::Spearman],
        ..SICK
    },
    Task {
        name: "sick-e",
        about: "whether a sentence entails or contradicts another",
        label: &["entailment_judgment"],
        labels: Labels::Named(&["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]),
        ..SICK
    },
    Task {
        name: "banking77",
        about: "which of 77 requests a bank's customer has",
        source: "Casanueva et al. 2020, arXiv 2003.04807",
        first: SENTENCE,
        second: &[],
        label: &["category", "label"],
        labels: Labels::Found,
        train: &["train.csv"],
        validation: &[&["test.csv"]],
        ..PAIR_TASK
    },
    Task {
        name: "squad",
        about: "which part of a text answers a question",
        source: "SQuAD v1.1, Rajpurkar et al. 2016, arXiv 1606.05250, or files of your own like it",
        first: &[],
        second: &[],
        label: &[],
        labels: Labels::Span,
        train: &["train-v1.1.json", "train.json"],
        validation: &[&["dev-v1.1.json"], &["dev.json"], &["validation.json"]],
        scores: &[Score::F1, Score::ExactMatch],
        ..PAIR_TASK
    },
    Task {
        name: "classification",
        about: "your own classes: columns text (or sentence1, sentence2) and label",
        ..OWN
    },
    Task {
        name: "regression",
        about: "your own numbers: columns text (or sentence1, sentence2) and label",
        labels: Labels::Value,
        scores: &[Score::Pearson, Score::Spearman],
        ..OWN
    },
];

/// The tokens between the beginnings of two windows with which SQuAD is trained.
pub const STRIDE: usize = 128;
/// The tokens of a window with which SQuAD is trained.
pub const WINDOW: usize = 384;

/// The task of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Task> {
    TASKS.iter().find(|task| task.name == name)
}
