//! GPT-2 forward and backward: pre-LN blocks, learned positions, a head tied to the token
//! embedding.
//!
//! [`Operands`] are the weight of each product and the output gradient of each weight gradient.

use sparse24_core::op::{AttentionMask, AttentionShape};
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Tensors},
    layers::{self, Address, Attended, Attention, Dropout, Normed},
};
use sparse24_train::{
    model::Gpt2Spec,
    nn::{BatchShape, Bias},
};

/// The operands of the products of a linear layer, by the name of its weight.
pub(crate) trait Operands {
    /// W or S(W) of the forward pass.
    fn forward(&self, name: &str) -> Matrix;
    /// W or S(W) of the input gradient.
    fn dgrad(&self, name: &str) -> Matrix;
    /// dZ `[p, r]`, or its sample.
    fn wgrad(&mut self, a: &mut Arithmetic, address: Address, name: &str, dz: &Matrix) -> Matrix;
}

/// Every product is dense.
pub(crate) struct Dense<'a>(pub(crate) &'a Tensors);

impl Operands for Dense<'_> {
    fn forward(&self, name: &str) -> Matrix {
        self.0[name].clone()
    }

    fn dgrad(&self, name: &str) -> Matrix {
        self.0[name].clone()
    }

    fn wgrad(&mut self, _: &mut Arithmetic, _: Address, _: &str, dz: &Matrix) -> Matrix {
        dz.clone()
    }
}

/// Names and shapes of all parameters, in order of declaration.
pub(crate) fn parameters(spec: &Gpt2Spec) -> Vec<(String, [usize; 2])> {
    let d = spec.d_model;
    let z_columns = spec.d_ff * spec.activation.columns_in();
    let mut all = vec![
        ("wte.weight".to_owned(), [spec.vocabulary, d]),
        ("wpe.weight".to_owned(), [spec.sequence_length, d]),
    ];
    let mut add = |name: String, rows: usize, columns: Option<usize>| {
        all.push((format!("{name}.weight"), columns.map_or([1, rows], |columns| [rows, columns])));
        if spec.bias == Bias::Present {
            all.push((format!("{name}.bias"), [1, rows]));
        }
    };
    for layer in 0..spec.layers {
        add(format!("h.{layer}.ln_1"), d, None);
        add(format!("h.{layer}.attn.c_attn"), 3 * d, Some(d));
        add(format!("h.{layer}.attn.c_proj"), d, Some(d));
        add(format!("h.{layer}.ln_2"), d, None);
        add(format!("h.{layer}.mlp.c_fc"), z_columns, Some(d));
        add(format!("h.{layer}.mlp.c_proj"), d, Some(spec.d_ff));
    }
    add("ln_f".to_owned(), d, None);
    all
}

/// One forward and backward.
pub(crate) struct Pass<'a> {
    pub(crate) arithmetic: &'a mut Arithmetic,
    pub(crate) spec: Gpt2Spec,
    pub(crate) weights: &'a Tensors,
    pub(crate) operands: &'a mut dyn Operands,
    pub(crate) batch: BatchShape,
    pub(crate) dropout: f64,
    pub(crate) address: Address,
}

struct Block {
    norms: [Normed; 2],
    qkv: [Matrix; 3],
    attended: Attended,
    z: Matrix,
    h: Matrix,
}

struct Forward {
    blocks: Vec<Block>,
    normed: Normed,
    logits: Matrix,
}

