//! Images as sequences: a class token and one token per patch, with learned positions.

use super::{
    Pass,
    builder::Builder,
    embedding::{Embedding, Sharing},
    linear24::{Linear24, LinearSpec},
    parameter::{Bias, Init, Sparsity},
};
use crate::{
    Result,
    backend::{
        Backend, DType, Region, Tensor,
        op::{GatherRows, HeadLoss, ScatterRows},
    },
};

/// Tokens of images cut into patches.
///
/// ```text
/// x = 0 + class + P[0]              the class token, the first of each sequence
/// x = patch W^T + b + P[position]   the others
/// ```
///
/// The class token and b are the rows of one table, which is looked up by the kind of a token.
#[derive(Debug)]
pub struct PatchEmbedding {
    projection: Linear24,
    kinds_and_positions: Embedding,
    /// Pixels `[size * patches, 3 patch_size^2]`, and their projection or its gradient.
    pixels: Tensor,
    projected: Tensor,
    /// For each token its kind, and the row of `projected` that it adds: none for a class token.
    kinds: Tensor,
    rows: Tensor,
    patches: usize,
}

/// How images are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patches {
    /// Patches per image.
    pub count: usize,
    /// Pixels of a patch, in three channels each.
    pub pixels: usize,
}

/// Names of the projection, of the table of class token and bias, and of the positions.
const NAMES: [&str; 3] = ["patch_embed.proj", "kind_embed", "pos_embed"];

impl PatchEmbedding {
    /// Allocates the parameters. The projection starts with the variance of PyTorch's convolutions,
    /// the tables as given.
    pub fn new(
        builder: &mut Builder<'_>,
        Patches { count: patches, pixels }: Patches,
        d_model: usize,
        init: Init,
    ) -> Result<Self> {
        let columns = pixels.saturating_mul(3);
        let projection = LinearSpec {
            name: NAMES[0].to_owned(),
            shape: [d_model, columns],
            init: Init::Normal((3.0 * columns as f32).sqrt().recip()),
            bias: Bias::Absent,
            sparsity: Sparsity::Dense,
        };
        let projection = Linear24::new(builder, projection)?;
        let [_, kinds, positions] = NAMES;
        let positions = Some((positions, patches + 1));
        let kinds_and_positions = Embedding::new(builder, (kinds, 2), positions, d_model, init)?;
        let (n, p) = (builder.batch().size * patches, builder.batch().tokens());
        let mut alloc =
            |name, shape, dtype| builder.tensor(name, shape, dtype, Region::Activations);
        Ok(Self {
            projection,
            kinds_and_positions,
            pixels: alloc("pixels", [n, columns], DType::Activation)?,
            projected: alloc("projected patches", [n, d_model], DType::Activation)?,
            kinds: alloc("kinds", [p, 1], DType::U32)?,
            rows: alloc("patch rows", [p, 1], DType::U32)?,
            patches,
        })
    }

    /// Tokens per image.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.patches + 1
    }

    /// Copies the pixels of this many whole images to the device.
    pub fn upload(&self, backend: &mut dyn Backend, images: usize, pixels: &[f32]) -> Result {
        let tokens = self.tokens();
        let p = images * tokens;
        let row = |token: usize| match token % tokens {
            0 => HeadLoss::IGNORE,
            patch => (token / tokens * self.patches + patch - 1) as u32,
        };
        let kinds: Vec<u32> = (0..p).map(|token| u32::from(token % tokens > 0)).collect();
        backend.upload_ids(self.kinds.first_rows(p), &kinds)?;
        backend.upload_ids(self.rows.first_rows(p), &(0..p).map(row).collect::<Vec<_>>())?;
        backend.upload(self.pixels.first_rows(images * self.patches), pixels)
    }

    /// Two parts whose sum is the tokens: the projected patches in `x`, the rows of the tables in
    /// `delta`.
    pub fn forward(&self, pass: &mut Pass<'_>, x: Tensor, delta: Tensor) -> Result {
        let [pixels, projected] = self.rows_of_patches(pass);
        self.projection.forward(pass, pixels, projected)?;
        pass.run(GatherRows { x: projected, rows: pass.rows(self.rows), out: x })?;
        self.kinds_and_positions.forward(pass, pass.rows(self.kinds), delta)
    }

    /// The gradients of the parameters, for that of the tokens.
    pub fn backward(&self, pass: &mut Pass<'_>, dx: Tensor) -> Result {
        let [pixels, dprojected] = self.rows_of_patches(pass);
        self.kinds_and_positions.backward(pass, pass.rows(self.kinds), dx, Sharing::Alone)?;
        pass.run(ScatterRows { dout: dx, rows: pass.rows(self.rows), dx: dprojected })?;
        self.projection.gradients(pass, pixels, dprojected)
    }

    fn rows_of_patches(&self, pass: &Pass<'_>) -> [Tensor; 2] {
        let n = pass.batch.size * self.patches;
        [self.pixels, self.projected].map(|buffer| buffer.first_rows(n))
    }
}
