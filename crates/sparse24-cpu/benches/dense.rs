//! The dense kernels at the shapes of a training step of a small GPT-2: 4 layers, 4 heads, d_model
//! 128, d_ff 512, sequence length 64, batch size 12, vocabulary 65. Each product is verified before
//! it is timed. The last lines sum the products of a step, and all other kernels. Set the number of
//! threads with `RAYON_NUM_THREADS`.

use std::{hint::black_box, time::Duration, time::Instant};

use ndarray::{Array1, Array2, ArrayView2, s};
use sparse24_core::{
    Mask,
    op::{Accumulate, Activation, AdamW, AttentionMask, AttentionShape, MaskedDecay, StepState},
};
use sparse24_cpu::{
    Error,
    activation::{activation_backward, activation_forward},
    adamw::{adamw_step, squared_norm},
    attention::{attention_backward, attention_forward},
    embedding::{embed_backward, embed_forward},
    gemm::matmul,
    loss::head_loss,
    norm::{norm_backward, norm_forward},
};

const LAYERS: usize = 4;
const D: usize = 128;
const FF: usize = 512;
const T: usize = 64;
const B: usize = 12;
const V: usize = 65;
const P: usize = B * T;

/// Times kernels and records how often a step runs each of them.
struct Step {
    /// The kernels to time: those whose name contains this.
    filter: String,
    /// Name, shortest time of a call, calls per step.
    calls: Vec<(&'static str, Duration, usize)>,
}

impl Step {
    fn time(
        &mut self,
        name: &'static str,
        calls: usize,
        mut kernel: impl FnMut() -> Result<(), Error>,
    ) {
        if !name.contains(&self.filter) {
            return;
        }
        let (start, mut shortest) = (Instant::now(), Duration::MAX);
        while start.elapsed() < Duration::from_millis(600) {
            let start = Instant::now();
            kernel().expect("shapes agree");
            shortest = shortest.min(start.elapsed());
        }
        self.calls.push((name, shortest, calls));
    }

    fn sum(&self, what: impl Fn(&str) -> bool) -> f64 {
        self.calls
            .iter()
            .filter(|(name, ..)| what(name))
            .map(|&(_, time, calls)| time.as_secs_f64() * 1e3 * calls as f64)
            .sum()
    }
}

fn matrix(rows: usize, columns: usize) -> Array2<f32> {
    let mut state = (rows * 131 + columns) as u32;
    Array2::from_shape_simple_fn([rows, columns], || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    })
}

fn product(
    step: &mut Step,
    name: &'static str,
    calls: usize,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
) {
    let mut c = Array2::from_elem([a.nrows(), b.ncols()], f32::NAN);
    matmul(a, b, c.view_mut(), Accumulate::Overwrite).expect("shapes agree");
    let expected = a.mapv(f64::from).dot(&b.mapv(f64::from));
    let bound = a.mapv(|x| f64::from(x.abs())).dot(&b.mapv(|x| f64::from(x.abs())))
        * ((a.ncols() + 2) as f64 * 2f64.powi(-24));
    for ((at, &found), expected) in c.indexed_iter().zip(&expected) {
        assert!(
            (f64::from(found) - expected).abs() <= bound[at],
            "{name} at {at:?}: {found} and {expected}"
        );
    }
    step.time(name, calls, || {
        matmul(black_box(a), black_box(b), c.view_mut(), Accumulate::Overwrite)
    });
}

fn products(step: &mut Step) {
    for (q, r, names) in [
        (D, 3 * D, ["gemm qkv forward", "gemm qkv dgrad", "gemm qkv wgrad"]),
        (D, D, ["gemm out forward", "gemm out dgrad", "gemm out wgrad"]),
        (D, FF, ["gemm up forward", "gemm up dgrad", "gemm up wgrad"]),
        (FF, D, ["gemm down forward", "gemm down dgrad", "gemm down wgrad"]),
        (D, V, ["gemm head forward", "gemm head dgrad", "gemm head wgrad"]),
    ] {
        let (x, w, dz) = (matrix(P, q), matrix(r, q), matrix(P, r));
        let calls = if r == V { 1 } else { LAYERS };
        product(step, names[0], calls, x.view(), w.t());
        product(step, names[1], calls, dz.view(), w.view());
        product(step, names[2], calls, dz.t(), x.view());
    }
}