impl Pass<'_> {
    /// The sum of the tokens' losses.
    pub(crate) fn loss(&mut self, tokens: &[u32], targets: &[u32]) -> f64 {
        let forward = self.forward(tokens);
        layers::loss(self.arithmetic, &forward.logits, targets, 0.0, 0.0).0
    }

    /// The sum of the tokens' losses; the gradients of `scale` times it are added to `gradients`.
    pub(crate) fn train(
        &mut self,
        tokens: &[u32],
        targets: &[u32],
        scale: f64,
        gradients: &mut Tensors,
    ) -> f64 {
        let forward = self.forward(tokens);
        let (sum, dlogits) = layers::loss(self.arithmetic, &forward.logits, targets, 0.0, scale);
        let embedding = &self.weights["wte.weight"];
        let dhead = self.arithmetic.product(&dlogits.t().to_owned(), &forward.normed.y);
        let dy = self.arithmetic.product(&dlogits, embedding);

        let mut dx = self.norm_backward("ln_f", &forward.normed, &dy, gradients);
        for (layer, block) in forward.blocks.iter().enumerate().rev() {
            dx = self.block_backward(layer, block, dx, gradients);
        }
        let dx = Dropout::apply(self.dropout(0), self.arithmetic, dx);
        let d = self.spec.d_model;
        let positions = self.weights["wpe.weight"].nrows();
        let rows_of = |a: &mut Arithmetic, rows: usize, of: &dyn Fn(usize) -> usize| {
            Matrix::from_shape_fn((rows, d), |(row, j)| {
                a.sum((0..tokens.len()).filter(|&i| of(i) == row).map(|i| dx[[i, j]]))
            })
        };
        let of_tokens = rows_of(self.arithmetic, embedding.nrows(), &|i| tokens[i] as usize);
        let of_positions = rows_of(self.arithmetic, positions, &|i| i % self.batch.sequence_length);
        let of_both = self.arithmetic.plus(&dhead, &of_tokens);
        self.arithmetic.accumulate(gradients, "wte.weight", of_both, tokens.len());
        self.arithmetic.accumulate(gradients, "wpe.weight", of_positions, tokens.len());
        sum
    }

    fn forward(&mut self, tokens: &[u32]) -> Forward {
        let [embedding, positions] = ["wte.weight", "wpe.weight"].map(|name| &self.weights[name]);
        let mut x = Matrix::from_shape_fn((tokens.len(), self.spec.d_model), |(i, j)| {
            let value =
                embedding[[tokens[i] as usize, j]] + positions[[i % self.batch.sequence_length, j]];
            self.arithmetic.rounded(value, 1.0, value)
        });
        x = Dropout::apply(self.dropout(0), self.arithmetic, x);
        let mut blocks = Vec::new();
        for layer in 0..self.spec.layers {
            let first = self.norm(&format!("h.{layer}.ln_1"), &x);
            let qkv = layers::split(&self.linear(&format!("h.{layer}.attn.c_attn"), &first.y));
            let attended = self.attention(layer, &qkv).forward(self.arithmetic);
            let out = self.linear(&format!("h.{layer}.attn.c_proj"), &attended.o);
            let out = Dropout::apply(self.dropout(2 + 3 * layer), self.arithmetic, out);
            x = self.arithmetic.plus(&x, &out);
            let second = self.norm(&format!("h.{layer}.ln_2"), &x);
            let z = self.linear(&format!("h.{layer}.mlp.c_fc"), &second.y);
            let h = layers::activate(self.arithmetic, self.spec.activation, &z);
            let out = self.linear(&format!("h.{layer}.mlp.c_proj"), &h);
            let out = Dropout::apply(self.dropout(3 + 3 * layer), self.arithmetic, out);
            x = self.arithmetic.plus(&x, &out);
            blocks.push(Block { norms: [first, second], qkv, attended, z, h });
        }
        let normed = self.norm("ln_f", &x);
        let logits = self.arithmetic.product(&normed.y, &embedding.t().to_owned());
        Forward { blocks, normed, logits }
    }

    /// The gradient of a block's input, given that of its output; both halves are x +
    /// f(LayerNorm(x)).
    fn block_backward(
        &mut self,
        layer: usize,
        kept: &Block,
        dx: Matrix,
        gradients: &mut Tensors,
    ) -> Matrix {
        let [first, second] = &kept.norms;
        let ddown = Dropout::apply(self.dropout(3 + 3 * layer), self.arithmetic, dx.clone());
        let dh = self.linear_backward(&format!("h.{layer}.mlp.c_proj"), &kept.h, &ddown, gradients);
        let dz = layers::activate_backward(self.arithmetic, self.spec.activation, &kept.z, &dh);
        let dy = self.linear_backward(&format!("h.{layer}.mlp.c_fc"), &second.y, &dz, gradients);
        let through = self.norm_backward(&format!("h.{layer}.ln_2"), second, &dy, gradients);
        let dx = self.arithmetic.plus(&dx, &through);

        let dout = Dropout::apply(self.dropout(2 + 3 * layer), self.arithmetic, dx.clone());
        let d_o = self.linear_backward(
            &format!("h.{layer}.attn.c_proj"),
            &kept.attended.o,
            &dout,
            gradients,
        );
        let attention = self.attention(layer, &kept.qkv);
        let dqkv = layers::join(&attention.backward(self.arithmetic, &kept.attended, &d_o));
        let dy =
            self.linear_backward(&format!("h.{layer}.attn.c_attn"), &first.y, &dqkv, gradients);
        let through = self.norm_backward(&format!("h.{layer}.ln_1"), first, &dy, gradients);
        self.arithmetic.plus(&dx, &through)
    }

    fn linear(&mut self, name: &str, x: &Matrix) -> Matrix {
        let w = self.operands.forward(&format!("{name}.weight"));
        layers::linear(self.arithmetic, x, &w, self.weights.get(&format!("{name}.bias")))
    }

    /// dX = dZ W; dW = sample(dZ)^T X; db = column sums of dZ.
    fn linear_backward(
        &mut self,
        name: &str,
        x: &Matrix,
        dz: &Matrix,
        gradients: &mut Tensors,
    ) -> Matrix {
        let [weight, bias] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let sampled = self.operands.wgrad(self.arithmetic, self.address, &weight, dz);
        let dw = self.arithmetic.product(&sampled.t().to_owned(), x);
        self.arithmetic.accumulate(gradients, &weight, dw, x.nrows());
        if self.weights.contains_key(&bias) {
            let db = self.arithmetic.column_sums(dz);
            self.arithmetic.accumulate(gradients, &bias, db, x.nrows());
        }
        self.arithmetic.product(dz, &self.operands.dgrad(&weight))
    }

    fn norm(&mut self, name: &str, x: &Matrix) -> Normed {
        let beta = self.weights.get(&format!("{name}.bias"));
        layers::norm(self.arithmetic, x, &self.weights[&format!("{name}.weight")], beta)
    }

    fn norm_backward(
        &mut self,
        name: &str,
        kept: &Normed,
        dy: &Matrix,
        gradients: &mut Tensors,
    ) -> Matrix {
        let [weight, bias] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let (dx, dgamma, dbeta) =
            layers::norm_backward(self.arithmetic, dy, kept, &self.weights[&weight]);
        self.arithmetic.accumulate(gradients, &weight, dgamma, dy.nrows());
        if self.weights.contains_key(&bias) {
            self.arithmetic.accumulate(gradients, &bias, dbeta, dy.nrows());
        }
        dx
    }

    fn attention<'a>(&self, layer: usize, qkv: &'a [Matrix; 3]) -> Attention<'a> {
        let BatchShape { size: batch, sequence_length: queries } = self.batch;
        let (heads, mask) = (self.spec.heads, AttentionMask::Causal);
        let shape = AttentionShape { batch, heads, queries, keys: queries, mask };
        let dropout = self.dropout(1 + 3 * layer);
        Attention { shape, qkv, lengths: None, dropout, operand_units: 0.0 }
    }

    /// Dropouts are numbered: 0 the embedding; in a block 1 + 3 layer + {0 the probabilities, 1
    /// after the projection, 2 after the feed-forward}.
    fn dropout(&self, number: usize) -> Option<Dropout> {
        (self.dropout > 0.0).then_some(Dropout {
            address: self.address,
            number: number as u32,
            p: self.dropout,
        })
    }
}
