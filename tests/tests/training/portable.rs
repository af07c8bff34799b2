//! Training on the wgpu backend against the CPU's: the same masks, losses within rounding, and a
//! resumed run that is the uninterrupted one.

use sparse24_core::op::Activation;
use sparse24_run::config::Config;
use sparse24_tests::oracle::arithmetic::Random;
use sparse24_train::{
    Error,
    backend::{Footprint, Region, wgpu::WgpuFootprint},
    method::Method,
    model::ModelSpec,
    trainer::{Recipe, Trainer},
};

use super::{
    fixture::{self, Noise, fst},
    oracle::pass::parameters,
};

const STEPS: u32 = 20;

/// A run of every architecture, each with an activation of its own.
fn recipes(method: &Method) -> [Recipe; 5] {
    let of = |activation| {
        let mut recipe = Recipe { steps: STEPS, ..fixture::recipe(method.clone()) };
        fixture::change(&mut recipe, |spec| spec.activation = activation);
        recipe
    };
    [
        of(Activation::Swiglu),
        fixture::bert(of(Activation::GeluErf)),
        fixture::crammed_bert(of(Activation::Geglu)),
        fixture::deit(of(Activation::Gelu)),
        fixture::transformer(of(Activation::Relu)),
    ]
}

/// The losses of the steps up to this one.
fn losses(trainer: &mut Trainer, last: u32) -> Vec<f64> {
    let noise = Noise::of(trainer.recipe());
    (trainer.step()..last).map(|_| fixture::step(trainer, &noise).loss).collect()
}

/// The largest difference between the losses of two runs, which are finite.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let distances: Vec<_> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
    assert!(distances.iter().all(|distance| distance.is_finite()), "{a:?}, {b:?}");
    distances.into_iter().fold(0.0, f64::max)
}

/// The losses of a run on the CPU with every weight replaced by a neighbouring number, at random,
/// before each step.
fn rounded(recipe: &Recipe, seed: u64) -> Vec<f64> {
    let (mut trainer, mut random) = (fixture::start(recipe), Random(seed));
    let mut step = |last| {
        let mut states = trainer.parameter_states().expect("the CPU fails no copy");
        for weight in states.iter_mut().flat_map(|state| &mut state.weight) {
            *weight = if random.below(2) == 0 { weight.next_up() } else { weight.next_down() };
        }
        let progress = trainer.progress().clone();
        trainer.restore(progress, &states).expect("its own states");
        losses(&mut trainer, last)
    };
    (1..=STEPS).flat_map(&mut step).collect()
}

/// With u = 2^-24, a sum of k products in f32 is, in any order, the exact sum of products that are
/// changed by at most k u each to first order, and by sqrt(k) u if roundings are independent
/// (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). So the products of one backend are those of
/// another with weights that are changed by sqrt(2 k) u. A neighbouring number is at least u away,
/// so to first order, the losses differ by at most sqrt(2 k) times the response to [`rounded`]
/// weights. Here k is the longest sum of a step: the rows or columns of a weight, or the tokens
/// whose gradients are added. Other operations sum no more, or have errors of a few u.
#[test]
fn losses_are_those_of_the_cpu() {
    let [dense, ..] = recipes(&Method::dense());
    let sparse = recipes(&fst(2e-2)).map(|recipe| Recipe { dropout: 0.25, ..recipe });
    [dense].into_iter().chain(sparse).for_each(|recipe| assert_losses(&recipe));
}

/// The same for presets, on random data.
#[test]
#[ignore = "takes minutes"]
fn losses_of_presets_are_those_of_the_cpu() {
    for preset in ["bert-tiny-cpu", "deit-cifar-cpu", "transformer-multi30k-cpu"] {
        for method in ["dense", "fst"] {
            let settings = [
                format!("method.name={method}"),
                format!("steps={STEPS}"),
                "optimizer.warmup_steps=5".to_owned(),
            ];
            let config = Config::resolve(Some(preset), None, &settings).expect("valid");
            let mut recipe = config.recipe(config.usual_vocabulary()).expect("valid");
            if let ModelSpec::Bert(spec) = &mut recipe.model {
                // Random data have a target at every token.
                spec.mask_probability = 1.0;
            }
            print!("{preset}, {method}: ");
            assert_losses(&recipe);
        }
    }
}

