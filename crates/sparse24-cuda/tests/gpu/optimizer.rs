//! grad_norm and optimizer_step.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    Mask, MaskKind,
    op::{Adam, MaskedDecay, NonFinite, Optimizer, StepState, UpdateRule},
};
use sparse24_cpu::{optimizer as cpu, search::mask_search};
use sparse24_cuda::{
    Device, Matrix,
    health::Health,
    optimizer::{Parameter, Parameters, grad_norm, optimizer_step},
};

use crate::{
    search::hostile,
    support::{Poisoned, gaussian, on_gpu, refused, upload},
};

const STATE: StepState = StepState {
    seed: 0,
    step: 3,
    micro_step: 0,
    learning_rate: 0.01,
    bias_corrections: [0.271, 0.142_625],
    loss_scale: 1.0,
};
const DECAYS: [MaskedDecay; 3] =
    [MaskedDecay::None, MaskedDecay::OnGradients(0.3), MaskedDecay::OnWeights(0.7)];
/// Tensors with and without a mask, shorter and longer than a chunk, with and without a remainder
/// mod 4.
const SHAPES: [[usize; 2]; 8] =
    [[1, 1], [4, 36], [1, 7], [68, 132], [0, 8], [1, 8191], [1, 16_390], [256, 260]];

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
const RULES: [UpdateRule; 4] = [
    UpdateRule::AdamW(ADAM),
    UpdateRule::Adam(ADAM),
    UpdateRule::Sgd { momentum: 0.9 },
    UpdateRule::Lion { beta1: 0.9, beta2: 0.99 },
];

/// A tensor on the host and on the device.
struct Tensor {
    host: [Array2<f32>; 4],
    mask: Option<Mask>,
    shadow: Option<Poisoned<bf16>>,
    on_device: Parameter,
}

impl Tensor {
    /// w, g, m and, if the rule has it, v; every second tensor has a bf16 copy and, if its shape
    /// allows, a mask.
    fn new(
        device: &mut Device,
        rule: &UpdateRule,
        place: usize,
        draw: impl Fn(u64) -> Array2<f32>,
    ) -> Self {
        let seed = 10 * place as u64;
        let mut host = [draw(seed), draw(seed + 1), draw(seed + 2), draw(seed + 3).mapv(f32::abs)];
        let [w, g, m, v] = host.each_ref().map(|host| upload(device, host));
        let v = rule.adam().map(|_| v);
        if v.is_none() {
            host[3] = Array2::default([0, 0]);
        }
        let shape = w.shape();
        let second = place % 2 == 1;
        let mask = (second && shape[0] % 4 == 0 && shape[1] % 4 == 0).then(|| {
            let mut mask = Mask::empty(shape[0], shape[1]).expect("tiled");
            mask_search(host[0].view(), MaskKind::Transposable, &mut mask).expect("tiled");
            mask
        });
        let tiles = mask.as_ref().map(|mask| {
            let tiles = device.alloc("mask", [shape[0] / 4, shape[1] / 4]).expect("memory");
            device.upload(tiles, mask.tiles()).expect("uploaded");
            tiles
        });
        let shadow = second.then(|| Poisoned::<bf16>::new(device, shape));
        let weight_decay = if second { 0.1 } else { 0.0 };
        let copy = shadow.as_ref().map(|shadow| shadow.matrix);
        Self {
            host,
            mask,
            shadow,
            on_device: Parameter { w, g, m, v, tiles, shadow: copy, weight_decay },
        }
    }

    /// Takes the CPU's step on the host's copy.
    fn step(&mut self, optimizer: &Optimizer, decay: MaskedDecay, norm: f32) {
        let (weight_decay, scale) = (self.on_device.weight_decay, optimizer.gradient_scale(norm));
        let [w, g, m, v] = self.host.each_mut().map(|host| host.as_slice_mut().expect("row-major"));
        let mask = self.mask.as_ref();
        cpu::optimizer_step(w, g, m, v, optimizer, &STATE, weight_decay, scale, decay, mask)
            .expect("fits");
    }

    fn expect_equal(&self, device: &mut Device, what: &str) {
        // The payload of a NaN is not defined.
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let Parameter { w, m, v, .. } = self.on_device;
        for (operand, found, expected) in
            [("w", Some(w), &self.host[0]), ("m", Some(m), &self.host[2]), ("v", v, &self.host[3])]
        {
            let Some(found) = found else { continue };
            let found = device.download(found).expect("read");
            let differs = found.iter().zip(expected).position(|(&a, &b)| !same(a, b));
            assert_eq!(differs, None, "{what}: {operand} of {:?}", expected.dim());
        }
        if let Some(shadow) = &self.shadow {
            let found = shadow.read(device);
            assert!(
                found
                    .iter()
                    .zip(&self.host[0])
                    .all(|(a, &b)| same(a.to_f32(), bf16::from_f32(b).to_f32())),
                "{what}: the bf16 copy"
            );
        }
    }
}

fn tensors(
    device: &mut Device,
    rule: &UpdateRule,
    draw: impl Fn([usize; 2], u64) -> Array2<f32>,
) -> Vec<Tensor> {
    SHAPES
        .into_iter()
        .enumerate()
        .map(|(place, shape)| Tensor::new(device, rule, place, |seed| draw(shape, seed)))
        .collect()
}

fn table(device: &mut Device, tensors: &[Tensor]) -> Parameters {
    let table: Vec<Parameter> = tensors.iter().map(|tensor| tensor.on_device).collect();
    Parameters::new(device, &table).expect("fits")
}

/// A health matrix with the flag down.
fn health(device: &mut Device) -> Matrix<u32> {
    let health = Poisoned::new(device, [1, Health::WORDS]).matrix;
    device.upload(health.columns(1..2), &[0]).expect("lowered");
    health
}

