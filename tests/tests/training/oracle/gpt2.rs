//! GPT-2 forward and backward: pre-LN blocks, learned positions, a head tied to the token
//! embedding.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Normed},
};
use sparse24_train::{model::Gpt2Spec, objective::Batch};

use super::{pass::Pass, sequence::Head};

const EMBEDDING: [&str; 2] = ["wte.weight", "wpe.weight"];
const EPSILON: f32 = 1e-5;
const MASK: AttentionMask = AttentionMask::Causal;

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
    /// None with a sequence head.
    logits: Option<Matrix>,
}

fn sequence_head(spec: &Gpt2Spec) -> Option<Head> {
    let dropout = 1 + 3 * spec.layers;
    let head = |prediction| Head { name: "score", pooler: None, dropout, prediction };
    spec.prediction.map(head)
}

pub(super) fn loss(pass: &mut Pass<'_>, spec: &Gpt2Spec, batch: &Batch) -> f64 {
    let Forward { normed, logits, .. } = forward(pass, spec, batch);
    match (logits, sequence_head(spec)) {
        (Some(logits), _) => layers::loss(pass.arithmetic, &logits, &batch.targets, 0.0, 0.0).0,
        (None, head) => head.expect("a head").loss(pass, &normed.y, batch),
    }
}

fn forward(pass: &mut Pass<'_>, spec: &Gpt2Spec, batch: &Batch) -> Forward {
    let embedded = pass.embed(EMBEDDING, &batch.tokens);
    let mut x = pass.dropped(0, embedded);
    let mut blocks = Vec::new();
    for layer in 0..spec.layers {
        let of = |part: &str| format!("h.{layer}.{part}");
        let first = pass.norm(&of("ln_1"), &x, EPSILON);
        let qkv = layers::split(&pass.linear(&of("attn.c_attn"), &first.y));
        let attention = pass.attention(layer, (spec.heads, MASK), &qkv, None);
        let attended = attention.forward(pass.arithmetic);
        let out = pass.linear(&of("attn.c_proj"), &attended.o);
        let out = pass.dropped(2 + 3 * layer, out);
        x = pass.plus(&x, &out);
        let second = pass.norm(&of("ln_2"), &x, EPSILON);
        let z = pass.linear(&of("mlp.c_fc"), &second.y);
        let h = layers::activate(pass.arithmetic, spec.activation, &z);
        let out = pass.linear(&of("mlp.c_proj"), &h);
        let out = pass.dropped(3 + 3 * layer, out);
        x = pass.plus(&x, &out);
        blocks.push(Block { norms: [first, second], qkv, attended, z, h });
    }
    let normed = pass.norm("ln_f", &x, EPSILON);
    let is_tied = spec.prediction.is_none();
    let logits = is_tied.then(|| pass.logits(EMBEDDING[0], &normed.y));
    Forward { blocks, normed, logits }
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &Gpt2Spec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let Forward { blocks, normed, logits } = forward(pass, spec, batch);
    let (sum, dy, dhead) = match (logits, sequence_head(spec)) {
        (Some(logits), _) => {
            let of_head = (&normed.y, &logits);
            let (sum, dy, dhead, _) =
                pass.head_backward(EMBEDDING[0], of_head, &batch.targets, scale);
            (sum, dy, Some(dhead))
        }
        (None, head) => {
            let head = head.expect("a head");
            let (sum, dy) = head.train(pass, &normed.y, batch, scale, gradients);
            (sum, dy, None)
        }
    };
    let mut dx = pass.norm_backward("ln_f", &normed, &dy, gradients);
    // Both halves of a block are x + f(LayerNorm(x)).
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let of = |part: &str| format!("h.{layer}.{part}");
        let [first, second] = &kept.norms;
        let ddown = pass.dropped(3 + 3 * layer, dx.clone());
        let dh = pass.linear_backward(&of("mlp.c_proj"), &kept.h, &ddown, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let dy = pass.linear_backward(&of("mlp.c_fc"), &second.y, &dz, gradients);
        let through = pass.norm_backward(&of("ln_2"), second, &dy, gradients);
        dx = pass.plus(&dx, &through);

        let dout = pass.dropped(2 + 3 * layer, dx.clone());
        let d_o = pass.linear_backward(&of("attn.c_proj"), &kept.attended.o, &dout, gradients);
        let attention = pass.attention(layer, (spec.heads, MASK), &kept.qkv, None);
        let dqkv = layers::join(&attention.backward(pass.arithmetic, &kept.attended, &d_o));
        let dy = pass.linear_backward(&of("attn.c_attn"), &first.y, &dqkv, gradients);
        let through = pass.norm_backward(&of("ln_1"), first, &dy, gradients);
        dx = pass.plus(&dx, &through);
    }
    let dx = pass.dropped(0, dx);
    let [of_tokens, of_positions] = pass.embed_backward(EMBEDDING, &batch.tokens, &dx);
    let of_table = dhead.map_or_else(|| of_tokens.clone(), |dhead| pass.plus(&dhead, &of_tokens));
    pass.accumulate(gradients, EMBEDDING[0], of_table);
    pass.accumulate(gradients, EMBEDDING[1], of_positions);
    sum
}
