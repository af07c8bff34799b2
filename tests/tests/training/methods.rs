//! Every method with every activation: thirty steps, a resume anywhere, and the properties that
//! define the method.

use ndarray::ArrayView2;
use sparse24_core::{
    Mask, MaskKind,
    op::Activation,
    permute::{INTERVAL, permuted_mask, row_order},
    phase::has_settled,
    philox::{Purpose, Site, Stream},
    prune::{ValueMap, group, largest_two, soft_threshold_scale},
    search::mask_search,
};
use sparse24_run::config::Config;
use sparse24_train::{
    backend::BACKENDS,
    estimate::estimate,
    method::{Method, PRESETS, PhaseKind},
    optim::MaskedDecay,
    trainer::{FlipSampling, ParameterState, Progress, Recipe, StepOutcome, Trainer},
};

use super::{
    fixture::{self, Noise, Validation, cpu, gpt2},
    spy::spy,
};

const STEPS: u32 = 30;
const LAMBDA: f32 = 2e-2;

fn recipe(name: &str, activation: Activation) -> Recipe {
    let method = Method::preset(name, LAMBDA).expect("a preset");
    let mut recipe = fixture::recipe(method);
    let [numerator, denominator] =
        [recipe.method.width.numerator(), recipe.method.width.denominator()].map(|n| n as usize);
    fixture::change(&mut recipe, |spec| {
        (spec.activation, spec.d_ff) = (activation, spec.d_ff * numerator / denominator);
    });
    (recipe.steps, recipe.schedule.decay_steps, recipe.dropout) = (STEPS, STEPS, 0.25);
    recipe
}

/// The state before the first step and after each.
struct Walk {
    recipe: Recipe,
    outcomes: Vec<StepOutcome>,
    states: Vec<Vec<ParameterState>>,
    progress: Vec<Progress>,
    /// Validation losses, with the weights of the phase.
    losses: Vec<f64>,
}

fn walk(recipe: Recipe) -> Walk {
    let mut trainer = fixture::trainer(cpu(), &recipe);
    let (noise, validation) = (Noise::of(&recipe), Validation::of(&recipe));
    let mut walk = Walk {
        recipe,
        outcomes: Vec::new(),
        states: Vec::new(),
        progress: Vec::new(),
        losses: Vec::new(),
    };
    for step in 0..=walk.recipe.steps {
        if step > 0 {
            walk.outcomes.push(trainer.train_step(&noise, FlipSampling::Skip).expect("finite"));
        }
        walk.states.push(trainer.parameter_states().expect("downloads"));
        walk.progress.push(trainer.progress().clone());
        walk.losses.push(fixture::evaluate(&mut trainer, &validation));
    }
    walk
}

impl Walk {
    fn kinds(&self) -> Vec<PhaseKind> {
        self.outcomes.iter().map(|outcome| outcome.phase).collect()
    }

    /// The states of the weights that may be pruned, after a step.
    fn sparsified(&self, step: usize) -> impl Iterator<Item = &ParameterState> {
        self.states[step]
            .iter()
            .filter(|state| state.name.contains(".mlp.") && state.name.ends_with(".weight"))
    }

    /// Whether the weights of a phase are these, by the loss of a dense model that has them.
    fn assert_multiplied_by(&self, step: usize, operand: impl Fn(&ParameterState) -> Vec<f32>) {
        let mut recipe = self.recipe.clone();
        recipe.method = Method::dense();
        let mut dense = Trainer::new(cpu(), recipe.clone()).expect("dense");
        let weights: Vec<_> =
            self.states[step].iter().map(|state| (state.name.clone(), operand(state))).collect();
        fixture::start_from(&mut dense, &weights);
        assert_eq!(
            fixture::evaluate(&mut dense, &Validation::of(&recipe)),
            self.losses[step],
            "step {step}"
        );
    }
}

fn view(state: &ParameterState) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((state.shape[0], state.shape[1]), &state.weight).expect("its shape")
}

fn keeps(mask: &Mask, at: usize) -> bool {
    mask.keeps(at / mask.columns(), at % mask.columns())
}

fn pruned(state: &ParameterState) -> Vec<f32> {
    let kept = |at: usize| state.mask.as_ref().is_none_or(|mask| keeps(mask, at));
    state.weight.iter().enumerate().map(|(at, &w)| if kept(at) { w } else { 0.0 }).collect()
}