fn rows(step: &mut Step) {
    let (x, delta, gamma) = (matrix(P, D), matrix(P, D), Array1::ones(D));
    let [mut residual, mut y, mut stats] =
        [Array2::zeros([P, D]), Array2::zeros([P, D]), Array2::zeros([P, 2])];
    step.time("norm forward", 2 * LAYERS + 1, || {
        norm_forward(
            x.view(),
            Some(delta.view()),
            gamma.view(),
            None,
            residual.view_mut(),
            y.view_mut(),
            stats.view_mut(),
        )
    });
    let (mut dx, mut dgamma) = (matrix(P, D), Array1::zeros(D));
    step.time("norm backward", 2 * LAYERS + 1, || {
        dx.fill(0.0);
        norm_backward(
            delta.view(),
            residual.view(),
            stats.view(),
            gamma.view(),
            dx.view_mut(),
            Accumulate::Add,
            dgamma.view_mut(),
            None,
            Accumulate::Add,
        )
    });
    let (z, dh, mut h) = (matrix(P, FF), matrix(P, FF), matrix(P, FF));
    step.time("gelu forward", LAYERS, || {
        activation_forward(Activation::Gelu, z.view(), h.view_mut())
    });
    step.time("gelu backward", LAYERS, || {
        activation_backward(Activation::Gelu, dh.view(), z.view(), h.view_mut())
    });
    let tokens: Vec<u32> = (0..P as u32).map(|i| i * 40_503 % V as u32).collect();
    let (wte, wpe) = (matrix(V, D), matrix(T, D));
    step.time("embed forward", 1, || {
        embed_forward(&tokens, T, wte.view(), Some(wpe.view()), y.view_mut())
    });
    let (mut dwte, mut dwpe) = (matrix(V, D), matrix(T, D));
    step.time("embed backward", 1, || {
        embed_backward(
            x.view(),
            &tokens,
            T,
            dwte.view_mut(),
            Some(dwpe.view_mut()),
            Accumulate::Overwrite,
        )
    });
    let mut logits = matrix(P, V);
    step.time("head loss", 1, || {
        head_loss(logits.view_mut(), &tokens, None, 0.0, 1.0 / P as f32)
            .map(|sum| _ = black_box(sum))
    });
}

fn attention(step: &mut Step) {
    let shape =
        AttentionShape { batch: B, heads: 4, queries: T, keys: T, mask: AttentionMask::Causal };
    let (qkv, d_o, mut dqkv) = (matrix(P, 3 * D), matrix(P, D), matrix(P, 3 * D));
    let (q, k, v) =
        (qkv.slice(s![.., ..D]), qkv.slice(s![.., D..2 * D]), qkv.slice(s![.., 2 * D..]));
    let (mut o, mut lse) = (matrix(P, D), matrix(4 * B, T));
    step.time("attention forward", LAYERS, || {
        attention_forward(shape, q, k, v, None, o.view_mut(), lse.view_mut(), None)
    });
    step.time("attention backward", LAYERS, || {
        let (dq, dk, dv) = dqkv.multi_slice_mut((s![.., ..D], s![.., D..2 * D], s![.., 2 * D..]));
        attention_backward(shape, q, k, v, None, o.view(), lse.view(), d_o.view(), dq, dk, dv, None)
    });
}

fn optimizer(step: &mut Step) {
    let rule = AdamW { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, clip: 1.0 };
    let state =
        StepState { learning_rate: 1e-3, bias_corrections: [0.5, 0.1], ..StepState::default() };
    let mut tensors = Vec::new();
    for [rows, columns] in [[3 * D, D], [D, D], [FF, D], [D, FF]] {
        let mask = Mask::from_tiles(rows, columns, vec![0x5a5a; rows * columns / 16])
            .expect("made of tiles");
        for _ in 0..LAYERS {
            tensors.push((
                matrix(rows, columns),
                matrix(rows, columns),
                Array2::zeros([rows, columns]),
                Array2::zeros([rows, columns]),
                mask.clone(),
            ));
        }
    }
    for (name, masked) in [("adamw", false), ("(adamw with masked decay)", true)] {
        step.time(name, usize::from(!masked), || {
            tensors.iter_mut().try_for_each(|(w, g, m, v, mask)| {
                let decay = if masked { MaskedDecay::OnGradients(1e-4) } else { MaskedDecay::None };
                let [w, m, v] = [w, m, v].map(|x| x.as_slice_mut().expect("contiguous"));
                let g = g.as_slice().expect("contiguous");
                adamw_step(w, g, m, v, &rule, &state, 0.1, 1.0, decay, Some(mask))
            })
        });
    }
    step.time("gradient norm", 1, || {
        black_box(
            tensors
                .iter()
                .map(|(_, g, ..)| squared_norm(g.as_slice().expect("contiguous")))
                .sum::<f64>(),
        );
        Ok(())
    });
}

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let mut step = Step { filter: filter.unwrap_or_default(), calls: Vec::new() };
    products(&mut step);
    rows(&mut step);
    attention(&mut step);
    optimizer(&mut step);
    println!("\nshortest times, {} threads", rayon::current_num_threads());
    for (name, time, calls) in &step.calls {
        println!("{name:26} {:8.1} us x {calls}", time.as_secs_f64() * 1e6);
    }
    let (products, others) =
        (step.sum(|name| name.starts_with("gemm")), step.sum(|name| !name.starts_with("gemm")));
    println!(
        "products {products:.2} ms, everything else {others:.2} ms: {:.2}x the products alone",
        (products + others) / products
    );
}
