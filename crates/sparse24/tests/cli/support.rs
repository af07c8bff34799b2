//! A temporary folder, the command run in it, and checks of its output and its refusals.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// Settings of a run on the file `text` that takes a fraction of a second: 12 steps, 10 of them
/// sparse, of 72 tokens, with a vocabulary of 27.
pub(crate) const TINY: &str = "--set data.path=text --set data.tokenizer=char --set steps=12 \
    --set model.layers=2 --set model.d_model=16 --set model.heads=2 --set model.d_ff=32 \
    --set model.sequence_length=12 --set batch.size=6 --set method.refresh=4 \
    --set optimizer.learning_rate=0.02 --set optimizer.warmup_steps=2 --set run.flip_every=3 \
    --set run.eval_every=0 --set backend.threads=1";

/// A temporary folder with a file `text`.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        place.write("text", text(1));
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Replaces text in a file, which must contain it.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let text = self.read(name);
        assert!(text.contains(from), "{from:?} is missing in {text}");
        self.write(name, text.replace(from, to));
    }

    /// The command with the words of `line` as arguments.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sparse24"));
        command.args(line.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    /// Exit code, standard output and standard error.
    pub(crate) fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let Output { status, stdout, stderr } = self.command(line).output().unwrap();
        let [out, err] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (status.code(), out, err)
    }

    /// Standard output of a command that succeeds.
    pub(crate) fn answer(&self, line: &str) -> String {
        let (code, out, err) = self.run(line);
        assert_eq!(code, Some(0), "{line}: {err}");
        out
    }

    /// Standard error of a command that succeeds.
    pub(crate) fn notes(&self, line: &str) -> String {
        let (code, _, err) = self.run(line);
        assert_eq!(code, Some(0), "{line}: {err}");
        err
    }

    /// Standard output of a command that succeeds, parsed as JSON.
    pub(crate) fn json(&self, line: &str) -> Value {
        let answer = self.answer(line);
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{line}: {error} in {answer}"))
    }

    /// Trains [`TINY`] with more arguments; returns the summary.
    pub(crate) fn train(&self, out: &str, more: &str) -> Value {
        self.json(&format!("train {TINY} {more} --out {out} --json"))
    }

    /// The objects of a run's `metrics.jsonl`.
    pub(crate) fn metrics(&self, run: &str) -> Vec<Value> {
        self.read(&format!("{run}/metrics.jsonl"))
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// The names in `run/checkpoints`, sorted.
    pub(crate) fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(run).join("checkpoints")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Removes the checkpoints of these steps.
    pub(crate) fn rewind<const N: usize>(&self, run: &str, steps: [u32; N]) {
        for step in steps {
            fs::remove_dir_all(self.path(&checkpoint(run, step))).unwrap();
        }
    }

    /// The weights in the checkpoint of a step.
    pub(crate) fn model(&self, run: &str, step: u32) -> Vec<u8> {
        fs::read(self.path(&checkpoint(run, step)).join("model.safetensors")).unwrap()
    }

    /// The command fails with this code and a sentence like `pattern` (see [`is_like`]), and
    /// changes no file.
    pub(crate) fn refuses(&self, line: &str, code: i32, pattern: &str) {
        self.refuses_command(self.command(line), code, pattern);
    }

    /// [`Place::refuses`] for arguments that are not words.
    pub(crate) fn refuses_command(&self, mut command: Command, code: i32, pattern: &str) {
        let before = self.tree("");
        let output = command.output().unwrap();
        let message = sentence(&output);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {message}");
        assert!(output.stdout.is_empty(), "{command:?}: a refusal prints only to standard error");
        let is_error = message.starts_with("error: ") && is_like(&message, pattern);
        assert!(is_error, "{command:?}: expected {pattern}, found {message}");
        let after = self.tree("");
        assert!(
            before.keys().eq(after.keys()),
            "{message}: {:?}, {:?}",
            before.keys(),
            after.keys()
        );
        assert!(before == after, "{message}: a file has changed");
    }

    /// Every file with its contents and every folder below one, without the locks.
    pub(crate) fn tree(&self, below: &str) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        fn add(root: &Path, folder: &Path, tree: &mut BTreeMap<PathBuf, Option<Vec<u8>>>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(root).unwrap().to_owned();
                if path.is_dir() {
                    tree.insert(name, None);
                    add(root, &path, tree);
                } else if !name.ends_with("lock") {
                    tree.insert(name, Some(fs::read(&path).unwrap()));
                }
            }
        }
        let (root, mut tree) = (self.path(below), BTreeMap::new());
        add(&root, &root, &mut tree);
        tree
    }
}

/// The path of a checkpoint, relative to the place.
pub(crate) fn checkpoint(run: &str, step: u32) -> String {
    format!("{run}/checkpoints/step-{step:08}")
}

/// The one line that a refusal prints to standard error.
pub(crate) fn sentence(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked") && !text.contains('\u{1b}'), "{text}");
    let line = text.strip_suffix('\n').unwrap_or_else(|| panic!("expected a line, found {text:?}"));
    assert!(
        !line.contains('\n') && !line.contains(". ") && !line.ends_with('.'),
        "expected one sentence, found {text}"
    );
    line.to_owned()
}

/// Whether `text` contains every part of `pattern` between `*`, in any order.
pub(crate) fn is_like(text: &str, pattern: &str) -> bool {
    pattern.split('*').all(|part| text.contains(part))
}

/// 4000 characters of random words of a-z, separated by spaces.
pub(crate) fn text(seed: u32) -> String {
    let mut state = seed;
    let mut draw = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut text: String = ('a'..='z').collect();
    while text.len() < 4000 {
        text.push(' ');
        for _ in 0..2 + draw(6) {
            // The smaller of two draws: frequencies that a model can learn.
            text.push(char::from(b'a' + draw(26).min(draw(26)) as u8));
        }
    }
    text.truncate(4000);
    text
}