/// Masks are searched in the weights of each step, and pruned weights receive gradients.
fn assert_row_wise_each_step(walk: &Walk, from: usize) {
    let mut flipped = 0;
    for step in from..=STEPS as usize {
        for (state, before) in walk.sparsified(step).zip(walk.sparsified(step.max(from + 1) - 1)) {
            let mask = state.mask.as_ref().expect("a sparse phase");
            assert_eq!(
                mask,
                &mask_search(view(state), MaskKind::RowWise).expect("tiled"),
                "step {step}"
            );
            flipped += usize::from(before.mask.as_ref() != Some(mask));
            let untouched = (0..state.weight.len())
                .filter(|&at| !keeps(mask, at) && state.second_moment[at] == 0.0 && step > 0)
                .count();
            assert_eq!(untouched, 0, "step {step}: pruned weights without gradient");
        }
    }
    assert!(flipped > 0, "no mask ever moved");
}

fn moments(state: &ParameterState) -> Vec<u32> {
    state.second_moment.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn every_method_resumes_to_the_same_bits_with_every_activation_and_model() {
    let recipes = PRESETS.iter().flat_map(|preset| {
        let encoder = fixture::encoder(recipe(preset.name, Activation::Gelu));
        Activation::ALL
            .map(|activation| recipe(preset.name, activation))
            .into_iter()
            .chain([encoder])
    });
    for recipe in recipes {
        let walk = walk(recipe);
        let (noise, validation) = (Noise::of(&walk.recipe), Validation::of(&walk.recipe));
        for cut in [1, 9, 15, 16, 25, 26] {
            let what = || format!("{:?} cut at {cut}", walk.recipe);
            let mut after = Trainer::new(cpu(), walk.recipe.clone()).expect("the same recipe");
            after
                .restore(walk.progress[cut].clone(), &walk.states[cut])
                .expect("every state is there");
            let loss = fixture::evaluate(&mut after, &validation);
            assert_eq!(loss.to_bits(), walk.losses[cut].to_bits(), "{}", what());
            for step in cut..STEPS as usize {
                let outcome = after.train_step(&noise, FlipSampling::Skip).expect("finite");
                assert_eq!(outcome, walk.outcomes[step], "{}", what());
            }
            assert_eq!(after.progress(), &walk.progress[STEPS as usize]);
            let states = after.parameter_states().expect("downloads");
            assert!(states == walk.states[STEPS as usize], "{}", what());
        }
    }
}

#[test]
fn dense_and_half_prune_nothing() {
    for (name, activation) in ["dense", "half"]
        .into_iter()
        .flat_map(|name| Activation::ALL.map(|activation| (name, activation)))
    {
        let walk = walk(recipe(name, activation));
        assert_eq!(walk.kinds(), [PhaseKind::Dense; STEPS as usize]);
        assert!(walk.states.iter().flatten().all(|state| state.mask.is_none()));
        walk.assert_multiplied_by(STEPS as usize, |state| state.weight.clone());
    }
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

#[test]
fn row_wise_ste_prunes_each_step_and_passes_gradients_straight_through() {
    for activation in Activation::ALL {
        let walk = walk(recipe("ste-row-wise", activation));
        assert_eq!(walk.kinds(), [PhaseKind::Sparse; STEPS as usize]);
        assert_row_wise_each_step(&walk, 0);
        walk.assert_multiplied_by(STEPS as usize, pruned);
    }
}

/// Compared with a step without decay, moments have the same bits, and only pruned weights differ,
/// by lr lambda w.
#[test]
fn decay_on_weights_is_not_normalised() {
    for activation in Activation::ALL {
        let mut recipe = recipe("sr-ste", activation);
        recipe.method.decay = MaskedDecay::OnWeights(LAMBDA);
        let walk = walk(recipe);
        assert_row_wise_each_step(&walk, 0);
        walk.assert_multiplied_by(7, pruned);
        let mut without = walk.recipe.clone();
        without.method = Method::preset("ste-row-wise", 0.0).expect("a preset");
        for step in [1, 12, 30] {
            let mut plain = Trainer::new(cpu(), without.clone()).expect("the same method");
            plain
                .restore(walk.progress[step - 1].clone(), &walk.states[step - 1])
                .expect("every state is there");
            let rate = plain
                .train_step(&Noise::of(&without), FlipSampling::Skip)
                .expect("finite")
                .learning_rate;
            let (mut decayed, plain) = (0, plain.parameter_states().expect("downloads"));
            for ((before, after), plain) in
                walk.states[step - 1].iter().zip(&walk.states[step]).zip(&plain)
            {
                assert_eq!(
                    (moments(after), &after.first_moment),
                    (moments(plain), &plain.first_moment),
                    "{}",
                    before.name
                );
                for (at, (&w, (&after, &plain))) in
                    before.weight.iter().zip(after.weight.iter().zip(&plain.weight)).enumerate()
                {
                    let away = before.mask.as_ref().is_some_and(|mask| !keeps(mask, at));
                    let expected =
                        if away { f64::from(rate) * f64::from(LAMBDA) * f64::from(w) } else { 0.0 };
                    // Two roundings of w, and a few of the product.
                    let bound = f64::from(f32::EPSILON)
                        * (f64::from(w.abs() + after.abs()) + 4.0 * expected.abs());
                    assert!(
                        (f64::from(plain) - f64::from(after) - expected).abs()
                            <= if away { bound } else { 0.0 },
                        "{}[{at}]",
                        before.name
                    );
                    decayed += usize::from(away);
                }
            }
            assert!(decayed > 0);
        }
    }
}

#[test]
fn fst_is_transposable_until_its_dense_finish() {
    for activation in Activation::ALL {
        let walk = walk(recipe("fst", activation));
        assert_eq!(walk.kinds(), [vec![PhaseKind::Sparse; 25], vec![PhaseKind::Dense; 5]].concat());
        for step in 0..=25 {
            let masks: Vec<_> =
                walk.sparsified(step).map(|state| state.mask.clone().expect("sparse")).collect();
            masks.iter().for_each(|mask| mask.check(MaskKind::Transposable).expect("transposable"));
            assert!(
                walk.sparsified(0).map(|state| state.mask.as_ref()).eq(masks.iter().map(Some)),
                "a refresh before step 40"
            );
        }
        walk.assert_multiplied_by(25, pruned);
        walk.assert_multiplied_by(26, |state| state.weight.clone());
    }
}

#[test]
fn ste_is_transposable_to_the_end_without_decay_or_sampling() {
    let method = Method::preset("ste", LAMBDA).expect("a preset");
    assert!(method.decay == MaskedDecay::None && !method.samples());
    let walk = walk(recipe("ste", Activation::Gelu));
    assert_eq!(walk.kinds(), [PhaseKind::Sparse; STEPS as usize]);
    let first = |step| {
        walk.sparsified(step).map(|state| state.mask.as_ref().expect("sparse")).collect::<Vec<_>>()
    };
    first(0).iter().for_each(|mask| mask.check(MaskKind::Transposable).expect("transposable"));
    assert_eq!(first(STEPS as usize), first(0), "a refresh before step 40");
    walk.assert_multiplied_by(STEPS as usize, pruned);
}

/// The variance moves until the switch, which is where its definition says, and keeps its bits
/// after it.
#[test]
fn step_freezes_its_variance_where_it_has_settled() {
    for (activation, beta2, expected) in Activation::ALL
        .into_iter()
        .flat_map(|activation| [(activation, 0.95, 15), (activation, 0.75, 4)])
    {
        let mut recipe = recipe("step", activation);
        recipe.optimizer.beta2 = beta2;
        let walk = walk(recipe);
        let mut changes = Vec::new();
        let mut end = None;
        for step in 1..=STEPS {
            let [before, after] = [step - 1, step].map(|step| &walk.states[step as usize]);
            let (mut sum, mut weights) = (0.0, 0);
            for (before, after) in before.iter().zip(after) {
                let moved = before
                    .second_moment
                    .iter()
                    .zip(&after.second_moment)
                    .map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs());
                sum += moved.sum::<f64>();
                weights += after.second_moment.len();
            }
            let kind = if end.is_none() { PhaseKind::Dense } else { PhaseKind::Sparse };
            assert_eq!(walk.outcomes[step as usize - 1].phase, kind, "step {step}");
            if end.is_some() {
                assert_eq!(sum, 0.0, "step {step}: the variance is not frozen");
                assert!(
                    before.iter().zip(after).all(|(before, after)| before.weight != after.weight),
                    "step {step}: no update"
                );
                continue;
            }
            assert!(sum > 0.0);
            changes.push((sum / weights as f64) as f32);
            let settled = step >= 3 && has_settled(&changes, beta2, walk.recipe.optimizer.epsilon);
            if settled || step == 15 {
                end = Some(step);
            } else {
                let last =
                    *walk.progress[step as usize].variance_changes.last().expect("it is watched");
                assert!(
                    (last - changes[step as usize - 1]).abs() <= f32::EPSILON * last,
                    "step {step}"
                );
            }
        }
        assert_eq!(end, Some(expected), "b2 = {beta2}");
        assert_eq!(walk.progress[STEPS as usize].ends.get(&0), Some(&expected));
        assert_row_wise_each_step(&walk, expected as usize + 1);
        walk.assert_multiplied_by(expected as usize, |state| state.weight.clone());
        walk.assert_multiplied_by(expected as usize + 1, pruned);
    }
}

/// Over more than an interval, so that an order is replaced.
#[test]
fn bi_mask_prunes_rows_forward_and_permuted_columns_in_dgrad() {
    for activation in Activation::ALL {
        let mut recipe = recipe("bi-mask", activation);
        recipe.steps = INTERVAL + 3;
        let walk = walk(recipe);
        let numbers: Vec<u32> = (0..)
            .zip(&walk.states[0])
            .filter(|(_, state)| state.mask.is_some())
            .map(|(number, _)| number)
            .collect();
        assert_eq!(numbers.len(), 4);
        let mut orders: Vec<Vec<Vec<u32>>> = Vec::new();
        for step in 0..=walk.recipe.steps as usize {
            let mut of_step = Vec::new();
            for (state, &number) in walk.sparsified(step).zip(&numbers) {
                let (mask, both) = (
                    state.mask.as_ref().expect("sparse"),
                    state.dgrad_mask.as_ref().expect("another for dgrad"),
                );
                let order = state.row_order.as_ref().expect("an order");
                assert_eq!(
                    mask,
                    &mask_search(view(state), MaskKind::RowWise).expect("tiled"),
                    "step {step}"
                );
                assert_eq!(
                    both,
                    &permuted_mask(view(state), mask, order).expect("one shape"),
                    "step {step}"
                );
                for (group, column) in order
                    .chunks(4)
                    .flat_map(|group| (0..mask.columns()).map(move |column| (group, column)))
                {
                    let of = |m: &Mask| {
                        group.iter().filter(|&&row| m.keeps(row as usize, column)).count()
                    };
                    assert_eq!(of(both), of(mask).min(2), "two of every four rows in the order");
                }
                if step % INTERVAL as usize == 0 {
                    let stream = Stream::new(
                        walk.recipe.seed,
                        Site::new(Purpose::Permutation, number),
                        0,
                        step as u32,
                    );
                    assert_eq!(order, &row_order(mask, stream), "step {step}");
                }
                of_step.push(order.clone());
            }
            assert!(
                step % INTERVAL as usize == 0 || Some(&of_step) == orders.last(),
                "step {step}: another order"
            );
            orders.push(of_step);
        }
        assert_ne!(orders[0], orders[INTERVAL as usize]);
        walk.assert_multiplied_by(5, pruned);
    }
}

#[test]
fn s_ste_thresholds_softly_with_the_scale_of_the_start() {
    for activation in Activation::ALL {
        let walk = walk(recipe("s-ste", activation));
        assert_row_wise_each_step(&walk, 0);
        let scales: Vec<Option<f32>> = walk
            .sparsified(0)
            .map(|state| Some(soft_threshold_scale(view(state)).expect("grouped")))
            .collect();
        for step in 0..=STEPS as usize {
            assert!(
                walk.sparsified(step).map(|state| state.scale).eq(scales.iter().copied()),
                "step {step}"
            );
        }
        assert!(
            walk.sparsified(30).zip(&scales).all(|(state, &scale)| soft_threshold_scale(view(
                state
            ))
            .ok()
                != scale),
            "they would not differ"
        );
        walk.assert_multiplied_by(11, |state| match state.scale {
            None => state.weight.clone(),
            Some(scale) => {
                let groups = state.weight.as_chunks::<4>().0.iter();
                groups
                    .flat_map(|&x| group(x, largest_two(x), ValueMap::SoftThreshold { scale }))
                    .collect()
            }
        });
        let (spy, log) = spy();
        fixture::trainer(spy, &walk.recipe)
            .train_step(&Noise::of(&walk.recipe), FlipSampling::Skip)
            .expect("finite");
        assert_eq!(
            log.lock().expect("the trainer is done with it").samples.len(),
            2 * 4,
            "a sample per weight and micro-step"
        );
    }
}

/// A missing or damaged part of the method's state is named.
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
    ] {
        let recipe = recipe(name, Activation::Gelu);
        let mut trainer = fixture::trainer(cpu(), &recipe);
        let mut states = trainer.parameter_states().expect("downloads");
        damage(
            states
                .iter_mut()
                .find(|state| state.name == "h.0.mlp.c_fc.weight")
                .expect("a parameter"),
        );
        let error = trainer.restore(0, &states).expect_err(what).to_string();
        assert!(error.contains("h.0.mlp.c_fc.weight") && error.contains(what), "{error}");
    }
}
