//! Starts and imports when the disk fails, or the process dies, at any file operation; identities.

use std::{collections::BTreeSet, fs};

use super::*;
use crate::{
    config::{dotted, is_neutral, table_of},
    data::{Corpus, TokenizerKind},
    disk::fault::{self, Fault, Plan},
    run::save_imported,
};
use sparse24_core::op::Activation;
use sparse24_train::{
    estimate::estimate,
    model::{ActivationCheckpointing, Sparsify},
};

fn tiny(method: &str) -> Config {
    let settings = format!(
        "steps=2 model.layers=1 model.d_model=8 model.heads=2 model.d_ff=16 \
            model.sequence_length=8 batch.size=2 data.tokenizer=byte \
         method.name={method} model.activation=gelu"
    );
    let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
    Config::resolve(Some(crate::config::preset::PRESETS[0].name), None, &settings).unwrap()
}

fn dataset() -> Dataset {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "to be or not to be ".repeat(9)).unwrap();
    Dataset::from_corpus(
        &Corpus::open(&text).unwrap(),
        Tokenizer::for_text(TokenizerKind::Byte, "").unwrap(),
        0.2,
    )
    .unwrap()
}

fn weights(config: &Config) -> Vec<NamedTensor> {
    let dataset = dataset();
    let mut trainer = new_trainer(config, dataset.vocabulary() as usize).unwrap();
    let state = identity(config, &dataset, &trainer);
    snapshot(&mut trainer, state, Vec::new(), None).unwrap()().unwrap().weights
}

/// Lets the Nth file operation fail, then the next, until none is left to fail; gives how many
/// there were.
fn failing_everywhere(
    plan: fn(u32) -> Plan,
    mut attempt: impl FnMut(&Path) -> bool,
    check: impl Fn(&Path),
) -> u32 {
    for operation in 0..1000 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        fault::plan(plan(operation));
        let done = attempt(&path);
        fault::plan(Plan::Healthy);
        if done {
            return operation;
        }
        check(&path);
    }
    panic!("it never succeeds");
}

/// Whether a run of `config` with these first weights could be started at `path`.
fn starts(config: &Config, given: &[NamedTensor], path: &Path) -> bool {
    let given = Given { weights: Some(given), ..Given::default() };
    Run::start(config.clone(), dataset(), given, path).is_ok()
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    let config = tiny("fst");
    let given = weights(&config);
    let attempt = |path: &Path| starts(&config, &given, path);
    let operations = failing_everywhere(
        |at| Plan::Fail(at, Fault::NoSpace),
        attempt,
        |path| assert!(!path.exists()),
    );
    assert!(operations > 20, "{operations}");
}

#[test]
fn a_start_that_is_killed_is_no_run_or_one_with_its_weights() {
    let config = tiny("fst");
    let given = weights(&config);
    let attempt = |path: &Path| starts(&config, &given, path);
    failing_everywhere(Plan::Kill, attempt, |path| {
        if path.join("config.toml").exists() {
            let first = checkpoint::latest(&path.join("checkpoints")).unwrap().checkpoint.unwrap();
            assert!(checkpoint::load(&first).unwrap().weights == given);
        }
    });
}

#[test]
fn an_import_that_fails_leaves_nothing() {
    let config = tiny("dense");
    let given = weights(&config);
    let attempt =
        |path: &Path| save_imported(&config, given.clone(), Some(&Tokenizer::Byte), path).is_ok();
    let operations = failing_everywhere(
        |at| Plan::Fail(at, Fault::NoSpace),
        attempt,
        |path| assert!(!path.exists()),
    );
    assert!(operations > 20, "{operations}");
}

#[test]
fn only_the_weights_of_the_model_are_imported_and_only_dense() {
    let config = tiny("dense");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let refusal = |config: &Config, weights| {
        save_imported(config, weights, None, &path).unwrap_err().to_string()
    };
    let given = weights(&config);
    assert!(
        refusal(&tiny("fst"), given.clone())
            .starts_with("method.name: expected a method that starts dense")
    );
    let mut short = given.clone();
    short.pop();
    assert!(
        refusal(&config, short).starts_with(&format!(
            "parameter {}: is not the model's next parameter",
            given.len() - 1
        ))
    );
    let mut odd = given.clone();
    odd[1].name = "other".to_owned();
    assert!(refusal(&config, odd).starts_with("other: is not the model's next"));
    assert!(!path.exists());
    save_imported(&config, given, None, &path).unwrap();
}

#[test]
fn what_decides_no_bits_is_no_part_of_the_identity() {
    let config = tiny("fst");
    let same = |change: fn(&mut Config)| {
        let mut changed = config.clone();
        change(&mut changed);
        assert_ne!(changed, config);
        changed.decisive() == config.decisive()
    };
    assert!(same(|config| config.preset = "other".to_owned()));
    assert!(same(|config| config.data.path = "elsewhere".to_owned()));
    assert!(same(|config| config.backend.threads += 1));
    assert!(same(|config| config.backend.gpu += 1));
    assert!(same(|config| config.backend.cuda_graphs = false));
    assert!(same(|config| config.model.activation_checkpointing = ActivationCheckpointing::Blocks));
    assert!(same(|config| config.run.checkpoint_every += 1));
    assert!(same(|config| config.run.keep_last += 1));
    assert!(same(|config| config.run.instrument_every += 1));
    assert!(same(|config| config.run.flip_reference = "elsewhere".to_owned()));
    assert!(!same(|config| config.run.eval_every += 1), "it decides the metrics");
    assert!(!same(|config| config.seed += 1));
    assert!(!same(|config| config.steps += 1));
    assert!(!same(|config| config.batch.size += 1));
    assert!(!same(|config| config.data.validation_share /= 2.0));
}

#[test]
fn the_format_lists_what_decides_no_bits() {
    let format = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checkpoint-format.md");
    // A package of this crate alone has no such document.
    let Ok(text) = fs::read_to_string(format) else { return };
    let (_, listed) =
        text.split_once("`config` leaves out settings that decide no bit: ").expect("the list");
    let (listed, _) = listed.split_once(". Also left out").expect("its end");
    let listed: BTreeSet<&str> = listed.split('`').skip(1).step_by(2).collect();
    let keys = dotted(table_of(&tiny("fst")));
    let neutral = keys.keys().map(String::as_str).filter(|key| is_neutral(key));
    assert_eq!(listed, neutral.collect());
}

#[test]
fn a_checkpoint_has_the_bytes_that_are_estimated() {
    for (method, sparsify) in ["dense", "fst", "ste", "bi-mask"]
        .into_iter()
        .flat_map(|method| [Sparsify::Ffn, Sparsify::FfnAndAttention].map(|of| (method, of)))
    {
        let mut config = tiny(method);
        (config.model.sparsify, config.model.activation) = (sparsify, Activation::Swiglu);
        let mut trainer = new_trainer(&config, dataset().vocabulary() as usize).unwrap();
        let state = identity(&config, &dataset(), &trainer);
        let checkpoint = snapshot(&mut trainer, state, Vec::new(), None).unwrap()().unwrap();
        assert_eq!(
            checkpoint.bytes(),
            estimate(trainer.recipe(), config.backend_entry().unwrap()).unwrap().checkpoint_bytes,
            "{method}, {sparsify:?}"
        );
    }
}
