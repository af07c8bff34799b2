//! Multi-head self-attention: one projection to q, k, v, softmax attention, one projection back.

use super::{Pass, linear24::Linear24};
use crate::{
    Error,
    backend::{AttentionBackward, AttentionForward, AttentionMask, AttentionShape, Tensor},
};

/// Self-attention of `heads` heads.
#[derive(Debug)]
pub struct Attention {
    /// `[3d, d]`.
    pub qkv: Linear24,
    /// `[d, d]`.
    pub projection: Linear24,
    /// Heads.
    pub heads: usize,
    /// Which keys a query sees.
    pub mask: AttentionMask,
    /// Its place among the model's dropouts.
    pub dropout: u32,
}

/// What attention keeps between forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct AttentionActivations {
    /// `[p, 3d]`.
    pub qkv: Tensor,
    /// `[p, d]`.
    pub o: Tensor,
    /// `[sequences * heads, context]`.
    pub lse: Tensor,
}

impl Attention {
    /// y = attention(x).
    ///
    /// # Errors
    /// Those of the operations.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        kept: AttentionActivations,
        y: Tensor,
    ) -> Result<(), Error> {
        self.qkv.forward(pass, x, kept.qkv, None)?;
        let op = self.operation(pass, kept);
        pass.backend.attention_forward(&op)?;
        self.projection.forward(pass, kept.o, y, None)
    }

    /// The gradients; `d_o` `[p, d]` and `dqkv` `[p, 3d]` are scratch.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        kept: AttentionActivations,
        dy: Tensor,
        [d_o, dqkv]: [Tensor; 2],
        dx: Tensor,
    ) -> Result<(), Error> {
        self.projection.backward(pass, kept.o, dy, d_o, None)?;
        let forward = self.operation(pass, kept);
        pass.backend.attention_backward(&AttentionBackward { forward, d_o, dqkv: thirds(dqkv) })?;
        self.qkv.backward(pass, x, dqkv, dx, None)
    }

    fn operation(&self, pass: &Pass<'_>, kept: AttentionActivations) -> AttentionForward {
        let [q, k, v] = thirds(kept.qkv);
        let shape = AttentionShape {
            batch: pass.sequences,
            heads: self.heads,
            queries: pass.context,
            keys: pass.context,
            mask: self.mask,
        };
        AttentionForward {
            shape,
            q,
            k,
            v,
            dropout: pass.dropout_at(self.dropout),
            o: kept.o,
            lse: kept.lse,
        }
    }
}

fn thirds(qkv: Tensor) -> [Tensor; 3] {
    let d = qkv.shape[1] / 3;
    [0, 1, 2].map(|third| qkv.columns(third * d..(third + 1) * d))
}
