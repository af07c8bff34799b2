//! Properties of methods that the f64 runs of `step.rs` are too short to show: the size of `half`,
//! where STEP's variance settles, when Bi-Mask's orders are replaced, states that lack a part.

use ndarray::ArrayView2;
use sparse24_core::{
    Mask,
    permute::{INTERVAL, permuted_mask, row_order},
    phase::has_settled,
    philox::{Purpose, Site, Stream},
};
use sparse24_run::config::Config;
use sparse24_train::{
    backend::BACKENDS,
    estimate::estimate,
    method::{Method, PhaseKind},
    optim::{Adam, UpdateRule},
    trainer::{ParameterState, Progress, Recipe, Trainer},
};

use super::fixture::{self, Noise, cpu, gpt2};

fn recipe(name: &str) -> Recipe {
    let mut recipe = fixture::recipe(Method::preset(name, 2e-2).expect("a preset"));
    (recipe.steps, recipe.schedule.decay_steps) = (30, 30);
    recipe
}

/// In the estimate and in the allocated shapes; other ratios round down to whole tiles.
#[test]
fn half_has_half_the_multiplications_of_the_feed_forward() {
    for activation in ["gelu", "geglu", "swiglu"] {
        let of = |settings: &[&str]| {
            let activation = format!("model.activation={activation}");
            let settings: Vec<String> =
                settings.iter().map(|&setting| setting.to_owned()).chain([activation]).collect();
            Config::resolve(Some("quickstart"), None, &settings)
                .expect("possible")
                .recipe(256)
                .expect("possible")
        };
        let (dense, half) = (of(&["method.name=dense"]), of(&["method.name=half"]));
        let [whole, halved] =
            [&dense, &half].map(|recipe| estimate(recipe, &BACKENDS[0]).expect("possible"));
        assert_eq!(2 * halved.sparsifiable, whole.sparsifiable, "weights of the feed-forward");
        let saved = 6.0 * (whole.tokens_per_step * halved.sparsifiable) as f64;
        assert_eq!(whole.flops_per_step - halved.flops_per_step, saved);
        let trainer = Trainer::new(cpu(), half).expect("half");
        let up = trainer
            .parameters()
            .iter()
            .find(|p| p.spec.name == "h.0.mlp.c_fc.weight")
            .expect("a block");
        assert_eq!(up.weight.shape[0], 512 / 2 * gpt2(&dense).activation.columns_in());
        let d_ff = |name| gpt2(&of(&[name, "method.d_ff_ratio=10/13"])).d_ff;
        assert_eq!(d_ff("method.name=half"), 392, "4 floor(512 / 1.3 / 4)");
        assert_eq!(d_ff("method.name=dense"), 512);
    }
}

/// Only a transposable mask makes dgrad 2:4. The three products of a layer cost the same; each
/// share is a quotient of exact integers, rounded once.
#[test]
fn the_share_of_sparse_products_has_those_that_are_2_4() {
    let share = |name| estimate(&recipe(name), &BACKENDS[0]).expect("possible").sparse_share;
    let all = share("fst");
    for (name, products, words) in [
        ("dense", 0.0, ["", "forward, dgrad, wgrad"]),
        ("ste", 2.0, ["forward, dgrad", "wgrad"]),
        ("ste-row-wise", 1.0, ["forward", "dgrad, wgrad"]),
        ("sr-ste", 1.0, ["forward", "dgrad, wgrad"]),
        ("fst", 3.0, ["forward, dgrad, wgrad", ""]),
        ("step", 1.0, ["forward", "dgrad, wgrad"]),
        ("bi-mask", 1.0, ["forward", "dgrad, wgrad"]),
        ("s-ste", 2.0, ["forward, wgrad", "dgrad"]),
    ] {
        let (found, expected) = (3.0 * share(name), products * all);
        assert!((found - expected).abs() <= 4.0 * f64::EPSILON, "{name}: {found}, {expected}");
        assert_eq!(recipe(name).method.sparse_phase().product_words(), words, "{name}");
    }
}

