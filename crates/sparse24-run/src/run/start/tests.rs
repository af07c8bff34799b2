//! Starts and imports when the disk fails, or the process dies, at any file operation; identities.

use std::{
    collections::BTreeSet,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::*;
use crate::{
    checkpoint::{Checkpoint, PhaseEnd},
    config::{NEUTRAL, dotted, table_of},
    disk::fault::{self, Fault, Plan},
    error::problem,
    run::{
        Model, Observer, Part, RunData, StepMetrics, checkpoint_of as save_of,
        components::new_trainer, open_data, save_imported,
    },
};
use sparse24_core::{MaskKind::Transposable, op::Activation};
use sparse24_train::{estimate::estimate, model::Sparsify, trainer::FlipSampling};

fn tiny(method: &str) -> Config {
    let settings = format!(
        "steps=2 model.layers=1 model.d_model=8 model.heads=2 model.d_ff=16 \
            model.sequence_length=8 batch.size=2 data.tokenizer=byte \
         method.name={method} model.activation=gelu"
    );
    let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
    Config::resolve(None, None, &settings).unwrap()
}

fn dataset() -> RunData {
    open_data(&tiny("dense")).unwrap()
}

/// The checkpoint of step 0.
fn checkpoint_of(config: &Config) -> Checkpoint {
    let dataset = dataset();
    let mut trainer = new_trainer(config, dataset.vocabulary() as usize).unwrap();
    let state = identity(config, &dataset, position(&trainer));
    snapshot(&mut trainer, state, Vec::new(), None).unwrap()().unwrap()
}

#[test]
fn a_loop_of_ones_own_continues_with_the_same_bits() {
    let (config, data) = (tiny("fst"), dataset());
    let new = || new_trainer(&config, data.vocabulary() as usize).unwrap();
    let step = |trainer: &mut Trainer| {
        let batches = data.batches(trainer.recipe(), None);
        trainer.train_step(&*batches, FlipSampling::Skip).unwrap();
    };
    let (mut whole, mut resumed) = (new(), new());
    step(&mut whole);
    let folder = tempfile::tempdir().unwrap();
    let path = checkpoint::save(folder.path(), &save_of(&mut whole).unwrap()).unwrap();
    restore(&mut resumed, checkpoint::load(&path).unwrap()).unwrap();
    for trainer in [&mut whole, &mut resumed] {
        step(trainer);
    }
    assert_eq!(resumed.step(), 2);
    assert!(whole.parameter_states().unwrap() == resumed.parameter_states().unwrap());
}

#[test]
fn the_ends_of_phases_are_kept_or_found() {
    let with = |phases: &str, steps: u32| {
        let settings = [format!("method.phases=[{phases}]"), format!("steps={steps}")];
        tiny("ste-row-wise").with_settings(&settings).unwrap()
    };
    let (quarter, half) = (r#""dense:1/4","frozen""#, r#""dense:1/2","frozen""#);
    let (empty, thawed) =
        (r#""dense:1/4","sparse:1/4","frozen""#, r#""dense:1/16","frozen:1/8","frozen""#);
    let data = dataset();
    for (what, was, step, recorded, now, is_same, expected) in [
        ("recorded", quarter, 6, Some(4), quarter, true, &[(0, 4)][..]),
        ("not recorded, by an earlier version", quarter, 6, None, quarter, true, &[(0, 4)]),
        ("a phase without a step follows", empty, 6, Some(4), empty, true, &[(0, 4), (1, 4)]),
        ("of another share", quarter, 6, Some(4), half, false, &[]),
        ("frozen from here on", r#""dense""#, 3, None, thawed, false, &[(0, 3)]),
        ("not frozen", quarter, 3, None, half, false, &[]),
        ("at the start", quarter, 0, None, quarter, true, &[]),
    ] {
        let trainer = new_trainer(&with(was, 16), data.vocabulary() as usize).unwrap();
        let mut state = identity(&with(was, 16), &data, position(&trainer));
        state.step = step;
        state.phase_ends = recorded.iter().map(|&step| PhaseEnd { phase: 0, step }).collect();
        // In the longer run, a quarter would end after step 5 and a half after 10.
        let recipe = with(now, 20).recipe(data.vocabulary() as usize).unwrap();
        let kept = kept_ends(&state, &recipe, is_same);
        assert_eq!(kept, expected.iter().copied().collect(), "{what}");
    }
}

/// Lets the Nth file operation fail, then the next, until none is left to fail; gives how many
/// there were.
fn for_each_operation(
    plan: impl Fn(u32) -> Plan,
    attempt: &dyn Fn(&Path) -> bool,
    check: impl Fn(&Path),
) -> u32 {
    for operation in 0..1000 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/run");
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

#[test]
fn a_start_or_an_import_that_fails_leaves_nothing() {
    let (sparse, dense) = (tiny("fst"), tiny("dense"));
    let given = checkpoint_of(&sparse).weights;
    let starts = |path: &Path| {
        let given = Given { weights: Some(&given), ..Given::default() };
        Run::start(sparse.clone(), dataset(), given, path).is_ok()
    };
    let imports =
        |path: &Path| save_imported(&dense, given.clone(), Some(&Tokenizer::Byte), path).is_ok();
    for attempt in [&starts as &dyn Fn(&Path) -> bool, &imports] {
        let fails = |at| Plan::Fail(at, Fault::NoSpace);
        let operations = for_each_operation(fails, attempt, |path| {
            assert!(!path.parent().unwrap().exists());
        });
        assert!(operations > 20, "{operations}");
    }
    // A start that is killed is no run, or one with its weights.
    for_each_operation(Plan::Kill, &starts, |path| {
        if path.join("config.toml").exists() {
            let first = checkpoint::latest(&path.join("checkpoints")).unwrap().checkpoint.unwrap();
            assert!(checkpoint::load(&first).unwrap().weights == given);
        }
    });
}

#[test]
fn a_run_that_could_not_be_resumed_is_not_started() {
    let changed = |change: &dyn Fn(&mut Config)| {
        let mut config = tiny("dense");
        change(&mut config);
        config
    };
    let folder = tempfile::tempdir().unwrap();
    for (config, key) in [
        (changed(&|config| config.steps = 0), "steps"),
        (changed(&|config| config.data.validation_share = 0.3), "data.path"),
        (changed(&|config| config.data.path = "elsewhere".to_owned()), "data.path"),
        // Whole numbers that TOML cannot hold.
        (changed(&|config| config.seed = u64::MAX), "seed"),
        (changed(&|config| config.run.eval_tokens = usize::MAX), "run.eval_tokens"),
        (changed(&|config| config.backend.gpu = i64::MAX as usize + 1), "backend.gpu"),
        (changed(&|config| config.task.stride = usize::MAX), "task.stride"),
    ] {
        let layered = config.with_settings(&["run.keep_last=1".to_owned()]);
        assert!(key == "data.path" || problem(layered).starts_with(key), "{key}");
        let path = folder.path().join("run");
        let Err(error) = Run::start(config, dataset(), Given::default(), &path) else {
            panic!("{key}: it started");
        };
        assert!(matches!(&error, Error::Setting { key: found, .. } if found == key), "{error}");
        assert!(!path.exists());
    }
}

#[test]
fn given_weights_must_fit_and_be_finite() {
    let config = tiny("dense");
    let given = checkpoint_of(&config).weights;
    let at = |name: &str| given.iter().position(|tensor| tensor.name.ends_with(name)).unwrap();
    let (matrix, vector) = (at("c_fc.weight"), at("ln_1.weight"));
    let folder = tempfile::tempdir().unwrap();
    for (index, shape, value, expected) in [
        (matrix, vec![8, 16], 1.0, "expected the shape [16, 8], found [8, 16]; transpose it"),
        (matrix, vec![128], 1.0, "expected the shape [16, 8], found [128]"),
        (vector, vec![2, 4], 1.0, "expected the shape [1, 8], found [2, 4]"),
        (vector, vec![8], f32::NAN, "holds NaN at element 0, expected finite values"),
        (vector, vec![1, 8], 1.0, ""),
    ] {
        let (mut weights, path) = (given.clone(), folder.path().join("run"));
        (weights[index].shape, weights[index].values[0]) = (shape, value);
        let given = Given { weights: Some(&weights), ..Given::default() };
        let started = Run::start(config.clone(), dataset(), given, &path).map(|_| ());
        let found = started.err().map_or_else(String::new, |error| error.to_string());
        assert!(found.ends_with(expected) && found.is_empty() == expected.is_empty(), "{found}");
        assert_eq!(path.exists(), expected.is_empty(), "{found}");
    }
}

/// Panics in evaluations.
struct Panicking;

impl Observer for Panicking {
    fn working(&mut self, part: Part, _: usize, _: usize) {
        assert!(part != Part::Evaluation, "as planned");
    }
}

#[test]
fn a_run_whose_observer_panicked_must_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut run = Run::start(tiny("dense"), dataset(), Given::default(), &path).unwrap();
    let panics = AssertUnwindSafe(|| run.train(&mut Panicking));
    assert!(catch_unwind(panics).is_err());
    assert!(problem(run.train(&mut ())).contains("resume the run"));
    drop(run);
    // The checkpoint that was due did not wait for the evaluation.
    let log = std::fs::read_to_string(path.join("log.txt")).unwrap();
    assert!(log.contains("step 2: saved "), "{log}");
    let mut run = Run::resume(&path, &Resume::default()).unwrap();
    assert_eq!(run.trainer().step(), 2);
    run.train(&mut ()).unwrap();
    let metrics = MetricsLog::steps(&path.join("metrics.jsonl")).unwrap();
    let metrics: Vec<_> = metrics.map(Result::unwrap).collect();
    assert!(metrics.len() == 2 && metrics[1].val_loss.is_some(), "{metrics:?}");
}

#[test]
fn a_flag_that_nobody_clears_ends_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut run = Run::start(tiny("dense"), dataset(), Given::default(), &path).unwrap();
    run.interrupt_on(Arc::new(true.into()));
    assert!(matches!(run.train(&mut ()), Err(Error::Interrupted)));
}

/// Its checkpoints are removed while they are read.
#[test]
fn the_model_of_a_run_that_trains_can_always_be_read() {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = folder.path().join("run");
    let settings = ["steps=300", "run.checkpoint_every=1", "run.keep_last=1"].map(str::to_owned);
    let config = tiny("dense").with_settings(&settings).unwrap();
    let mut run = Run::start(config, dataset(), Given::default(), &path).unwrap();
    std::thread::scope(|scope| {
        let training = scope.spawn(move || run.train(&mut ()).map(drop));
        while !training.is_finished() {
            if checkpoint::count(&path.join("checkpoints")).unwrap() > 0 {
                Model::read(&path).unwrap();
            }
        }
        training.join().unwrap().unwrap();
    });
}

#[test]
fn only_known_names_are_allowed_to_differ() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    drop(Run::start(tiny("dense"), dataset(), Given::default(), &path).unwrap());
    for (allowed, expected) in [("nope", "--allow: \"nope\""), ("", "--allow: \"\""), ("data", "")]
    {
        let how = Resume { allow: vec![allowed.to_owned()], ..Resume::default() };
        let error = Run::resume(&path, &how).err().map_or_else(String::new, |e| e.to_string());
        assert!(error.starts_with(expected) && error.is_empty() == expected.is_empty(), "{error}");
    }
}

#[test]
fn masks_of_another_structure_are_searched_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, mut config) = (folder.path().join("run"), tiny("ste-row-wise"));
    config.method.phases = vec!["sparse".to_owned()];
    Run::start(config, dataset(), Given::default(), &path).unwrap().train(&mut ()).unwrap();
    let settings = ["method.name=fst", "steps=3"].map(str::to_owned).into();
    let mut run = Run::resume(&path, &Resume { settings, ..Resume::default() }).unwrap();
    let states = run.trainer.parameter_states().unwrap();
    let masks: Vec<_> = states.iter().filter_map(|state| state.mask.as_ref()).collect();
    assert!(masks.len() == 2 && masks.iter().all(|mask| mask.check(Transposable).is_ok()));
}

