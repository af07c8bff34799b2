//! Every loader of files from outside.

use std::path::Path;

use sparse24_core::MaskKind;
use sparse24_lab::study::{Overrides, Plan};
use sparse24_run::{
    Error, checkpoint,
    config::Config,
    data::{Corpus, Dataset, Tokenizer, shard::Shard},
    interchange::{FORMATS, FolderModel, import},
    pruning::{Embeddings, Search, Selection, Unprunable, prune, verify},
    run::MetricsLog,
};

/// Name of a loader, the name of its file, and the loader, which takes the path of that file.
pub(super) type Loader = (&'static str, &'static str, fn(&Path) -> Result<(), Error>);

pub(super) const MODEL: &str = "model.safetensors";
const METRICS: &str = "metrics.jsonl";

pub(super) const SELECTION: Selection<'static> =
    Selection { kind: MaskKind::RowWise, include: &|_| true, embeddings: Embeddings::Skip };

pub(super) const LOADERS: [Loader; 16] = [
    ("Config::resolve", "config.toml", |p| Config::resolve(None, Some(p), &[]).map(drop)),
    ("Config::read", "config.toml", |p| Config::read(p).map(drop)),
    ("Plan::read", "study.toml", |p| Plan::read(p, &Overrides::default()).map(drop)),
    ("verify", MODEL, |p| verify(p, SELECTION, &mut |_, _| Ok(())).map(drop)),
    ("prune", MODEL, |p| {
        let (to, none) = (folder(p).join("out"), &mut |_, _| Ok(()));
        prune(p, &to, SELECTION, Search::Exact, Unprunable::Copy, none).map(drop)
    }),
    ("import of a file", MODEL, import_one),
    ("import of a folder", MODEL, |p| import_one(folder(p))),
    ("FolderModel::read", "config.json", |p| FolderModel::read(folder(p)).map(drop)),
    ("checkpoint::load", "manifest.json", |p| checkpoint::load(folder(p)).map(drop)),
    ("checkpoint::verify", "manifest.json", |p| checkpoint::verify(folder(p))),
    ("Shard::open", "train.bin", |p| Shard::open(p, None)?.verify()),
    ("Dataset::from_folder", "train.bin", |p| {
        Dataset::from_folder(folder(p), None, None).map(drop)
    }),
    ("Tokenizer::load", "tokenizer.json", |p| Tokenizer::load(p).map(drop)),
    ("Corpus::open", "corpus.txt", |p| Corpus::open(p).map(drop)),
    ("MetricsLog::steps", METRICS, |p| MetricsLog::steps(p)?.try_for_each(|s| s.map(drop))),
    ("MetricsLog::resume", METRICS, |p| MetricsLog::resume(p, 1).map(drop)),
];

fn folder(path: &Path) -> &Path {
    path.parent().expect("a file is in a folder")
}

/// Imports one tensor that no attack has.
fn import_one(path: &Path) -> Result<(), Error> {
    import(path, &FORMATS[0], &[("wte.weight".to_owned(), vec![1, 1])]).map(drop)
}

/// The loader of this name.
pub(super) fn loader(name: &str) -> fn(&Path) -> Result<(), Error> {
    LOADERS.iter().find(|loader| loader.0 == name).expect("a known loader").2
}