/// The variance moves until the switch, which is where its definition says, and keeps its bits
/// after it.
#[test]
fn step_freezes_its_variance_where_it_has_settled() {
    for (beta2, expected) in [(0.95, 15), (0.75, 4)] {
        let mut recipe = recipe("step");
        let adam = Adam { beta1: 0.9, beta2, epsilon: 1e-3 };
        recipe.optimizer.rule = UpdateRule::AdamW(adam);
        let mut trainer = fixture::start(&recipe);
        let variance = |trainer: &mut Trainer| -> Vec<f64> {
            let states = fixture::states(trainer).into_iter();
            states.flat_map(|state| state.second_moment).map(f64::from).collect()
        };
        let (mut before, mut changes, mut end) = (variance(&mut trainer), Vec::new(), None);
        for step in 1..=recipe.steps {
            let kind = if end.is_none() { PhaseKind::Dense } else { PhaseKind::Sparse };
            let outcome = fixture::step(&mut trainer, &Noise::of(&recipe));
            assert_eq!(outcome.phase, kind, "step {step}");
            let after = variance(&mut trainer);
            let moved: f64 = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum();
            assert_eq!(moved == 0.0, end.is_some(), "step {step}");
            if end.is_none() {
                let change = (moved / after.len() as f64) as f32;
                changes.push(change);
                let settled = step >= 3 && has_settled(&changes, beta2, adam.epsilon);
                if settled || step == 15 {
                    end = Some(step);
                } else {
                    let last = *trainer.progress().variance_changes.last().expect("it is watched");
                    assert!((last - change).abs() <= f32::EPSILON * last, "step {step}");
                }
            }
            before = after;
        }
        assert_eq!((end, trainer.progress().ends.get(&0)), (Some(expected), Some(&expected)));
        // A step without a phase before it, one to come, and phases that have no criterion.
        for (phase, end) in [(0, 0), (0, recipe.steps), (1, 2), (9, 2)] {
            let progress = Progress { ends: [(phase, end)].into(), ..Progress::from(3) };
            let states = fixture::states(&mut trainer);
            let error = trainer.restore(progress, &states).expect_err("no end").to_string();
            assert!(error.starts_with("phase_ends: "), "{error}");
        }
    }
}

/// Orders are chosen anew at every interval; the mask of dgrad follows the weights of each step.
#[test]
fn bi_mask_replaces_its_orders_at_every_interval() {
    let recipe = Recipe { steps: INTERVAL + 3, ..recipe("bi-mask") };
    let mut trainer = fixture::start(&recipe);
    let mut orders: Vec<Vec<u32>> = Vec::new();
    for step in 0..=recipe.steps {
        if step > 0 {
            fixture::step(&mut trainer, &Noise::of(&recipe));
        }
        let states = fixture::states(&mut trainer);
        let mut of_step = Vec::new();
        for (number, state) in (0..).zip(&states).filter(|(_, state)| state.mask.is_some()) {
            let (mask, both) = (state.mask.as_ref(), state.dgrad_mask.as_ref());
            let (mask, both) = (mask.expect("sparse"), both.expect("another for dgrad"));
            let order = state.row_order.clone().expect("an order");
            let w = ArrayView2::from_shape(state.shape, &state.weight).expect("its shape");
            assert_eq!(both, &permuted_mask(w, mask, &order).expect("one shape"), "step {step}");
            if step % INTERVAL == 0 {
                let site = Site::new(Purpose::Permutation, number);
                let stream = Stream::new(recipe.seed, site, 0, step);
                assert_eq!(order, row_order(mask, stream), "step {step}");
            }
            of_step.push(order);
        }
        assert_eq!(of_step.len(), 4);
        assert_eq!(of_step != orders, step % INTERVAL == 0, "step {step}");
        orders = of_step;
    }
}

