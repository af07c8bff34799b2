//! DeiT forward and backward: projected patches, a class token, learned positions, pre-LN blocks
//! that drop half blocks of whole images, and a head with two mixed targets.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Dropout, Normed},
};
use sparse24_train::{model::DeitSpec, objective::Batch};

use super::pass::Pass;

const PATCHES: &str = "patch_embed.proj";
const EMBEDDING: [&str; 2] = ["kind_embed", "pos_embed"];
const HEAD: &str = "head";
const EPSILON: f32 = 1e-6;
const MASK: AttentionMask = AttentionMask::Full;

struct Block {
    norms: [Normed; 2],
    qkv: [Matrix; 3],
    attended: Attended,
    z: Matrix,
    h: Matrix,
}

struct Forward {
    pixels: Matrix,
    blocks: Vec<Block>,
    normed: Normed,
    /// The class tokens.
    m: Matrix,
    h: Matrix,
    logits: Matrix,
}

#[derive(Clone, Copy, PartialEq)]
enum Depth {
    Stochastic,
    Full,
}

impl DeitPass<'_, '_> {
    fn tokens(&self) -> usize {
        self.spec.patches().count + 1
    }

    /// The class token has kind 0, patches have kind 1.
    fn kinds(&self) -> Vec<u32> {
        (0..self.pass.batch.tokens()).map(|i| u32::from(i % self.tokens() > 0)).collect()
    }

    /// x with stochastic depth of a half block: the rate grows linearly over the blocks, the number
    /// is that of the last dropout, which is the head's, and 1 + 2 layer + half.
    fn path(&mut self, layer: usize, half: usize, x: Matrix) -> Matrix {
        let &DeitSpec { layers, drop_path, .. } = self.spec;
        let p = f64::from(drop_path * layer as f32 / (layers - 1).max(1) as f32);
        let number = (2 + 3 * layers + 2 * layer + half) as u32;
        let dropout = Dropout { address: self.pass.address, number, p };
        let dropout = (self.depth == Depth::Stochastic && p > 0.0).then_some(dropout);
        Dropout::apply_to_sequences(dropout, self.pass.arithmetic, self.tokens(), x)
    }

    /// The number of a row without its class token.
    fn patch(&self, row: usize) -> Option<usize> {
        let tokens = self.tokens();
        Some(row / tokens * (tokens - 1) + (row % tokens).checked_sub(1)?)
    }

    fn forward(&mut self, batch: &Batch) -> Forward {
        let (spec, tokens) = (self.spec, self.tokens());
        let values = batch.pixels.iter().map(|&x| f64::from(x)).collect();
        let columns = 3 * spec.patches().pixels;
        let shape = (batch.pixels.len() / columns, columns);
        let pixels = Matrix::from_shape_vec(shape, values).expect("whole patches");
        let projected = self.pass.linear(PATCHES, &pixels);
        let rows = self.pass.batch.tokens();
        let gathered = Matrix::from_shape_fn((rows, spec.d_model), |(i, j)| {
            self.patch(i).map_or(0.0, |patch| projected[[patch, j]])
        });
        let embedded = self.pass.embed(EMBEDDING, &self.kinds());
        let x = self.pass.plus(&gathered, &embedded);
        let mut x = self.pass.dropped(0, x);
        let mut blocks = Vec::new();
        for layer in 0..spec.layers {
            let of = |part: &str| format!("blocks.{layer}.{part}");
            let pass = &mut *self.pass;
            let first = pass.norm(&of("norm1"), &x, EPSILON);
            let qkv = layers::split(&pass.linear(&of("attn.qkv"), &first.y));
            let attention = pass.attention(layer, (spec.heads, MASK), &qkv, None);
            let attended = attention.forward(pass.arithmetic);
            let out = pass.linear(&of("attn.proj"), &attended.o);
            let out = pass.dropped(2 + 3 * layer, out);
            let out = self.path(layer, 0, out);
            let pass = &mut *self.pass;
            x = pass.plus(&x, &out);
            let second = pass.norm(&of("norm2"), &x, EPSILON);
            let z = pass.linear(&of("mlp.fc1"), &second.y);
            let h = layers::activate(pass.arithmetic, spec.activation, &z);
            let out = pass.linear(&of("mlp.fc2"), &h);
            let out = pass.dropped(3 + 3 * layer, out);
            let out = self.path(layer, 1, out);
            x = self.pass.plus(&x, &out);
            blocks.push(Block { norms: [first, second], qkv, attended, z, h });
        }
        let normed = self.pass.norm("norm", &x, EPSILON);
        let rows: Vec<usize> = (0..normed.y.nrows()).step_by(tokens).collect();
        let m = normed.y.select(ndarray::Axis(0), &rows);
        let h = self.pass.dropped(1 + 3 * spec.layers, m.clone());
        let logits = self.pass.linear(HEAD, &h);
        Forward { pixels, blocks, normed, m, h, logits }
    }
}