fn read(device: &mut Device, health: Matrix<u32>) -> Health {
    Health::of_words(device.download(health).expect("read").try_into().expect("two words"))
}

fn cases() -> impl Iterator<Item = (UpdateRule, MaskedDecay)> {
    RULES.into_iter().flat_map(|rule| DECAYS.map(|decay| (rule, decay)))
}

#[test]
fn steps_have_the_cpus_bits() {
    on_gpu(|device| {
        for (rule, decay) in cases() {
            for clip in [0.5, f32::INFINITY] {
                check_steps(device, gaussian, &Optimizer { rule, clip }, decay);
            }
        }
    });
}

/// Infinities and NaNs in w, m and v; gradients are finite, so the flag stays down.
#[test]
fn steps_on_hostile_numbers_have_the_cpus_bits() {
    on_gpu(|device| {
        let draw = |shape, seed| {
            let x = hostile::<f32>(shape, seed);
            if seed % 10 == 1 { x.mapv(|g| if g.abs() < 1e18 { g } else { 0.0 }) } else { x }
        };
        for (rule, decay) in cases() {
            check_steps(device, draw, &Optimizer { rule, clip: 1.0 }, decay);
        }
    });
}

fn check_steps(
    device: &mut Device,
    draw: impl Fn([usize; 2], u64) -> Array2<f32>,
    optimizer: &Optimizer,
    decay: MaskedDecay,
) {
    let mut tensors = tensors(device, &optimizer.rule, draw);
    let (table, health) = (table(device, &tensors), health(device));
    device.set_step(&STATE).expect("set");
    for step in 0..2 {
        grad_norm(device, &table, health).expect("queued");
        optimizer_step(device, &table, optimizer, decay, health).expect("queued");
        let health = read(device, health);
        assert_eq!(health.non_finite, None);
        for tensor in &mut tensors {
            tensor.step(optimizer, decay, health.grad_norm);
            tensor.expect_equal(device, &format!("{decay:?}, {optimizer:?}, step {step}"));
        }
    }
    device.reset().expect("idle");
}

/// That a step does nothing then is in the conformance suite.
#[test]
fn the_flag_names_the_first_tensor_and_stays_up() {
    on_gpu(|device| {
        let tensors = tensors(device, &RULES[0], gaussian);
        let (table, health) = (table(device, &tensors), health(device));
        let flag = |device: &mut Device| {
            grad_norm(device, &table, health).expect("queued");
            read(device, health).non_finite
        };
        let set_last = |device: &mut Device, at: usize, value: f32| {
            let g = tensors[at].on_device.g;
            let [rows, columns] = g.shape();
            let last = g.rows(rows - 1..rows).columns(columns - 1..columns);
            device.upload(last, &[value]).expect("uploaded");
        };
        set_last(device, 6, f32::NAN);
        set_last(device, 3, f32::NEG_INFINITY);
        assert_eq!(flag(device), Some(NonFinite::Gradient(3)));
        // Neither an earlier bad tensor nor none changes the flag.
        set_last(device, 0, f32::INFINITY);
        assert_eq!(flag(device), Some(NonFinite::Gradient(3)));
        for at in [0, 3, 6] {
            set_last(device, at, 1.0);
        }
        assert_eq!(flag(device), Some(NonFinite::Gradient(3)));
        device.fill_bytes(health, 0).expect("lowered");
        assert_eq!(flag(device), None);
    });
}

#[test]
fn bad_tables_are_refused() {
    on_gpu(|device| {
        let tensor =
            |device: &mut Device, shape| device.alloc::<f32>("tensor", shape).expect("memory");
        let [w, g, m, second] = [(); 4].map(|()| tensor(device, [8, 16]));
        let v = Some(second);
        let parameter = Parameter { w, g, m, v, tiles: None, shadow: None, weight_decay: 0.0 };
        let mut refuse =
            |parameters: &[Parameter]| refused(Parameters::new(device, parameters).map(drop));
        assert_eq!(refuse(&[Parameter { g: g.rows(0..4), ..parameter }]), ("shape", "g"));
        assert_eq!(refuse(&[parameter, parameter]).0, "alias");
        assert_eq!(refuse(&[Parameter { m: second, ..parameter }]).0, "alias");
        let part = |part: fn(Matrix<f32>) -> Matrix<f32>| {
            let [w, g, m] = [w, g, m].map(part);
            [Parameter { w, g, m, v: v.map(part), ..parameter }]
        };
        assert_eq!(refuse(&part(|x| x.columns(0..8))), ("gaps", "w"));
        assert_eq!(refuse(&part(|x| x.rows(0..1).columns(1..5))), ("alignment", "w"));
        let health = health(device);
        let table = Parameters::new(device, &[Parameter { v: None, ..parameter }]).expect("fits");
        let adamw = Optimizer { rule: RULES[0], clip: 1.0 };
        let step = optimizer_step(device, &table, &adamw, MaskedDecay::None, health);
        assert_eq!(refused(step), ("shape", "v"));
        device.reset().expect("idle");
        assert_eq!(refused(grad_norm(device, &table, health)).0, "stale");
    });
}

#[test]
fn an_empty_table_has_norm_zero() {
    on_gpu(|device| {
        let table = Parameters::new(device, &[]).expect("nothing");
        let health = health(device);
        grad_norm(device, &table, health).expect("queued");
        let adamw = Optimizer { rule: RULES[0], clip: 1.0 };
        optimizer_step(device, &table, &adamw, MaskedDecay::None, health).expect("nothing");
        assert_eq!(read(device, health), Health { grad_norm: 0.0, non_finite: None });
    });
}