/// A missing or damaged part of a state is named, and nothing of that state is taken.
#[test]
fn an_incomplete_state_is_refused() {
    for (name, damage, what) in [
        (
            "bi-mask",
            (|state| state.row_order = None) as fn(&mut ParameterState),
            "order of rows is missing",
        ),
        ("bi-mask", |state| state.dgrad_mask = None, "mask of dgrad is missing"),
        (
            "bi-mask",
            |state| state.row_order = Some(vec![0; state.shape[0]]),
            "order of rows does not name each",
        ),
        ("s-ste", |state| state.mask = None, "mask is missing"),
        ("s-ste", |state| state.scale = None, "scale is missing"),
        ("fst", |state| state.shape.swap(0, 1), "a state of size [16, 8], found [8, 16]"),
        ("fst", |state| state.weight.truncate(3), "expected a weight of size [128], found [3]"),
        ("fst", |state| state.first_moment.clear(), "a first moment of size [128], found [0]"),
        (
            "fst",
            |state| state.second_moment.push(0.0),
            "a second moment of size [128], found [129]",
        ),
        ("fst", |state| state.second_moment[0] = -1.0, "its second moment is negative"),
        ("fst", |state| state.second_moment[0] = f32::NAN, "its second moment is negative"),
        ("fst", |state| state.mask = Mask::empty(16, 4).ok(), "a mask of size [16, 8], found"),
        ("fst", |state| set_tile(&mut state.mask, 0x3333), "not transposable: tile (0, 1)"),
        (
            "ste-row-wise",
            |state| set_tile(&mut state.mask, 0x7333),
            "not row-wise 2:4: tile (0, 1)",
        ),
        ("bi-mask", |state| state.dgrad_mask = Mask::empty(4, 8).ok(), "a mask of dgrad of size"),
        ("bi-mask", |state| set_tile(&mut state.dgrad_mask, 0xffff), "mask of dgrad is not 2:4"),
        ("bi-mask", |state| state.dgrad_mask.clone_from(&state.mask), "mask of dgrad is not 2:4"),
    ] {
        let recipe = recipe(name);
        let mut trainer = fixture::start(&recipe);
        let before = fixture::states(&mut trainer);
        let mut states = before.clone();
        states[0].weight[0] += 1.0;
        damage(
            states
                .iter_mut()
                .find(|state| state.name == "h.0.mlp.c_fc.weight")
                .expect("a parameter"),
        );
        let error = trainer.restore(1, &states).expect_err(what).to_string();
        assert!(error.contains("h.0.mlp.c_fc.weight") && error.contains(what), "{error}");
        let weights: Vec<_> = states.iter().map(|s| (&*s.name, &*s.weight)).collect();
        let starts = trainer.start_from(&weights).is_ok();
        assert_eq!(starts, !what.contains("a weight"), "{what}");
        if starts {
            trainer.restore(0, &before).expect("its own states");
        }
        let error = trainer.restore(31, &before).expect_err("of 30 steps").to_string();
        assert!(error.contains("steps: expected at least the 31"), "{error}");
        assert_eq!(trainer.step(), 0);
        assert!(fixture::states(&mut trainer) == before, "{name}, {what}");
    }
}

/// More parameters than the model has, one twice, and moments that the optimizer does not have.
#[test]
fn the_state_of_another_run_is_refused() {
    let recipe = recipe("fst");
    let states = |recipe: &Recipe| fixture::states(&mut fixture::start(recipe));
    let (mut larger, own) = (recipe.clone(), states(&recipe));
    fixture::change(&mut larger, |spec| spec.layers += 1);
    let mut without_v = recipe.clone();
    without_v.optimizer.rule = UpdateRule::Sgd { momentum: 0.5 };
    for (recipe, found, what) in [
        (&recipe, states(&larger), "h.2.ln_1.weight: the model has no such parameter"),
        (
            &recipe,
            [&own[..], &own[..1]].concat(),
            "wte.weight: the model has no such parameter, or",
        ),
        (&without_v, own.clone(), "not of this optimizer"),
    ] {
        let mut trainer = fixture::start(recipe);
        let before = fixture::states(&mut trainer);
        let error = trainer.restore(1, &found).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
        assert!(trainer.step() == 0 && fixture::states(&mut trainer) == before);
    }
}

fn set_tile(mask: &mut Option<Mask>, bits: u16) {
    mask.as_mut().expect("a sparse phase").tiles_mut()[1] = bits;
}
