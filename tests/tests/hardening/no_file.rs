//! What is not the regular file that a loader expects: nothing at all, a folder, a link to nothing
//! or to itself, a pipe that nobody writes, a device without an end.
//!
//! Invariant: each is refused by name, and none is waited for.

use std::{fs, path::Path};

use sparse24_core::MaskKind;
use sparse24_lab::study;
use sparse24_run::{
    Error, checkpoint,
    config::Config,
    data::{Corpus, Dataset, Tokenizer, shard},
    interchange::{Gpt2Config, import},
    pruning::{Search, Selection, Unprunable, prune_file, verify_file},
    run::MetricsLog,
};

/// A loader: its name, the file that it reads in a folder, and itself.
type Loader = (&'static str, &'static str, fn(&Path) -> Result<(), Error>);

const LOADERS: [Loader; 16] = [
    ("Config::resolve", "config.toml", |folder| {
        Config::resolve(None, Some(&folder.join("config.toml")), &[]).map(drop)
    }),
    ("Config::read", "config.toml", |folder| Config::read(&folder.join("config.toml")).map(drop)),
    ("study::Plan::read", "study.toml", |folder| {
        study::Plan::read(&folder.join("study.toml"), &study::Overrides::default()).map(drop)
    }),
    ("verify_file", "model.safetensors", |folder| {
        verify_file(&folder.join("model.safetensors"), SELECTION).map(drop)
    }),
    ("prune_file", "model.safetensors", |folder| {
        prune_file(
            &folder.join("model.safetensors"),
            &folder.join("out"),
            SELECTION,
            Search::Exact,
            Unprunable::Copy,
        )
        .map(drop)
    }),
    ("import of a file", "model.safetensors", |folder| {
        import(&folder.join("model.safetensors"), &[]).map(drop)
    }),
    ("import of a folder", "model.safetensors", |folder| import(folder, &[]).map(drop)),
    ("Gpt2Config::read", "config.json", |folder| Gpt2Config::read(folder).map(drop)),
    ("checkpoint::load", "manifest.json", |folder| checkpoint::load(folder).map(drop)),
    ("checkpoint::verify", "manifest.json", checkpoint::verify),
    ("shard::read", "train.bin", |folder| shard::read(&folder.join("train.bin"), None).map(drop)),
    ("Dataset::from_folder", "train.bin", |folder| {
        Dataset::from_folder(folder, None, None).map(drop)
    }),
    ("Tokenizer::load", "tokenizer.json", |folder| {
        Tokenizer::load(&folder.join("tokenizer.json")).map(drop)
    }),
    ("Corpus::open", "corpus.txt", |folder| Corpus::open(&folder.join("corpus.txt")).map(drop)),
    ("MetricsLog::read", "metrics.jsonl", |folder| {
        MetricsLog::read(&folder.join("metrics.jsonl")).map(drop)
    }),
    ("MetricsLog::resume", "metrics.jsonl", |folder| {
        MetricsLog::resume(&folder.join("metrics.jsonl"), 1).map(drop)
    }),
];

const SELECTION: Selection<'static> = Selection { kind: MaskKind::RowWise, include: &|_| true };

/// Every loader refuses what `make` puts in the place of its file, and names it.
fn refused(what: &str, make: impl Fn(&Path)) {
    refused_in(&std::env::temp_dir(), what, make);
}

fn refused_in(root: &Path, what: &str, make: impl Fn(&Path)) {
    for (loader, name, load) in LOADERS {
        let folder = tempfile::tempdir_in(root).unwrap();
        make(&folder.path().join(name));
        match load(folder.path()) {
            // A folder of texts is a corpus, and a run may have no metrics yet.
            Ok(()) => assert!(
                loader == "MetricsLog::resume" && what.ends_with("nothing"),
                "{loader} accepts {what}"
            ),
            Err(error) => {
                let message = error.to_string();
                let folder = folder.path().file_name().unwrap().to_str().unwrap();
                assert!(
                    message.contains(name) || message.contains(folder),
                    "{loader}, {what}: {message}"
                );
            }
        }
    }
}

#[test]
fn nothing() {
    refused("nothing", |_| {});
}

#[test]
fn folders() {
    refused("a folder", |path| fs::create_dir(path).unwrap());
}

#[cfg(unix)]
#[test]
fn links_to_nothing() {
    use std::os::unix::fs::symlink;
    refused("a link to nothing", |path| symlink("nowhere", path).unwrap());
    refused("a link to itself", |path| symlink(path, path).unwrap());
}

#[cfg(unix)]
#[test]
fn devices() {
    for device in ["/dev/zero", "/dev/null"] {
        refused(device, |path| std::os::unix::fs::symlink(device, path).unwrap());
    }
}

#[cfg(unix)]
#[test]
fn pipes() {
    refused("a pipe", |path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success())
    });
}

/// A file of which all is a hole, or all but the beginning: larger than any memory, and it takes no
/// disk.
#[cfg(target_os = "linux")]
#[test]
fn holes() {
    /// No process can address so much.
    const SIZE: u64 = 1 << 47;
    let root = Path::new("/dev/shm");
    let skipped = || println!("skipped: {} takes no file of 128 TiB", root.display());
    let Ok(folder) = tempfile::tempdir_in(root) else { return skipped() };
    let stretch =
        |path: &Path| fs::File::options().append(true).create(true).open(path)?.set_len(SIZE);
    if stretch(&folder.path().join("any")).is_err() {
        return skipped();
    }
    let stretched = |path: &Path| stretch(path).unwrap();
    refused_in(root, "a hole", stretched);
    let path = folder.path().join("model.safetensors");
    let header = |data: u64| {
        format!(
            r#"{{"wte.weight":{{"dtype":"F32","shape":[{},1],"data_offsets":[0,{data}]}}}}"#,
            data / 4
        )
    };
    let data = SIZE - 8 - header(SIZE).len() as u64;
    fs::write(
        &path,
        [&(header(data).len() as u64).to_le_bytes(), header(data).as_bytes()].concat(),
    )
    .unwrap();
    stretched(&path);
    let message = import(&path, &[("wte.weight".to_owned(), vec![data as usize / 4, 1])])
        .unwrap_err()
        .to_string();
    assert!(
        message.starts_with("cannot read ") && message.contains("model.safetensors: "),
        "{message}"
    );
}
