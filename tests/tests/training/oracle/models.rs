//! GPT-2, BERT, crammed BERT and DeiT forward and backward: embeddings, pre-LN or post-LN blocks,
//! and a tied head or outputs that read the rows with a target.

use sparse24_core::op::{Activation, AttentionMask};
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Dropout, Normed},
};
use sparse24_train::{
    backend::op::HeadLoss,
    model::{BertSpec, DeitSpec, Gpt2Spec, ModelSpec},
    nn::Prediction,
    objective::Batch,
};

use super::{
    pass::{HeadBackward, Pass, scattered},
    sequence::Head,
    sublayer::{self, Backward, Function, Heads, Order, Sublayer},
};

#[derive(Clone, Copy)]
enum Positions {
    Learned(&'static str),
    /// Sines and cosines, times this factor.
    Sinusoidal(&'static str),
}

/// The names of an architecture's parameters, and what it does with them.
struct Architecture {
    order: Order,
    mask: AttentionMask,
    epsilon: f32,
    /// The table of tokens, or of class tokens (row 0) and patches (row 1).
    words: &'static str,
    positions: Positions,
    segments: Option<&'static str>,
    /// The linear layer of patches, which follow a class token.
    patches: Option<&'static str>,
    /// The norm of the embedding.
    embedded: Option<&'static str>,
    block: &'static str,
    /// The norm, the first and the last linear layer of attention and of the feed-forward.
    sublayers: [[&'static str; 3]; 2],
    /// The norm after the blocks.
    last: Option<&'static str>,
    /// The tied head: a linear layer, a norm after an activation, and a bias of the logits.
    head: [Option<&'static str>; 3],
    /// The head of a model that predicts: the outputs and the pooler.
    outputs: (&'static str, Option<&'static str>),
}

const GPT2: Architecture = Architecture {
    order: Order::Pre,
    mask: AttentionMask::Causal,
    epsilon: 1e-5,
    words: "wte.weight",
    positions: Positions::Learned("wpe.weight"),
    segments: None,
    patches: None,
    embedded: None,
    block: "h",
    sublayers: [["ln_1", "attn.c_attn", "attn.c_proj"], ["ln_2", "mlp.c_fc", "mlp.c_proj"]],
    last: Some("ln_f"),
    head: [None; 3],
    outputs: ("score", None),
};

const BERT: Architecture = Architecture {
    order: Order::Post,
    mask: AttentionMask::Full,
    epsilon: 1e-12,
    words: "embeddings.word_embeddings.weight",
    positions: Positions::Learned("embeddings.position_embeddings.weight"),
    segments: Some("embeddings.token_type_embeddings.weight"),
    embedded: Some("embeddings.LayerNorm"),
    block: "encoder.layer",
    sublayers: [
        ["attention.output.LayerNorm", "attention.self.qkv", "attention.output.dense"],
        ["output.LayerNorm", "intermediate.dense", "output.dense"],
    ],
    last: None,
    head: [
        Some("cls.predictions.transform.dense"),
        Some("cls.predictions.transform.LayerNorm"),
        Some("cls.predictions.bias"),
    ],
    outputs: ("classifier", Some("pooler.dense")),
    ..GPT2
};

const CRAMMED_BERT: Architecture = Architecture {
    order: Order::Pre,
    words: "embedding.word_embedding.weight",
    positions: Positions::Sinusoidal("embedding.pos_embedding.scale_factor"),
    segments: None,
    embedded: Some("embedding.norm"),
    block: "layers",
    sublayers: [
        ["norm1", "attn.self_attention.query_key_value", "attn.dense"],
        ["norm2", "ffn.dense_in", "ffn.dense_out"],
    ],
    last: Some("final_norm"),
    head: [Some("prediction_head"), None, None],
    ..BERT
};

const DEIT: Architecture = Architecture {
    mask: AttentionMask::Full,
    epsilon: 1e-6,
    words: "kind_embed",
    positions: Positions::Learned("pos_embed"),
    patches: Some("patch_embed.proj"),
    block: "blocks",
    sublayers: [["norm1", "attn.qkv", "attn.proj"], ["norm2", "mlp.fc1", "mlp.fc2"]],
    last: Some("norm"),
    outputs: ("head", None),
    ..GPT2
};

struct Model {
    of: Architecture,
    layers: usize,
    heads: usize,
    activation: Activation,
    prediction: Option<Prediction>,
    /// Probability that the last block drops a sublayer of a sequence.
    drop_path: f32,
    /// Label smoothing of mixed targets.
    mixed: Option<f64>,
}

/// The pass up to the head.
struct Forward<'a> {
    pixels: Option<Matrix>,
    embedded: Option<Normed>,
    blocks: Vec<Backward<'a>>,
    last: Option<Normed>,
    y: Matrix,
}

fn sinusoid(position: usize, j: usize, d: usize) -> f64 {
    let pair = 2 * (j / 2);
    let angle = position as f64 * 10000f64.powf(-(pair as f64) / d as f64);
    if j == pair { angle.sin() } else { angle.cos() }
}

impl Model {
    fn of(spec: &ModelSpec) -> Self {
        let plain = |of, layers, heads, activation| {
            let prediction = spec.prediction();
            Self { of, layers, heads, activation, prediction, drop_path: 0.0, mixed: None }
        };
        match *spec {
            ModelSpec::Gpt2(Gpt2Spec { layers, heads, activation, .. }) => {
                plain(GPT2, layers, heads, activation)
            }
            ModelSpec::Bert(BertSpec { layers, heads, activation, .. }) => {
                plain(BERT, layers, heads, activation)
            }
            ModelSpec::CrammedBert(BertSpec { layers, heads, activation, .. }) => {
                plain(CRAMMED_BERT, layers, heads, activation)
            }
            ModelSpec::Deit(DeitSpec {
                layers,
                heads,
                activation,
                drop_path,
                label_smoothing,
                ..
            }) => {
                let mixed = Some(f64::from(label_smoothing));
                Self { drop_path, mixed, ..plain(DEIT, layers, heads, activation) }
            }
            ref other => panic!("the oracle has no {other:?}"),
        }
    }

    /// The lengths of sequences, which neither causal models nor those of images read.
    fn lengths<'a>(&self, batch: &'a Batch) -> Option<&'a [u32]> {
        let padded = self.of.mask == AttentionMask::Full && self.of.patches.is_none();
        padded.then_some(&batch.lengths)
    }

    /// The rows of the table of words.
    fn words(&self, pass: &Pass<'_>, batch: &Batch) -> Vec<u32> {
        match self.of.patches {
            None => batch.tokens.clone(),
            Some(_) => {
                (0..pass.batch.tokens()).map(|row| u32::from(!is_class(pass, row))).collect()
            }
        }
    }

    /// The sum of the embeddings, and the pixels of each patch.
    fn embed(&self, pass: &mut Pass<'_>, batch: &Batch) -> (Matrix, Option<Matrix>) {
        let (rows, length) = (self.words(pass, batch), pass.batch.sequence_length);
        let words = &pass.weights[self.of.words];
        let d = words.ncols();
        let mut sum = Matrix::from_shape_fn((rows.len(), d), |(i, j)| {
            let position = match self.of.positions {
                Positions::Learned(name) => pass.weights[name][[i % length, j]],
                Positions::Sinusoidal(name) => {
                    // Two roundings: of the sinusoid and of the product.
                    let position = pass.weights[name][[0, 0]] * sinusoid(i % length, j, d);
                    pass.arithmetic.rounded(position, 2.0, position)
                }
            };
            let value = words[[rows[i] as usize, j]] + position;
            pass.arithmetic.rounded(value, 1.0, value)
        });
        if let Some(table) = self.of.segments.map(|name| &pass.weights[name]) {
            let segments =
                Matrix::from_shape_fn(sum.dim(), |(i, j)| table[[batch.segments[i] as usize, j]]);
            sum = pass.plus(&sum, &segments);
        }
        let pixels = self.of.patches.map(|name| {
            let patches = patches(pass);
            let values = batch.pixels.iter().map(|&x| f64::from(x)).collect();
            let shape = (patches.len(), batch.pixels.len() / patches.len());
            let pixels = Matrix::from_shape_vec(shape, values).expect("whole patches");
            let projected = scattered(&pass.linear(name, &pixels), &patches, sum.nrows());
            sum = pass.plus(&projected, &sum);
            pixels
        });
        (sum, pixels)
    }

    /// The gradients of the embeddings; `dhead` is the head's part of the table of words.
    fn embed_backward(
        &self,
        pass: &mut Pass<'_>,
        (batch, pixels): (&Batch, Option<&Matrix>),
        (dx, dhead): (&Matrix, Option<Matrix>),
        gradients: &mut Tensors,
    ) {
        let (rows, length) = (self.words(pass, batch), pass.batch.sequence_length);
        let mut dwords = pass.table_backward(self.of.words, |i| rows[i] as usize, dx);
        if let Some(dhead) = dhead {
            dwords = pass.plus(&dhead, &dwords);
        }
        pass.accumulate(gradients, self.of.words, dwords);
        let (name, dpositions) = match self.of.positions {
            Positions::Learned(name) => (name, pass.table_backward(name, |i| i % length, dx)),
            Positions::Sinusoidal(name) => {
                let d = dx.ncols();
                let terms = dx.indexed_iter().map(|((i, j), dx)| dx * sinusoid(i % length, j, d));
                (name, Matrix::from_elem((1, 1), pass.arithmetic.sum(terms)))
            }
        };
        pass.accumulate(gradients, name, dpositions);
        if let Some(name) = self.of.segments {
            let dsegments = pass.table_backward(name, |i| batch.segments[i] as usize, dx);
            pass.accumulate(gradients, name, dsegments);
        }
        if let Some((name, pixels)) = self.of.patches.zip(pixels) {
            let dprojected = dx.select(ndarray::Axis(0), &patches(pass));
            pass.linear_backward(name, pixels, &dprojected, gradients);
        }
    }

    /// Stochastic depth of a sublayer: the rate grows linearly over the blocks, the number is that
    /// of the last dropout, which is the head's, and 1 + 2 layer + sublayer.
    fn path(&self, pass: &Pass<'_>, layer: usize, sublayer: usize) -> Option<Dropout> {
        let p = f64::from(self.drop_path * layer as f32 / (self.layers - 1).max(1) as f32);
        let number = (2 + 3 * self.layers + 2 * layer + sublayer) as u32;
        (p > 0.0).then_some(Dropout { address: pass.address, number, p })
    }

    fn block<'a>(&self, pass: &Pass<'_>, layer: usize, batch: &'a Batch) -> [Sublayer<'a>; 2] {
        let Architecture { order, mask, epsilon, block, sublayers, .. } = self.of;
        let (lengths, dropout) = (self.lengths(batch), Some(1 + 3 * layer));
        let heads = Heads { count: self.heads, mask, lengths, dropout };
        let functions = [Function::Attention(heads, None), Function::FeedForward(self.activation)];
        let mut all = functions.into_iter().enumerate();
        sublayers.map(|names| {
            let [norm, first, last] = names.map(|name| format!("{block}.{layer}.{name}"));
            let (at, function) = all.next().expect("as many functions");
            let (dropout, path) = (2 + 3 * layer + at, self.path(pass, layer, at));
            Sublayer { order, epsilon, norm, linear: [first, last], dropout, path, function }
        })
    }

    fn forward<'a>(&self, pass: &mut Pass<'_>, batch: &'a Batch) -> Forward<'a> {
        let (x, pixels) = self.embed(pass, batch);
        let embedded = self.of.embedded.map(|name| pass.norm(name, &x, self.of.epsilon));
        let x = pass.dropped(0, embedded.as_ref().map_or(x, |normed| normed.y.clone()));
        let blocks: Vec<_> =
            (0..self.layers).flat_map(|layer| self.block(pass, layer, batch)).collect();
        let (x, blocks) = sublayer::forward(pass, blocks, x);
        let last = self.of.last.map(|name| pass.norm(name, &x, self.of.epsilon));
        let y = last.as_ref().map_or(x, |normed| normed.y.clone());
        Forward { pixels, embedded, blocks, last, y }
    }

    fn head(
        &self,
        pass: &mut Pass<'_>,
        y: &Matrix,
        batch: &Batch,
        scale: f64,
    ) -> (f64, HeadBackward) {
        let ((name, pooler), dropout) = (self.of.outputs, 1 + 3 * self.layers);
        let mixed = self.mixed;
        match self.prediction {
            None => self.tied(pass, y, batch, scale),
            Some(prediction) => {
                Head { name, pooler, dropout, prediction, mixed }.forward(pass, y, batch, scale)
            }
        }
    }

    fn tied(
        &self,
        pass: &mut Pass<'_>,
        y: &Matrix,
        batch: &Batch,
        scale: f64,
    ) -> (f64, HeadBackward) {
        let Architecture { words, head: [dense, norm, bias], epsilon, .. } = self.of;
        let (activation, height) = (self.activation, y.nrows());
        let rows: Vec<usize> =
            (0..height).filter(|&row| batch.targets[row] != HeadLoss::IGNORE).collect();
        let targets: Vec<u32> = rows.iter().map(|&row| batch.targets[row]).collect();
        let selected = y.select(ndarray::Axis(0), &rows);
        let z = dense.map_or_else(|| selected.clone(), |name| pass.linear(name, &selected));
        let normed = norm.map(|name| {
            let h = layers::activate(pass.arithmetic, activation, &z);
            (name, pass.norm(name, &h, epsilon))
        });
        let features = normed.as_ref().map_or(&z, |(_, normed)| &normed.y).clone();
        let mut logits = pass.logits(words, &features);
        if let Some(bias) = bias.map(|name| &pass.weights[name]) {
            let bias = Matrix::from_shape_fn(logits.dim(), |(_, j)| bias[[0, j]]);
            logits = pass.plus(&logits, &bias);
        }
        let (sum, dlogits) = layers::loss(pass.arithmetic, &logits, &targets, 0.0, scale);
        let backward: HeadBackward = Box::new(move |pass, gradients| {
            let dtable = pass.arithmetic.product(&dlogits.t().to_owned(), &features);
            let mut d = pass.arithmetic.product(&dlogits, &pass.weights[words]);
            if let Some(name) = bias {
                let dbias = pass.arithmetic.column_sums(&dlogits);
                pass.accumulate(gradients, name, dbias);
            }
            if let Some((name, normed)) = normed {
                let dh = pass.norm_backward(name, &normed, &d, gradients);
                d = layers::activate_backward(pass.arithmetic, activation, &z, &dh);
            }
            if let Some(name) = dense {
                d = pass.linear_backward(name, &selected, &d, gradients);
            }
            (scattered(&d, &rows, height), Some(dtable))
        });
        (sum, backward)
    }
}

/// Whether a row of an image is its class token.
fn is_class(pass: &Pass<'_>, row: usize) -> bool {
    row.is_multiple_of(pass.batch.sequence_length)
}

/// The rows of patches.
fn patches(pass: &Pass<'_>) -> Vec<usize> {
    (0..pass.batch.tokens()).filter(|&row| !is_class(pass, row)).collect()
}

/// Validation losses neither smooth nor mix targets, and drop nothing.
pub(super) fn loss(pass: &mut Pass<'_>, batch: &Batch) -> f64 {
    let model = Model { drop_path: 0.0, mixed: None, ..Model::of(pass.spec) };
    let Forward { y, .. } = model.forward(pass, batch);
    model.head(pass, &y, batch, 0.0).0
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let model = Model::of(pass.spec);
    let Forward { pixels, embedded, blocks, last, y } = model.forward(pass, batch);
    let (sum, head) = model.head(pass, &y, batch, scale);
    let (mut dx, dhead) = head(pass, gradients);
    if let Some((name, last)) = model.of.last.zip(last) {
        dx = pass.norm_backward(name, &last, &dx, gradients);
    }
    let (dx, _) = sublayer::backward(pass, blocks, dx, gradients);
    let mut dx = pass.dropped(0, dx);
    if let Some((name, embedded)) = model.of.embedded.zip(embedded) {
        dx = pass.norm_backward(name, &embedded, &dx, gradients);
    }
    model.embed_backward(pass, (batch, pixels.as_ref()), (&dx, dhead), gradients);
    sum
}
