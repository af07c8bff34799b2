//! A temporary folder, the command run in it, and checks of its output and its refusals.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use sparse24_run::ranks::free_port;

/// Settings of a run on the file `text` that takes a fraction of a second: 12 steps, 10 of them
/// sparse, of 72 tokens, with a vocabulary of 27.
pub(crate) const TINY: &str = "--set data.path=text --set data.tokenizer=char --set steps=12 \
    --set model.layers=2 --set model.d_model=16 --set model.heads=2 --set model.d_ff=32 \
    --set model.sequence_length=12 --set batch.size=6 --set method.refresh=4 \
    --set optimizer.learning_rate=0.02 --set optimizer.warmup_steps=2 --set run.flip_every=3 \
    --set run.eval_every=0 --set backend.threads=1";

/// Checkpoints after the steps 4, 8, 10 and 12 of [`TINY`].
pub(crate) const SAVED: &str = "--checkpoint-every 4 --set run.keep_last=9";

/// A temporary folder with a file `text`.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    /// In memory where that is possible: most of the time of a short run is spent in syncs.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let place = Self(folder.unwrap());
        place.write("text", text(1));
        place
    }

    /// With a run `run` of [`TINY`] and more arguments.
    pub(crate) fn trained(more: &str) -> Self {
        let place = Self::new();
        place.train("run", more);
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Path of a file or folder, whose parent folder is created.
    fn new_path(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub(crate) fn folder(&self, name: &str) {
        fs::create_dir_all(self.path(name)).unwrap();
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.new_path(name), contents).unwrap();
    }

    pub(crate) fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.new_path(to)).unwrap();
    }

    /// Removes a file or a folder.
    pub(crate) fn remove(&self, name: &str) {
        let path = self.path(name);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
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
        // Mesa's Vulkan drivers complain on standard error if there is none.
        command.env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    /// Starts a command as `world` ranks, each changed by `change`.
    pub(crate) fn ranks(
        &self,
        world: usize,
        line: &str,
        change: impl Fn(usize, &mut Command),
    ) -> Vec<Child> {
        let port = free_port().unwrap();
        let rank = |rank| {
            let ranks = format!("--rank {rank} --world {world} --rendezvous 127.0.0.1:{port}");
            let mut command = self.command(&format!("{line} {ranks}"));
            command.env("SPARSE24_SECRET", "of the test");
            change(rank, &mut command);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        (0..world).map(rank).collect()
    }

    /// Exit code, standard output and standard error.
    pub(crate) fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let Output { status, stdout, stderr } = self.command(line).output().unwrap();
        let [out, err] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (status.code(), out, err)
    }

    /// Standard output and standard error of a command that ends with this code.
    pub(crate) fn exits(&self, line: &str, expected: i32) -> (String, String) {
        let (code, out, err) = self.run(line);
        assert_eq!(code, Some(expected), "{line}: {err}");
        (out, err)
    }

    /// Standard output of a command that succeeds.
    pub(crate) fn answer(&self, line: &str) -> String {
        self.exits(line, 0).0
    }

    /// Standard error of a command that succeeds.
    pub(crate) fn notes(&self, line: &str) -> String {
        self.exits(line, 0).1
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

    /// The metrics without times.
    pub(crate) fn timeless(&self, run: &str) -> Vec<Value> {
        let mut metrics = self.metrics(run);
        for line in &mut metrics {
            assert!(line.as_object_mut().unwrap().remove("tokens_per_s").is_some());
        }
        metrics
    }

    /// A JSON file.
    pub(crate) fn value(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    /// The names in `run/checkpoints`, sorted.
    pub(crate) fn checkpoints(&self, run: &str) -> Vec<String> {
        let tree = self.tree(&format!("{run}/checkpoints"));
        let names = tree.keys().filter(|path| path.components().count() == 1);
        names.map(|name| name.to_str().unwrap().to_owned()).collect()
    }

    /// The checkpoint of a step.
    pub(crate) fn saved(&self, run: &str, step: u32) -> Tree {
        self.tree(&checkpoint(run, step))
    }

    /// Removes the checkpoints of these steps.
    pub(crate) fn rewind<const N: usize>(&self, run: &str, steps: [u32; N]) {
        for step in steps {
            fs::remove_dir_all(self.path(&checkpoint(run, step))).unwrap();
        }
    }

    /// Removes the checkpoints of a run with [`SAVED`] after step 4 and resumes it to the same end.
    pub(crate) fn repeats(&self, run: &str) {
        let end = (self.saved(run, 12), self.timeless(run));
        for name in self.checkpoints(run).iter().filter(|name| *name != "step-00000004") {
            fs::remove_dir_all(self.path(run).join("checkpoints").join(name)).unwrap();
        }
        let summary = self.json(&format!("resume {run} --json"));
        assert_eq!(summary["trained"], 8, "{run}");
        assert!((self.saved(run, 12), self.timeless(run)) == end, "{run}: a resume ends elsewhere");
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
        let names = (before.keys(), after.keys());
        assert!(before == after, "{message}: a file has changed: {names:?}");
    }

    /// Writes the tensors of a safetensors file as two files with an index in a folder; those with
    /// this in their name are in the first.
    pub(crate) fn shard(&self, file: &str, folder: &str, first: &str) {
        let whole = fs::read(self.path(file)).unwrap();
        let whole = SafeTensors::deserialize(&whole).unwrap();
        let mut map = serde_json::Map::new();
        for (number, is_first) in [(1, true), (2, false)] {
            let name = format!("model-0000{number}-of-00002.safetensors");
            let tensors = whole.iter().filter(|(tensor, _)| tensor.contains(first) == is_first);
            let tensors: Vec<_> = tensors.collect();
            map.extend(tensors.iter().map(|(tensor, _)| ((*tensor).to_owned(), json!(name))));
            let bytes = safetensors::serialize(tensors, None).unwrap();
            self.write(&format!("{folder}/{name}"), bytes);
        }
        let index = json!({ "metadata": {}, "weight_map": map });
        self.write(&format!("{folder}/model.safetensors.index.json"), index.to_string());
    }

    /// The files and folders below a folder, without locks.
    pub(crate) fn tree(&self, below: &str) -> Tree {
        fn add(root: &Path, folder: &Path, tree: &mut Tree) {
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
        let (root, mut tree) = (self.path(below), Tree::new());
        add(&root, &root, &mut tree);
        tree
    }
}

/// Files with their contents, and folders.
pub(crate) type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// The path of a checkpoint, relative to the place.
pub(crate) fn checkpoint(run: &str, step: u32) -> String {
    format!("{run}/checkpoints/step-{step:08}")
}

/// The one line that a refusal prints to standard error.
pub(crate) fn sentence(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked") && !text.contains('\u{1b}'), "{text}");
    let text: String = text.split_inclusive('\n').filter(|line| !is_outside(line)).collect();
    let line = text.strip_suffix('\n').unwrap_or_else(|| panic!("expected a line, found {text:?}"));
    assert!(
        !line.contains('\n') && !line.contains(". ") && !line.ends_with('.'),
        "expected one sentence, found {text}"
    );
    line.to_owned()
}

/// Whether a line names a path outside of a run that is about to be read.
pub(crate) fn is_outside(line: &str) -> bool {
    line.starts_with("data.path: reads ") || line.starts_with("run.flip_reference: reads ")
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
