//! Imports a Hugging Face GPT-2 folder and exports it to another:
//! `cargo run --example gpt2_round_trip -- FROM TO`.
//!
//! Every value comes back as it was (an F32 export of F32, F16 or BF16 weights is exact).

use std::{env, error::Error, path::Path};

use sparse24_run::interchange::{Dtype, Gpt2Config, Values, export, import};
use sparse24_train::nn::Bias;

fn main() -> Result<(), Box<dyn Error>> {
    let [from, to] = <[String; 2]>::try_from(env::args().skip(1).collect::<Vec<_>>())
        .map_err(|_| "usage: gpt2_round_trip FROM TO")?;
    let config = Gpt2Config::read(Path::new(&from))?;
    let weights = import(Path::new(&from), &config.parameters(Bias::Present))?;
    let exported = export(Path::new(&to), &weights, &config, None, Dtype::F32, Values::Dense)?;
    println!(
        "{config:?}: {} tensors, {} of them zero biases",
        weights.len(),
        exported.zero_biases.len()
    );
    Ok(())
}
