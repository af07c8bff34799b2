//! Imports a Hugging Face folder, with its head, and exports it to another:
//! `cargo run --release -p sparse24-run --example round_trip -- FROM TO`.
//!
//! Every value comes back as it was (an F32 export of F32, F16 or BF16 weights is exact).

use std::{env, error::Error, path::Path};

use sparse24_run::interchange::{
    Description, Dtype, FolderModel, Format, Values, export, import, shapes,
};

fn main() -> Result<(), Box<dyn Error>> {
    let [from, to] = <[String; 2]>::try_from(env::args().skip(1).collect::<Vec<_>>())
        .map_err(|_| "usage: round_trip FROM TO")?;
    let FolderModel { spec, labels, languages } = FolderModel::read(Path::new(&from))?;
    let imported = import(Path::new(&from), Format::of(&spec)?, &shapes(&spec)?)?;
    let labels: Vec<_> = labels.iter().map(String::as_str).collect();
    let languages = languages.each_ref().map(String::as_str);
    let description = Description { spec: &spec, tokenizer: None, labels: &labels, languages };
    let (weights, to) = (&imported.weights, Path::new(&to));
    let exported = export(to, weights, description, Dtype::F32, Values::Dense)?;
    println!(
        "{spec:?}: {} tensors, {} of them zero biases; left out: {:?}",
        weights.len(),
        exported.zero_biases.len(),
        imported.dropped
    );
    Ok(())
}
