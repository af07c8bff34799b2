//! Writes the seeds and variants of every target below a folder, one folder per target.

use std::{env, fs, io, path::PathBuf};

use sparse24_tests::hardening::TARGETS;

fn main() -> io::Result<()> {
    let corpora = PathBuf::from(env::args_os().nth(1).expect("an argument: the output folder"));
    for target in TARGETS {
        let corpus = corpora.join(target.name);
        fs::create_dir_all(&corpus)?;
        let inputs = [(target.seeds)(), (target.variants)()].concat();
        for (number, input) in inputs.iter().enumerate() {
            fs::write(corpus.join(format!("{number:06}")), input)?;
        }
    }
    Ok(())
}
