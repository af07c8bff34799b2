//! Every model forward and backward: embeddings, pre-LN or post-LN blocks, and a tied head that
//! reads the rows with a target.

use sparse24_core::op::{Activation, AttentionMask};
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Normed},
};
use sparse24_train::{
    backend::op::HeadLoss,
    model::{BertSpec, Gpt2Spec, ModelSpec},
    nn::Prediction,
    objective::Batch,
};

use super::{pass::Pass, sequence::Head};

/// Where the norm of half a block is.
#[derive(Clone, Copy)]
enum Order {
    /// x + f(norm(x)).
    Pre,
    /// norm(x + f(x)).
    Post,
}

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
    words: &'static str,
    positions: Positions,
    segments: Option<&'static str>,
    /// The norm of the embedding.
    embedded: Option<&'static str>,
    block: &'static str,
    /// The norm, the first and the second linear layer of both halves of a block.
    halves: [[&'static str; 3]; 2],
    /// The norm after the blocks.
    last: Option<&'static str>,
    /// Of the head: a linear layer, a norm after an activation, and a bias of the logits.
    head: [Option<&'static str>; 3],
    /// Of the head of a fine-tuned model: the outputs and the pooler.
    tuned: (&'static str, Option<&'static str>),
}

const GPT2: Architecture = Architecture {
    order: Order::Pre,
    mask: AttentionMask::Causal,
    epsilon: 1e-5,
    words: "wte.weight",
    positions: Positions::Learned("wpe.weight"),
    segments: None,
    embedded: None,
    block: "h",
    halves: [["ln_1", "attn.c_attn", "attn.c_proj"], ["ln_2", "mlp.c_fc", "mlp.c_proj"]],
    last: Some("ln_f"),
    head: [None; 3],
    tuned: ("score", None),
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
    halves: [
        ["attention.output.LayerNorm", "attention.self.qkv", "attention.output.dense"],
        ["output.LayerNorm", "intermediate.dense", "output.dense"],
    ],
    last: None,
    head: [
        Some("cls.predictions.transform.dense"),
        Some("cls.predictions.transform.LayerNorm"),
        Some("cls.predictions.bias"),
    ],
    tuned: ("classifier", Some("pooler.dense")),
};

const CRAMMED_BERT: Architecture = Architecture {
    order: Order::Pre,
    words: "embedding.word_embedding.weight",
    positions: Positions::Sinusoidal("embedding.pos_embedding.scale_factor"),
    segments: None,
    embedded: Some("embedding.norm"),
    block: "layers",
    halves: [
        ["norm1", "attn.self_attention.query_key_value", "attn.dense"],
        ["norm2", "ffn.dense_in", "ffn.dense_out"],
    ],
    last: Some("final_norm"),
    head: [Some("prediction_head"), None, None],
    ..BERT
};

struct Model {
    of: Architecture,
    layers: usize,
    heads: usize,
    activation: Activation,
    prediction: Option<Prediction>,
}

/// Half a block: its norm, the input of its first linear layer, and what its function keeps.
struct Half<T> {
    norm: Normed,
    input: Matrix,
    kept: T,
}

/// Attention keeps queries, keys and values, and what it makes of them.
type Attending = Half<([Matrix; 3], Attended)>;
/// The feed-forward keeps both sides of its activation.
type Feeding = Half<[Matrix; 2]>;

/// The pass up to the head.
struct Forward {
    embedded: Option<Normed>,
    blocks: Vec<(Attending, Feeding)>,
    last: Option<Normed>,
    y: Matrix,
}

/// The head of tokens, of the rows with these numbers.
struct Tied {
    rows: Vec<usize>,
    targets: Vec<u32>,
    selected: Matrix,
    z: Option<Matrix>,
    normed: Option<Normed>,
    features: Matrix,
    logits: Matrix,
}

fn sinusoid(position: usize, j: usize, d: usize) -> f64 {
    let pair = 2 * (j / 2);
    let angle = position as f64 * 10000f64.powf(-(pair as f64) / d as f64);
    if j == pair { angle.sin() } else { angle.cos() }
}

impl Model {
    fn of(spec: &ModelSpec) -> Self {
        let (of, (layers, heads), activation, prediction) = match *spec {
            ModelSpec::Gpt2(Gpt2Spec { layers, heads, activation, prediction, .. }) => {
                (GPT2, (layers, heads), activation, prediction)
            }
            ModelSpec::Bert(BertSpec { layers, heads, activation, prediction, .. }) => {
                (BERT, (layers, heads), activation, prediction)
            }
            ModelSpec::CrammedBert(BertSpec { layers, heads, activation, prediction, .. }) => {
                (CRAMMED_BERT, (layers, heads), activation, prediction)
            }
            ref other => panic!("the oracle has no {other:?}"),
        };
        Self { of, layers, heads, activation, prediction }
    }

    fn tuned(&self) -> Option<Head> {
        let ((name, pooler), dropout) = (self.of.tuned, 1 + 3 * self.layers);
        self.prediction.map(|prediction| Head { name, pooler, dropout, prediction })
    }

    /// A parameter of a layer.
    fn named(&self, layer: usize, name: &str) -> String {
        format!("{}.{layer}.{name}", self.of.block)
    }

    /// The lengths of sequences, which causal models do not read.
    fn lengths<'a>(&self, batch: &'a Batch) -> Option<&'a [u32]> {
        (self.of.mask == AttentionMask::Full).then_some(&batch.lengths)
    }

    fn embed(&self, pass: &mut Pass<'_>, batch: &Batch) -> Matrix {
        let sum = match self.of.positions {
            Positions::Learned(name) => pass.embed([self.of.words, name], &batch.tokens),
            Positions::Sinusoidal(name) => {
                let (words, factor) = (&pass.weights[self.of.words], pass.weights[name][[0, 0]]);
                let (length, d) = (pass.batch.sequence_length, words.ncols());
                Matrix::from_shape_fn((batch.tokens.len(), d), |(i, j)| {
                    // Two roundings: of the sinusoid and of the product.
                    let position = factor * sinusoid(i % length, j, d);
                    let position = pass.arithmetic.rounded(position, 2.0, position);
                    let value = words[[batch.tokens[i] as usize, j]] + position;
                    pass.arithmetic.rounded(value, 1.0, value)
                })
            }
        };
        let Some(name) = self.of.segments else { return sum };
        let table = &pass.weights[name];
        let segments =
            Matrix::from_shape_fn(sum.dim(), |(i, j)| table[[batch.segments[i] as usize, j]]);
        pass.plus(&sum, &segments)
    }

    fn half<T>(
        &self,
        pass: &mut Pass<'_>,
        norm: &str,
        x: &Matrix,
        f: impl FnOnce(&mut Pass<'_>, &Matrix) -> (Matrix, T),
    ) -> (Matrix, Half<T>) {
        match self.of.order {
            Order::Pre => {
                let norm = pass.norm(norm, x, self.of.epsilon);
                let (out, kept) = f(pass, &norm.y);
                (pass.plus(x, &out), Half { input: norm.y.clone(), norm, kept })
            }
            Order::Post => {
                let (out, kept) = f(pass, x);
                let sum = pass.plus(x, &out);
                let norm = pass.norm(norm, &sum, self.of.epsilon);
                (norm.y.clone(), Half { input: x.clone(), norm, kept })
            }
        }
    }

    fn half_backward<T>(
        &self,
        pass: &mut Pass<'_>,
        (name, half): (&str, &Half<T>),
        dx: &Matrix,
        gradients: &mut Tensors,
        f: impl FnOnce(&mut Pass<'_>, &Matrix, &mut Tensors) -> Matrix,
    ) -> Matrix {
        match self.of.order {
            Order::Pre => {
                let dy = f(pass, dx, gradients);
                let through = pass.norm_backward(name, &half.norm, &dy, gradients);
                pass.plus(dx, &through)
            }
            Order::Post => {
                let dsum = pass.norm_backward(name, &half.norm, dx, gradients);
                let through = f(pass, &dsum, gradients);
                pass.plus(&dsum, &through)
            }
        }
    }

    fn forward(&self, pass: &mut Pass<'_>, batch: &Batch) -> Forward {
        let mut x = self.embed(pass, batch);
        let embedded = self.of.embedded.map(|name| pass.norm(name, &x, self.of.epsilon));
        x = pass.dropped(0, embedded.as_ref().map_or(x, |normed| normed.y.clone()));
        let mut blocks = Vec::new();
        for layer in 0..self.layers {
            let [attention, ffn] =
                self.of.halves.map(|names| names.map(|name| self.named(layer, name)));
            let (y, attending) = self.half(pass, &attention[0], &x, |pass, y| {
                let qkv = layers::split(&pass.linear(&attention[1], y));
                let heads = (self.heads, self.of.mask);
                let attended = pass
                    .attention(layer, heads, &qkv, self.lengths(batch))
                    .forward(pass.arithmetic);
                let out = pass.linear(&attention[2], &attended.o);
                (pass.dropped(2 + 3 * layer, out), (qkv, attended))
            });
            let (y, feeding) = self.half(pass, &ffn[0], &y, |pass, y| {
                let z = pass.linear(&ffn[1], y);
                let h = layers::activate(pass.arithmetic, self.activation, &z);
                let out = pass.linear(&ffn[2], &h);
                (pass.dropped(3 + 3 * layer, out), [z, h])
            });
            x = y;
            blocks.push((attending, feeding));
        }
        let last = self.of.last.map(|name| pass.norm(name, &x, self.of.epsilon));
        let y = last.as_ref().map_or(x, |normed| normed.y.clone());
        Forward { embedded, blocks, last, y }
    }

    fn tied(&self, pass: &mut Pass<'_>, y: &Matrix, batch: &Batch) -> Tied {
        let rows: Vec<usize> =
            (0..y.nrows()).filter(|&row| batch.targets[row] != HeadLoss::IGNORE).collect();
        let targets = rows.iter().map(|&row| batch.targets[row]).collect();
        let selected = y.select(ndarray::Axis(0), &rows);
        let [dense, norm, bias] = self.of.head;
        let z = dense.map(|name| pass.linear(name, &selected));
        let normed = norm.map(|name| {
            let h =
                layers::activate(pass.arithmetic, self.activation, z.as_ref().expect("a layer"));
            pass.norm(name, &h, self.of.epsilon)
        });
        let features = normed.as_ref().map(|normed| &normed.y).or(z.as_ref());
        let features = features.unwrap_or(&selected).clone();
        let mut logits = pass.logits(self.of.words, &features);
        if let Some(bias) = bias.map(|name| &pass.weights[name]) {
            let bias = Matrix::from_shape_fn(logits.dim(), |(_, j)| bias[[0, j]]);
            logits = pass.plus(&logits, &bias);
        }
        Tied { rows, targets, selected, z, normed, features, logits }
    }

    /// The loss, dY, and the gradient of the tied table.
    fn tied_backward(
        &self,
        pass: &mut Pass<'_>,
        (y, batch): (&Matrix, &Batch),
        scale: f64,
        gradients: &mut Tensors,
    ) -> (f64, Matrix, Matrix) {
        let Tied { rows, targets, selected, z, normed, features, logits } =
            self.tied(pass, y, batch);
        let of_head = (&features, &logits);
        let (sum, mut d, dhead, dlogits) =
            pass.head_backward(self.of.words, of_head, &targets, scale);
        let [dense, norm, bias] = self.of.head;
        if let Some(name) = bias {
            let dbias = pass.arithmetic.column_sums(&dlogits);
            pass.accumulate(gradients, name, dbias);
        }
        if let (Some(name), Some(normed), Some(z)) = (norm, &normed, &z) {
            let dh = pass.norm_backward(name, normed, &d, gradients);
            d = layers::activate_backward(pass.arithmetic, self.activation, z, &dh);
        }
        if let Some(name) = dense {
            d = pass.linear_backward(name, &selected, &d, gradients);
        }
        let mut dy = Matrix::zeros(y.dim());
        for (&row, d) in rows.iter().zip(d.rows()) {
            dy.row_mut(row).assign(&d);
        }
        (sum, dy, dhead)
    }
}

/// The sum of the targets' losses.
pub(super) fn loss(pass: &mut Pass<'_>, batch: &Batch) -> f64 {
    let model = Model::of(pass.spec);
    let Forward { y, .. } = model.forward(pass, batch);
    if let Some(head) = model.tuned() {
        return head.loss(pass, &y, batch);
    }
    let Tied { logits, targets, .. } = model.tied(pass, &y, batch);
    layers::loss(pass.arithmetic, &logits, &targets, 0.0, 0.0).0
}

/// The same, with gradients.
pub(super) fn train(
    pass: &mut Pass<'_>,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let model = Model::of(pass.spec);
    let Forward { embedded, blocks, last, y } = model.forward(pass, batch);
    let (sum, mut dx, dhead) = match model.tuned() {
        Some(head) => {
            let (sum, dy) = head.train(pass, &y, batch, scale, gradients);
            (sum, dy, None)
        }
        None => {
            let (sum, dy, dhead) = model.tied_backward(pass, (&y, batch), scale, gradients);
            (sum, dy, Some(dhead))
        }
    };
    if let (Some(name), Some(last)) = (model.of.last, &last) {
        dx = pass.norm_backward(name, last, &dx, gradients);
    }
    for (layer, (attending, feeding)) in blocks.iter().enumerate().rev() {
        let [attention, ffn] =
            model.of.halves.map(|names| names.map(|name| model.named(layer, name)));
        let of_ffn = (&*ffn[0], feeding);
        dx = model.half_backward(pass, of_ffn, &dx, gradients, |pass, dx, gradients| {
            let [z, h] = &feeding.kept;
            let ddown = pass.dropped(3 + 3 * layer, dx.clone());
            let dh = pass.linear_backward(&ffn[2], h, &ddown, gradients);
            let dz = layers::activate_backward(pass.arithmetic, model.activation, z, &dh);
            pass.linear_backward(&ffn[1], &feeding.input, &dz, gradients)
        });
        let of_attention = (&*attention[0], attending);
        dx = model.half_backward(pass, of_attention, &dx, gradients, |pass, dx, gradients| {
            let (qkv, attended) = &attending.kept;
            let dout = pass.dropped(2 + 3 * layer, dx.clone());
            let d_o = pass.linear_backward(&attention[2], &attended.o, &dout, gradients);
            let heads = (model.heads, model.of.mask);
            let attends = pass.attention(layer, heads, qkv, model.lengths(batch));
            let dqkv = layers::join(&attends.backward(pass.arithmetic, attended, &d_o));
            pass.linear_backward(&attention[1], &attending.input, &dqkv, gradients)
        });
    }
    dx = pass.dropped(0, dx);
    if let (Some(name), Some(embedded)) = (model.of.embedded, &embedded) {
        dx = pass.norm_backward(name, embedded, &dx, gradients);
    }
    let (words, length) = (model.of.words, pass.batch.sequence_length);
    let dwords = pass.table_backward(words, |i| batch.tokens[i] as usize, &dx);
    let of_table = dhead.map_or_else(|| dwords.clone(), |dhead| pass.plus(&dhead, &dwords));
    pass.accumulate(gradients, words, of_table);
    match model.of.positions {
        Positions::Learned(name) => {
            let dpositions = pass.table_backward(name, |i| i % length, &dx);
            pass.accumulate(gradients, name, dpositions);
        }
        Positions::Sinusoidal(name) => {
            let d = dx.ncols();
            let terms = dx.indexed_iter().map(|((i, j), dx)| dx * sinusoid(i % length, j, d));
            let dfactor = pass.arithmetic.sum(terms);
            pass.accumulate(gradients, name, Matrix::from_elem((1, 1), dfactor));
        }
    }
    if let Some(name) = model.of.segments {
        let dsegments = pass.table_backward(name, |i| batch.segments[i] as usize, &dx);
        pass.accumulate(gradients, name, dsegments);
    }
    sum
}
