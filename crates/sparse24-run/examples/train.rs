//! Trains the quickstart model for a hundred steps and evaluates it.
//!
//! `cargo run --release -p sparse24-run --example train -- DIR`

use std::{env, error::Error, path::Path};

use sparse24_run::{
    config::Config,
    run::{Ended, Given, Observer, Run, StepMetrics, open_data},
};

struct Print;

impl Observer for Print {
    fn stepped(&mut self, metrics: &StepMetrics) {
        if metrics.step.is_multiple_of(10) {
            println!("step {} loss {:.4}", metrics.step, metrics.loss);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = env::args().nth(1).ok_or("usage: train DIR")?;
    // Any settings of `sparse24 config`.
    let settings = ["steps=100", "optimizer.warmup_steps=10"].map(str::to_owned);
    let config = Config::default().with_settings(&settings)?;
    let dataset = open_data(&config)?;
    let mut run = Run::start(config, dataset, Given::default(), Path::new(&directory))?;
    if let Ended::Finished(summary) = run.train(&mut Print)? {
        println!("validation loss {:.4}", summary.val_loss);
    }
    Ok(())
}
