//! The functions that the page calls. Those that wait for the GPU return a promise.

use sparse24_core::{
    Mask,
    philox::{Purpose, Site, Stream, uniform},
};
use sparse24_train::{
    Error,
    backend::{
        BackendSettings,
        wgpu::{Arrivals, WgpuBackend},
    },
    method::PhaseKind,
    trainer::{FlipSampling, ParameterState, Progress, Trainer, overall_flip_rate},
};
use wasm_bindgen::prelude::*;

use crate::{Text, hash, packed, recipe};

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console, js_name = error)]
    fn log_error(text: &str);
}

/// Writes panics to the console.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|info| log_error(&info.to_string())));
}

fn thrown(error: Error) -> JsError {
    JsError::new(&error.to_string())
}

/// A run in this tab.
#[wasm_bindgen]
pub struct Session {
    trainer: Trainer,
    text: Text,
    arrivals: Arrivals,
    /// The state at the last [`Session::masks`].
    kept: Option<(Progress, Vec<ParameterState>)>,
}

/// Opens and tests the adapter that the browser chooses, and initializes the quickstart.
async fn opened(seed: u64) -> Result<(Trainer, Arrivals), JsError> {
    let backend = WgpuBackend::request(BackendSettings::default()).await.map_err(thrown)?;
    let arrivals = backend.arrivals();
    let trainer = Trainer::new(Box::new(backend), recipe(seed)).map_err(thrown)?;
    Ok((trainer, arrivals))
}

/// The outcome of a step.
#[wasm_bindgen]
pub struct Step {
    /// The optimizer step, counted from 1.
    pub step: u32,
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// The flip rate of all sparse weights, if it was sampled.
    pub flip_rate: Option<f64>,
    /// Whether forward and backward used pruned weights.
    pub sparse: bool,
}

/// All masks at one step.
#[wasm_bindgen]
pub struct Masks {
    masks: Vec<(String, Mask)>,
    packed: Vec<u8>,
}

#[wasm_bindgen]
impl Session {
    /// Opens the adapter that the browser chooses, tests it, and initializes the quickstart.
    pub async fn open(seed: u32) -> Result<Session, JsError> {
        let (trainer, arrivals) = opened(seed.into()).await?;
        Ok(Self { trainer, text: Text::new(seed.into()), arrivals, kept: None })
    }

    /// Opens the adapter again, for instance after its loss, restores the state that the last
    /// [`Session::masks`] kept, and returns its step.
    pub async fn reopen(&mut self) -> Result<u32, JsError> {
        let (trainer, arrivals) = opened(self.trainer.recipe().seed).await?;
        (self.trainer, self.arrivals) = (trainer, arrivals);
        if let Some((progress, states)) = &self.kept {
            self.trainer.restore(progress.clone(), states).map_err(thrown)?;
        }
        Ok(self.trainer.step())
    }

    /// Optimizer steps of the run.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.trainer.recipe().steps
    }

    /// Takes a step. Every tenth step samples the flip rate.
    pub async fn step(&mut self) -> Result<Step, JsError> {
        let is_sampled = (self.trainer.step() + 1).is_multiple_of(10);
        let sampling = if is_sampled { FlipSampling::Sample } else { FlipSampling::Skip };
        let started = self.trainer.start_step(&self.text, sampling).map_err(thrown)?;
        self.arrivals.all().await;
        let outcome = started.finish().map_err(thrown)?;
        Ok(Step {
            step: outcome.step,
            loss: outcome.loss,
            flip_rate: outcome.flips.as_deref().map(overall_flip_rate),
            sparse: outcome.phase == PhaseKind::Sparse,
        })
    }

    /// The masks that the next step uses; none in the dense phase. Keeps the state of the run.
    pub async fn masks(&mut self) -> Result<Masks, JsError> {
        let copied = self.trainer.copy_out(Vec::new()).map_err(thrown)?;
        self.arrivals.all().await;
        let states = copied().map_err(thrown)?;
        let masks =
            states.iter().filter_map(|state| Some((state.name.clone(), state.mask.clone()?)));
        let masks: Vec<_> = masks.collect();
        let packed = packed(masks.iter().map(|(_, mask)| mask));
        self.kept = Some((self.trainer.progress().clone(), states));
        Ok(Masks { masks, packed })
    }

    /// Samples `length` bytes after a line feed, at temperature 0.8, as text.
    pub async fn sample(&mut self, length: u32) -> Result<String, JsError> {
        let seed = self.trainer.recipe().seed;
        let stream = Stream::new(seed, Site::new(Purpose::Sampling, 0), 0, self.trainer.step());
        let mut tokens = vec![u32::from(b'\n')];
        for position in 0..length {
            let logits = self.trainer.start_logits(&tokens).map_err(thrown)?;
            self.arrivals.all().await;
            let logits = logits().map_err(thrown)?.swap_remove(0);
            tokens.push(draw(&logits, uniform(stream.words(position)[0])));
        }
        let bytes: Vec<u8> = tokens[1..].iter().map(|&token| token as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Draws a token from the softmax of the logits at temperature 0.8, with the uniform number `u` in
/// [0, 1).
fn draw(logits: &[f32], u: f32) -> u32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |&logit: &f32| libm::exp(f64::from(logit - most) / 0.8);
    let mut left = f64::from(u) * logits.iter().map(weight).sum::<f64>();
    let drawn = logits.iter().position(|logit| {
        left -= weight(logit);
        left < 0.0
    });
    drawn.unwrap_or(logits.len() - 1) as u32
}

#[wasm_bindgen]
impl Masks {
    /// Names of the weights, in order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.masks.iter().map(|(name, _)| name.clone()).collect()
    }

    /// `[rows, columns]` of mask number `place`.
    #[must_use]
    pub fn shape(&self, place: usize) -> Vec<usize> {
        self.masks[place].1.shape().into()
    }

    /// One byte per element of mask number `place`, row-major: 1 = kept.
    #[must_use]
    pub fn kept(&self, place: usize) -> Vec<u8> {
        let (_, mask) = &self.masks[place];
        let [rows, columns] = mask.shape();
        (0..rows * columns).map(|i| mask.keeps(i / columns, i % columns).into()).collect()
    }

    /// The contents of the file that the page downloads: [`packed`] masks.
    #[must_use]
    pub fn file(&self) -> Vec<u8> {
        self.packed.clone()
    }

    /// BLAKE3 of the file.
    #[must_use]
    pub fn hash(&self) -> String {
        hash(&self.packed)
    }
}