struct DeitPass<'a, 'b> {
    pass: &'a mut Pass<'b>,
    spec: &'a DeitSpec,
    depth: Depth,
}

fn targets(batch: &Batch, tokens: usize) -> Vec<u32> {
    batch.targets.iter().step_by(tokens).copied().collect()
}

pub(super) fn loss(pass: &mut Pass<'_>, spec: &DeitSpec, batch: &Batch) -> f64 {
    let mut pass = DeitPass { pass, spec, depth: Depth::Full };
    let Forward { logits, .. } = pass.forward(batch);
    let targets = targets(batch, pass.tokens());
    layers::loss(pass.pass.arithmetic, &logits, &targets, 0.0, 0.0).0
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &DeitSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let mut of = DeitPass { pass, spec, depth: Depth::Stochastic };
    let Forward { pixels, blocks, normed, m, h, logits } = of.forward(batch);
    let tokens = of.tokens();
    let targets = targets(batch, tokens);
    let mixed = (!batch.shares.is_empty()).then_some((&*batch.second_targets, &*batch.shares));
    let smoothing = f64::from(spec.label_smoothing);
    let pass = &mut *of.pass;
    let (sum, dlogits) =
        layers::mixed_loss(pass.arithmetic, &logits, &targets, mixed, smoothing, scale);
    let dh = pass.linear_backward(HEAD, &h, &dlogits, gradients);
    let dm = pass.dropped(1 + 3 * spec.layers, dh);
    assert_eq!(dm.dim(), m.dim());
    let mut dy = Matrix::zeros(normed.y.dim());
    for (row, dm) in dm.rows().into_iter().enumerate() {
        dy.row_mut(row * tokens).assign(&dm);
    }
    let mut dx = pass.norm_backward("norm", &normed, &dy, gradients);
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let name = |part: &str| format!("blocks.{layer}.{part}");
        let [first, second] = &kept.norms;
        let dout = of.path(layer, 1, dx.clone());
        let pass = &mut *of.pass;
        let dout = pass.dropped(3 + 3 * layer, dout);
        let dh = pass.linear_backward(&name("mlp.fc2"), &kept.h, &dout, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let dy = pass.linear_backward(&name("mlp.fc1"), &second.y, &dz, gradients);
        let through = pass.norm_backward(&name("norm2"), second, &dy, gradients);
        dx = pass.plus(&dx, &through);

        let dout = of.path(layer, 0, dx.clone());
        let pass = &mut *of.pass;
        let dout = pass.dropped(2 + 3 * layer, dout);
        let d_o = pass.linear_backward(&name("attn.proj"), &kept.attended.o, &dout, gradients);
        let attention = pass.attention(layer, (spec.heads, MASK), &kept.qkv, None);
        let dqkv = layers::join(&attention.backward(pass.arithmetic, &kept.attended, &d_o));
        let dy = pass.linear_backward(&name("attn.qkv"), &first.y, &dqkv, gradients);
        let through = pass.norm_backward(&name("norm1"), first, &dy, gradients);
        dx = pass.plus(&dx, &through);
    }
    let dx = of.pass.dropped(0, dx);
    let kinds = of.kinds();
    let [of_kinds, of_positions] = of.pass.embed_backward(EMBEDDING, &kinds, &dx);
    of.pass.accumulate(gradients, EMBEDDING[0], of_kinds);
    of.pass.accumulate(gradients, EMBEDDING[1], of_positions);
    let patches: Vec<usize> = (0..dx.nrows()).filter(|&row| of.patch(row).is_some()).collect();
    let dprojected = dx.select(ndarray::Axis(0), &patches);
    of.pass.linear_backward(PATCHES, &pixels, &dprojected, gradients);
    sum
}
