//! Writes the seeds of every target into a folder, one folder a target.

use std::{env, fs, io, path::PathBuf};

use sparse24_tests::hardening::TARGETS;

fn main() -> io::Result<()> {
    let corpora =
        PathBuf::from(env::args_os().nth(1).expect("an argument: the folder of the corpora"));
    for target in &TARGETS {
        let corpus = corpora.join(target.name);
        fs::create_dir_all(&corpus)?;
        for (kind, inputs) in [("seed", target.seeds), ("variant", target.variants)] {
            for (number, input) in inputs().iter().enumerate() {
                fs::write(corpus.join(format!("{kind}-{number:04}")), input)?;
            }
        }
    }
    Ok(())
}
