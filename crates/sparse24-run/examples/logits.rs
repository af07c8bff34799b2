//! Prints the next-token logits of a run or checkpoint after some token ids, one number a line.
//!
//! `cargo run --release -p sparse24-run --example logits -- RUN 464 2068 7586`

use std::{env, error::Error, path::PathBuf};

use sparse24_run::run::Model;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let run: PathBuf = arguments.next().ok_or("usage: logits RUN TOKEN...")?.into();
    let tokens = arguments.map(|token| token.parse()).collect::<Result<Vec<u32>, _>>()?;
    if tokens.is_empty() {
        return Err("usage: logits RUN TOKEN...: expected at least one token id".into());
    }
    for logit in Model::read(&run)?.into_trainer()?.next_logits(&tokens)? {
        println!("{logit}");
    }
    Ok(())
}
