//! A folder to work in, the command in it, and what is asked of every answer and every refusal.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// A run of a fraction of a second on the file `text`: 12 steps, of which 10 are sparse; 144
/// characters a step of 27.
pub(crate) const TINY: &str = "--set data.path=text --set data.tokenizer=char --set steps=12 --set model.layers=2 --set model.d_model=16 \
    --set model.heads=2 --set model.d_ff=32 --set model.sequence_length=12 --set batch.size=6 --set method.refresh=4 \
    --set optimizer.learning_rate=0.02 --set optimizer.warmup_steps=2 --set run.flip_every=3 --set run.eval_every=0 \
    --set backend.threads=1";

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

    /// The command with the words of `line`.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sparse24"));
        command.args(line.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    /// Standard output of a command that succeeds.
    pub(crate) fn answer(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(0),
            "{line}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// As [`Place::answer`], parsed.
    pub(crate) fn json(&self, line: &str) -> Value {
        let answer = self.answer(line);
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{line}: {error} in {answer}"))
    }

    /// Trains the tiny configuration with more settings; gives the summary.
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

    /// The command fails with this code and one sentence like `pattern` (where `*` stands for
    /// anything), and changes no file.
    pub(crate) fn refuses(&self, line: &str, code: i32, pattern: &str) {
        self.refuses_command(self.command(line), code, pattern);
    }

    /// As [`Place::refuses`], for arguments that are not words.
    pub(crate) fn refuses_command(&self, mut command: Command, code: i32, pattern: &str) {
        let before = self.tree("");
        let output = command.output().unwrap();
        let message = sentence(&output);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {message}");
        assert!(output.stdout.is_empty(), "{command:?}: a refusal prints to standard error alone");
        assert!(is_like(&message, &format!("error: {pattern}")), "{command:?}: {message}");
        let after = self.tree("");
        assert!(
            before.keys().eq(after.keys()),
            "{message}: files before {:?}, after {:?}",
            before.keys(),
            after.keys()
        );
        assert!(before == after, "{message}: a file has changed");
    }

    /// Every file and folder below one, with its contents; locks change hands.
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

/// The one line on standard error, which is all that a refusal says.
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

/// Whether `text` is `pattern`, in which `*` stands for anything.
pub(crate) fn is_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// 4000 characters of words that are drawn by a seed: a-z and the space.
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
            // Two draws: the first letters of the alphabet are more frequent, so that there is
            // something to learn.
            text.push(char::from(b'a' + draw(26).min(draw(26)) as u8));
        }
    }
    text.truncate(4000);
    text
}

#[test]
fn patterns_match_as_they_say() {
    for (text, pattern, expected) in [
        ("abc", "abc", true),
        ("abc", "ab", false),
        ("abc", "a*", true),
        ("abc", "a*c", true),
        ("abc", "*b*", true),
        ("abc", "a*b", false),
        ("abc", "*c*b*", false),
    ] {
        assert_eq!(is_like(text, pattern), expected, "{text} {pattern}");
    }
}
