//! The GPU of a test, and text to train on.

use std::{
    env,
    sync::{Mutex, PoisonError},
};

use sparse24_run::{
    data::{Corpus, Dataset, Tokenizer, TokenizerKind, VALIDATION_FRACTION},
    run::CausalLm,
};
use sparse24_train::{
    backend::{Backend, BackendSettings, Launches, cuda::CudaBackend},
    model::{Gpt2Spec, ModelSpec},
    trainer::{ParameterState, Recipe, Trainer},
};

/// Runs a test with a backend on the GPU, which it has to itself; without one it is skipped, which
/// fails where `SPARSE24_REQUIRE_GPU` is set.
pub(crate) fn on_gpu(test: impl FnOnce(Box<dyn Backend>)) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaBackend::open(BackendSettings::default()) {
        Ok(backend) => test(Box::new(backend)),
        Err(error) if env::var_os("SPARSE24_REQUIRE_GPU").is_none() => println!("skipped: {error}"),
        Err(error) => panic!("this run requires a GPU: {error}"),
    }
}

/// Another backend on the GPU of [`on_gpu`].
pub(crate) fn opened(launches: Launches) -> Box<dyn Backend> {
    let settings = BackendSettings { launches, ..BackendSettings::default() };
    Box::new(CudaBackend::open(settings).expect("it opened before"))
}

/// The embedded corpus as tokens.
pub(crate) fn embedded(kind: TokenizerKind) -> Dataset {
    let corpus = Corpus::embedded();
    let tokenizer = Tokenizer::for_text(kind, corpus.text()).expect("the text has tokens");
    Dataset::from_corpus(&corpus, tokenizer, VALIDATION_FRACTION).expect("the text is long enough")
}

/// The batches of a run on this dataset.
pub(crate) fn drawn<'a>(dataset: &'a Dataset, recipe: &Recipe) -> CausalLm<'a> {
    CausalLm { dataset, seed: recipe.seed, shape: recipe.batch, ahead: None }
}

/// At step 0.
pub(crate) fn trainer(backend: Box<dyn Backend>, recipe: &Recipe) -> Trainer {
    Trainer::new(backend, recipe.clone()).expect("room")
}

pub(crate) fn states(trainer: &mut Trainer) -> Vec<ParameterState> {
    trainer.parameter_states().expect("downloads")
}

/// The model of a recipe, to change it.
pub(crate) fn gpt2(recipe: &mut Recipe) -> &mut Gpt2Spec {
    match &mut recipe.model {
        ModelSpec::Gpt2(spec) => spec,
        other => panic!("a GPT-2, not {other:?}"),
    }
}