fn assert_losses(recipe: &Recipe) {
    if let Some(backend) = sparse24_tests::wgpu() {
        let cpu = losses(&mut fixture::start(recipe), STEPS);
        let responses = (1..=4).map(|seed| distance(&rounded(recipe, seed), &cpu));
        let response = responses.fold(0.0, f64::max);
        let tokens = recipe.batch.tokens() * recipe.gradient_accumulation.first.get() as usize;
        let sizes = parameters(&recipe.model).into_iter().flat_map(|(_, shape)| shape);
        let longest = sizes.chain([tokens]).max().expect("the tokens");
        let bound = (2.0 * longest as f64).sqrt() * response;
        let found = distance(&losses(&mut fixture::trainer(backend, recipe), STEPS), &cpu);
        println!("{found:.1e} from the CPU's losses, bound {bound:.1e}, k = {longest}");
        assert!(found <= bound, "{recipe:?}: {found} from the CPU's losses, bound {bound}");
    }
}

#[test]
fn the_first_masks_are_those_of_the_cpu() {
    for recipe in recipes(&fst(2e-2)) {
        let Some(backend) = sparse24_tests::wgpu() else { return };
        let [cpu, found] = [fixture::cpu(), backend].map(|backend| {
            let mut trainer = fixture::trainer(backend, &recipe);
            let states = fixture::states(&mut trainer);
            states.into_iter().map(|state| (state.name, state.mask)).collect::<Vec<_>>()
        });
        assert!(cpu.iter().any(|(_, mask)| mask.is_some()), "{recipe:?}");
        assert!(cpu == found, "{recipe:?}");
    }
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    let [gpt2, .., transformer] = recipes(&fst(2e-2));
    for recipe in [gpt2, transformer] {
        let recipe = Recipe { dropout: 0.25, ..recipe };
        let Some(backend) = sparse24_tests::wgpu() else { return };
        let mut whole = fixture::trainer(backend, &recipe);
        let mut bits = losses(&mut whole, STEPS / 2);
        let (progress, states) = (whole.progress().clone(), whole.parameter_states());
        bits.extend(losses(&mut whole, STEPS));
        let backend = sparse24_tests::wgpu().expect("it could be opened before");
        let mut resumed = Trainer::new(backend, recipe.clone()).expect("the same recipe");
        resumed.restore(progress, &states.expect("downloads")).expect("every state is there");
        assert!(losses(&mut resumed, STEPS) == bits[STEPS as usize / 2..], "{recipe:?}");
        let [expected, found] = [&mut whole, &mut resumed].map(fixture::bits);
        assert!(expected == found, "{recipe:?}");
    }
}

/// A tensor beyond what the adapter binds at once is refused by the setting that shrinks it.
#[test]
fn what_an_adapter_cannot_bind_is_refused_by_key() {
    let recipe = fixture::recipe(Method::dense());
    let wide = |recipe: &mut Recipe| {
        fixture::change(recipe, |spec| [spec.d_model, spec.heads] = [1 << 20, 1 << 17]);
    };
    let many = |recipe: &mut Recipe| recipe.batch.size = 1 << 24;
    for (expected, change) in [("model.d_model", wide as fn(&mut _)), ("batch.size", many)] {
        let Some(backend) = sparse24_tests::wgpu() else { return };
        let most = backend.capabilities().most_elements;
        let mut recipe = recipe.clone();
        change(&mut recipe);
        let Err(Error::Setting { key, problem }) = Trainer::new(backend, recipe) else {
            panic!("{expected} was not refused");
        };
        assert!(key == expected && problem.contains(&most.to_string()), "{key}: {problem}");
    }
}

/// Three tiles take two words.
#[test]
fn a_mask_of_odd_tiles_holds_the_memory_of_the_estimate() {
    let Some(mut backend) = sparse24_tests::wgpu() else { return };
    backend.alloc_mask([4, 12]).expect("there is memory");
    let held = backend.memory().into_iter().find(|(region, _)| *region == Region::Sparse);
    assert_eq!(held.expect("a region").1 as u64, WgpuFootprint.mask([4, 12]));
}