/// Notes the threads of each step.
impl Observer for Vec<usize> {
    fn stepped(&mut self, _: &StepMetrics) {
        self.push(sparse24_cpu::threads());
    }
}

#[test]
fn a_run_takes_the_threads_of_its_configuration_unless_its_caller_has_a_pool() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = tiny("dense");
    config.backend.threads = 3;
    let train = |config: Config, name: &str| {
        let (path, mut threads) = (folder.path().join(name), Vec::new());
        let mut run = Run::start(config, dataset(), Given::default(), &path)?;
        run.train(&mut threads)?;
        drop(run);
        let how = Resume { settings: vec!["steps=3".to_owned()], ..Resume::default() };
        Run::resume(&path, &how)?.train(&mut threads)?;
        threads.extend(Provenance::read(&path.join("provenance.json"))?.iter().map(|s| s.threads));
        Ok::<_, Error>(threads)
    };
    assert_eq!(train(config.clone(), "own").unwrap(), [3; 5]);
    let callers = crate::processor::on_threads(2, || train(config.clone(), "callers"));
    assert_eq!(callers.unwrap().unwrap(), [2; 5]);
    config.backend.threads = 1 << 20;
    assert!(problem(train(config, "many")).starts_with("backend.threads: expected at most 4096"));
}

#[test]
fn only_the_weights_of_the_model_are_imported_and_only_dense() {
    let config = tiny("dense");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let given = checkpoint_of(&config).weights;
    let [mut short, mut odd, mut cut] = [(); 3].map(|()| given.clone());
    short.pop();
    odd[1].name = "other".to_owned();
    cut[1].values.pop();
    let values = format!("{}: has shape {:?} and", cut[1].name, cut[1].shape);
    let last = format!("parameter {}: is not the model's next parameter", short.len());
    for (config, weights, expected) in [
        (&tiny("fst"), &given, "method.name: expected a method that starts dense"),
        (&config, &short, &last),
        (&config, &odd, "other: is not the model's next"),
        (&config, &cut, &values),
    ] {
        let error = save_imported(config, weights.clone(), None, &path).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    assert!(!path.exists());
    save_imported(&config, given, None, &path).unwrap();
}

#[test]
fn the_format_lists_what_decides_no_bits() {
    let format = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checkpoint-format.md");
    // A package of this crate alone has no such document.
    let Ok(text) = fs::read_to_string(format) else { return };
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, listed) =
        text.split_once("`config` leaves out settings that decide no bit: ").expect("the list");
    let (listed, _) = listed.split_once(". Also left out").expect("its end");
    let listed: BTreeSet<&str> = listed.split('`').skip(1).step_by(2).collect();
    assert_eq!(listed, BTreeSet::from(NEUTRAL));
    let keys = dotted(table_of(&tiny("fst")));
    assert!(NEUTRAL.iter().all(|key| keys.contains_key(*key)));
}

#[test]
fn a_checkpoint_has_the_bytes_that_are_estimated() {
    let sparsified = [Sparsify::Ffn, Sparsify::FfnAndAttention];
    for (method, sparsify) in ["dense", "fst", "ste", "bi-mask"]
        .into_iter()
        .flat_map(|method| sparsified.map(|of| (method, of)))
    {
        let mut config = tiny(method);
        (config.model.sparsify, config.model.activation) = (sparsify, Activation::Swiglu);
        let recipe = config.recipe(256).unwrap();
        let estimated = estimate(&recipe, config.backend_entry().unwrap()).unwrap();
        let bytes = checkpoint_of(&config).bytes();
        assert_eq!(bytes, estimated.checkpoint_bytes, "{method}, {sparsify:?}");
    }
}
