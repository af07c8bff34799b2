//! Core alone in another program: prune a weight matrix with a transposable mask, compress it, and
//! estimate a gradient in 2:4.
//!
//! `cargo run -p sparse24-core --example embed`

use ndarray::Array2;
use sparse24_core::{
    Error, MaskKind,
    compressed::Compressed24,
    mvue,
    philox::{Purpose, Site, Stream},
    search,
};

fn main() -> Result<(), Error> {
    let w = Array2::from_shape_fn((8, 8), |(i, j)| ((7 * i + 5 * j) % 13) as f32 - 6.0);
    let mask = search::mask_search(w.view(), MaskKind::Transposable)?;
    let forward = Compressed24::encode(w.view(), &mask)?;
    let dgrad = Compressed24::encode(w.t(), &mask.transpose())?;
    assert_eq!(forward.decode(), dgrad.decode().t());

    let stream = Stream::new(1337, Site::new(Purpose::Mvue, 0), 0, 1);
    let gradient = mvue::compress(w.view(), mvue::Estimator::Exact, stream)?;
    println!("W in 2:4:\n{:?}\ndZ^T in 2:4, unbiased:\n{:?}", forward.decode(), gradient.decode());
    Ok(())
}
