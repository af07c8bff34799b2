//! Parameters: a weight with its gradient and moments, how it begins, and whether a mask prunes it.

use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::ParallelSliceMut,
};
use sparse24_core::philox::{Purpose, Site, Stream, uniform};

use crate::{
    Error,
    backend::{Backend, DType, MaskId, OptimizerEntry, Region, Tensor, Weight24},
    method::PrunedOperands,
};

/// How a parameter begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// This value everywhere.
    Constant(f32),
}

/// A trainable matrix; vectors are `[1, n]`.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Its name in checkpoints.
    pub name: String,
    /// How it begins.
    pub init: Init,
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
    /// Adam's m.
    pub first_moment: Tensor,
    /// Adam's v.
    pub second_moment: Tensor,
    /// Whether it may be pruned.
    pub sparsity: Sparsity,
}

/// Whether a parameter may be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sparsity {
    /// It may not.
    Dense,
    /// It may; by this method it is, with these operands, or in no phase.
    Sparsifiable(Option<Pruned>),
}

/// A pruned weight on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pruned {
    /// The mask of the forward.
    pub mask: MaskId,
    /// What the forward multiplies by.
    pub weight: Weight24,
    /// The mask of dgrad and what that multiplies by, where they are others.
    pub dgrad: Option<(MaskId, Weight24)>,
}

impl Parameter {
    /// What pruning takes, where the method prunes it.
    #[must_use]
    pub fn pruned(&self) -> Option<Pruned> {
        match self.sparsity {
            Sparsity::Sparsifiable(pruned) => pruned,
            Sparsity::Dense => None,
        }
    }

    /// Whether it may be pruned, by this method or another.
    #[must_use]
    pub fn is_sparsifiable(&self) -> bool {
        self.sparsity != Sparsity::Dense
    }
}

/// What layers keep of a parameter.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
}

/// All parameters of a model, in the order of their making.
#[derive(Debug, Default)]
pub struct Parameters(Vec<Parameter>);

impl Parameters {
    /// Allocates a parameter with gradient and moments.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`].
    pub fn add(
        &mut self,
        backend: &mut dyn Backend,
        name: String,
        shape: [usize; 2],
        init: Init,
    ) -> Result<Handle, Error> {
        let mut alloc =
            |what: &str, region| backend.alloc(&format!("{name}{what}"), shape, DType::F32, region);
        let parameter = Parameter {
            weight: alloc("", Region::Parameters)?,
            gradient: alloc(" gradient", Region::Gradients)?,
            first_moment: alloc(" first moment", Region::Moments)?,
            second_moment: alloc(" second moment", Region::Moments)?,
            init,
            sparsity: Sparsity::Dense,
            name,
        };
        let handle = Handle { weight: parameter.weight, gradient: parameter.gradient };
        self.0.push(parameter);
        Ok(handle)
    }

    /// Makes the parameter made last sparsifiable, with room for what a method multiplies by.
    ///
    /// # Errors
    /// Those of the allocations; a shape that is not made of 4x4 tiles cannot be sparse.
    ///
    /// # Panics
    /// If there is no parameter.
    pub fn prune_last(
        &mut self,
        backend: &mut dyn Backend,
        operands: PrunedOperands,
    ) -> Result<Option<Pruned>, Error> {
        let last = self.0.last_mut().expect("a parameter was made");
        let shape = last.weight.shape;
        let mut room =
            || Ok::<_, Error>((backend.alloc_mask(shape)?, backend.alloc_weight24(shape)?));
        let pruned = match operands {
            PrunedOperands::None => None,
            PrunedOperands::One => Some((room()?, None)),
            PrunedOperands::Two => Some((room()?, Some(room()?))),
        };
        let pruned = pruned.map(|((mask, weight), dgrad)| Pruned { mask, weight, dgrad });
        last.sparsity = Sparsity::Sparsifiable(pruned);
        Ok(pruned)
    }

    /// The number of the parameter made last, from 0 in the order of making: what tells its random
    /// streams apart.
    ///
    /// # Panics
    /// If there is no parameter.
    #[must_use]
    pub fn last_number(&self) -> u32 {
        self.0.len().checked_sub(1).expect("a parameter was made") as u32
    }

    /// All of them.
    pub fn iter(&self) -> core::slice::Iter<'_, Parameter> {
        self.0.iter()
    }

    /// The optimizer's table; weight decay applies to matrices only. Masks stand in it when
    /// `masked`.
    #[must_use]
    pub fn optimizer_table(&self, weight_decay: f32, masked: Masked) -> Vec<OptimizerEntry> {
        self.0
            .iter()
            .map(|parameter| OptimizerEntry {
                weight: parameter.weight,
                gradient: parameter.gradient,
                first_moment: parameter.first_moment,
                second_moment: parameter.second_moment,
                weight_decay: if parameter.weight.shape[0] > 1 { weight_decay } else { 0.0 },
                mask: parameter
                    .pruned()
                    .map(|pruned| pruned.mask)
                    .filter(|_| masked == Masked::Decayed),
            })
            .collect()
    }

    /// Sets every weight to its initial value, a function of the seed and the order of making.
    ///
    /// # Errors
    /// Those of [`Backend::upload`].
    pub fn initialise(&self, backend: &mut dyn Backend, seed: u64) -> Result<(), Error> {
        for (number, parameter) in self.0.iter().enumerate() {
            let elements = parameter.weight.elements();
            let values = match parameter.init {
                Init::Constant(value) => vec![value; elements],
                Init::Normal(deviation) => {
                    let stream =
                        Stream::new(seed, Site::new(Purpose::Initialisation, number as u32), 0, 0);
                    let mut values = vec![0.0; elements];
                    values.par_chunks_mut(4).enumerate().with_min_len(1024).for_each(
                        |(call, four)| {
                            four.iter_mut()
                                .zip(normals(stream.words(call as u32)))
                                .for_each(|(value, z)| *value = z * deviation);
                        },
                    );
                    values
                }
            };
            backend.upload(parameter.weight, &values)?;
        }
        Ok(())
    }
}

/// Whether pruned weights decay in the phase at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masked {
    /// Masked decay applies.
    Decayed,
    /// Weights are dense.
    Untouched,
}

/// Four standard normals of four words, by Box and Muller: sqrt(-2 ln u) times cos and sin of 2 pi
/// v, with u = 1 - uniform in (0, 1].
fn normals(words: [u32; 4]) -> [f32; 4] {
    let [a, b, c, d] = words.map(|word| f64::from(uniform(word)));
    let pair = |u: f64, v: f64| {
        let (radius, angle) =
            (libm::sqrt(-2.0 * libm::log(1.0 - u)), 2.0 * core::f64::consts::PI * v);
        [(radius * libm::cos(angle)) as f32, (radius * libm::sin(angle)) as f32]
    };
    let ([w, x], [y, z]) = (pair(a, b), pair(c, d));
    [w, x, y, z]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_unit_variance_and_no_mean() {
        let stream = Stream::new(7, Site::new(Purpose::Initialisation, 0), 0, 0);
        let samples: Vec<f64> =
            (0..25_000).flat_map(|call| normals(stream.words(call))).map(f64::from).collect();
        let n = samples.len() as f64;
        let mean = samples.iter().sum::<f64>() / n;
        let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        // Five standard errors: 1/sqrt(n) of the mean, sqrt(2/n) of the variance.
        assert!(mean.abs() <= 5.0 / n.sqrt(), "mean {mean}");
        assert!((variance - 1.0).abs() <= 5.0 * (2.0 / n).sqrt(), "variance {variance}");
    }
}
