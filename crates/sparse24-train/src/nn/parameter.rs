//! Parameters: a weight with its gradient and moments, its initialization, and its masks.

use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::ParallelSliceMut,
};
use sparse24_core::philox::{Purpose, Site, Stream, uniform};

use crate::{
    Error, Result,
    backend::{
        Backend, DType, MaskId, OptimizerEntry, Region, Tensor, Weight24, op::Orientation, zeros,
    },
    optim::UpdateRule,
};

/// The initial values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform in `[-bound, bound)`.
    Uniform(f32),
    /// This value everywhere.
    Constant(f32),
}

/// Whether a layer has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// With a bias.
    Present,
    /// Without one.
    Absent,
}

/// Whether masks may prune a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sparsity {
    /// Never.
    Dense,
    /// If the method prunes.
    Sparsifiable,
}

/// The place of a parameter in the model, by which weight decay may leave it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The weight of a linear layer.
    Matrix,
    /// A table whose rows are looked up.
    Embedding,
    /// The gain of a norm, or a learned scale.
    Gain,
    /// A bias, of a norm too.
    Bias,
}

/// The parameters that weight decay leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum NoWeightDecay {
    /// None: all are decayed.
    None,
    /// Biases.
    Biases,
    /// Biases, the gains of norms, and learned scales.
    #[default]
    Vectors,
    /// These, and the tables of tokens, positions and segments.
    VectorsAndEmbeddings,
}

impl NoWeightDecay {
    /// Whether weight decay leaves out parameters of this role.
    #[must_use]
    pub const fn covers(self, role: Role) -> bool {
        match role {
            Role::Matrix => false,
            Role::Embedding => matches!(self, Self::VectorsAndEmbeddings),
            Role::Gain => matches!(self, Self::Vectors | Self::VectorsAndEmbeddings),
            Role::Bias => !matches!(self, Self::None),
        }
    }
}

/// The declaration of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Its name in checkpoints.
    pub name: String,
    /// `[rows, columns]`; vectors are `[1, n]`.
    pub shape: [usize; 2],
    /// Its initial values.
    pub init: Init,
    /// Its place in the model.
    pub role: Role,
    /// Whether masks may prune it.
    pub sparsity: Sparsity,
}

impl ParameterSpec {
    /// A dense matrix.
    #[must_use]
    pub fn matrix(name: impl Into<String>, shape: [usize; 2], init: Init) -> Self {
        let name = name.into();
        Self { name, shape, init, role: Role::Matrix, sparsity: Sparsity::Dense }
    }

    /// A vector of factors that start at `value`.
    #[must_use]
    pub fn gain(name: impl Into<String>, length: usize, value: f32) -> Self {
        let (name, shape, init) = (name.into(), [1, length], Init::Constant(value));
        Self { name, shape, init, role: Role::Gain, sparsity: Sparsity::Dense }
    }

    /// A vector of biases that start at 0.
    #[must_use]
    pub fn bias(name: impl Into<String>, length: usize) -> Self {
        Self { role: Role::Bias, ..Self::gain(name, length, 0.0) }
    }
}

/// A trainable matrix on the device.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Its declaration.
    pub spec: ParameterSpec,
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
    /// m.
    pub first_moment: Tensor,
    /// v, if the update rule has it.
    pub second_moment: Option<Tensor>,
    /// Masks and pruned operands, if the method prunes it.
    pub pruned: Option<Pruned>,
}

/// The masks and pruned operands of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pruned {
    /// The mask of the forward product.
    pub mask: MaskId,
    /// The weight operand of the forward product.
    pub weight: Weight24,
    /// Mask and weight operand of dgrad, where they differ.
    pub dgrad: Option<(MaskId, Weight24)>,
}

impl Parameter {
    /// Whether masks may prune it, by this method or another.
    #[must_use]
    pub fn is_sparsifiable(&self) -> bool {
        self.spec.sparsity == Sparsity::Sparsifiable
    }
}

/// The handles of a parameter that its layer keeps.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
    /// Its number, which addresses its random streams.
    pub number: u32,
    /// Masks and pruned operands, if the method prunes it.
    pub pruned: Option<Pruned>,
}

/// The value of a constant matrix at `[row, column]`, given its number of columns.
pub type ConstantValue = fn([usize; 2], usize) -> f32;

/// All parameters of a model, in the order of declaration, and its constants.
#[derive(Debug, Default)]
pub struct Parameters {
    all: Vec<Parameter>,
    constants: Vec<(Tensor, ConstantValue)>,
}

/// Which rows of the optimizer's table carry masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecayTable {
    /// Pruned parameters: masked decay applies.
    Masked,
    /// None: the phase is dense.
    Dense,
}

impl Parameters {
    /// Allocates a parameter.
    ///
    /// # Errors
    /// Errors of the allocations; a sparsifiable shape must consist of 4x4 tiles.
    pub fn add(
        &mut self,
        backend: &mut dyn Backend,
        spec: ParameterSpec,
        operands: &[Orientation],
        rule: &UpdateRule,
    ) -> Result<Handle> {
        let shape = spec.shape;
        let mut alloc = |what: &str, region| {
            backend.alloc(&format!("{}{what}", spec.name), shape, DType::F32, region)
        };
        let weight = alloc("", Region::Parameters)?;
        let gradient = alloc(" gradient", Region::Gradients)?;
        let first_moment = alloc(" first moment", Region::Moments)?;
        let second_moment =
            rule.adam().map(|_| alloc(" second moment", Region::Moments)).transpose()?;
        let mut operand = |orientation: &Orientation| {
            let mask = backend.alloc_mask(shape)?;
            Ok::<_, Error>((mask, backend.alloc_weight24(shape, *orientation)?))
        };
        let pruned = match (spec.sparsity, operands) {
            (Sparsity::Dense, _) | (_, []) => None,
            (_, [forward, dgrad @ ..]) => {
                Some((operand(forward)?, dgrad.first().map(operand).transpose()?))
            }
        };
        let pruned = pruned.map(|((mask, weight), dgrad)| Pruned { mask, weight, dgrad });
        let number = self.all.len() as u32;
        self.all.push(Parameter { spec, weight, gradient, first_moment, second_moment, pruned });
        Ok(Handle { weight, gradient, number, pruned })
    }

    /// Allocates a tensor of its shape beside each parameter, named after it and `what`.
    ///
    /// # Errors
    /// Errors of the allocations.
    pub(crate) fn beside(
        &self,
        backend: &mut dyn Backend,
        what: &str,
        region: Region,
    ) -> Result<Vec<Tensor>> {
        let alloc = |Parameter { spec, weight, .. }: &Parameter| {
            backend.alloc(&format!("{} {what}", spec.name), weight.shape, DType::F32, region)
        };
        self.iter().map(alloc).collect()
    }

    /// Values that [`Self::initialize`] uploads.
    pub(super) fn add_constant(&mut self, to: Tensor, value: ConstantValue) {
        self.constants.push((to, value));
    }

    /// All parameters, in order.
    pub fn iter(&self) -> core::slice::Iter<'_, Parameter> {
        self.all.iter()
    }

    /// Those that masks may prune, by this method or another.
    pub fn sparsifiable(&self) -> impl Iterator<Item = &Parameter> {
        self.iter().filter(|parameter| parameter.is_sparsifiable())
    }

    /// Those that the method prunes, with their numbers.
    pub fn pruned(&self) -> impl Iterator<Item = (u32, &Parameter, Pruned)> {
        (0..).zip(self.iter()).filter_map(|(number, p)| Some((number, p, p.pruned?)))
    }

    /// The optimizer's table.
    #[must_use]
    pub fn optimizer_table(
        &self,
        weight_decay: f32,
        without: NoWeightDecay,
        masks: DecayTable,
    ) -> Vec<OptimizerEntry> {
        self.iter()
            .map(|parameter| OptimizerEntry {
                weight: parameter.weight,
                gradient: parameter.gradient,
                first_moment: parameter.first_moment,
                second_moment: parameter.second_moment,
                weight_decay: if without.covers(parameter.spec.role) { 0.0 } else { weight_decay },
                mask: match masks {
                    DecayTable::Masked => parameter.pruned.map(|pruned| pruned.mask),
                    DecayTable::Dense => None,
                },
            })
            .collect()
    }

    /// Sets every weight to its initial value, a function of the seed and the order of declaration,
    /// and uploads the constants.
    ///
    /// # Errors
    /// Errors of [`zeros`] and [`crate::backend::Memory::upload`].
    pub fn initialize(&self, backend: &mut dyn Backend, seed: u64) -> Result {
        for (number, Parameter { spec, weight, .. }) in self.all.iter().enumerate() {
            let mut values = zeros(&spec.name, weight.shape, Region::Parameters)?;
            let stream = Stream::new(seed, Site::new(Purpose::Initialization, number as u32), 0, 0);
            match spec.init {
                Init::Constant(value) => values.fill(value),
                Init::Normal(deviation) => {
                    draw(&stream, &mut values, |words| normals(words).map(|z| z * deviation))
                }
                Init::Uniform(bound) => draw(&stream, &mut values, |words| {
                    words.map(|word| bound * (2.0 * uniform(word) - 1.0))
                }),
            }
            backend.upload(*weight, &values)?;
        }
        for &(to, value) in &self.constants {
            let columns = to.shape[1];
            let mut values = zeros("a constant", to.shape, Region::Parameters)?;
            let each = values.iter_mut().enumerate();
            each.for_each(|(at, x)| *x = value([at / columns, at % columns], columns));
            backend.upload(to, &values)?;
        }
        Ok(())
    }
}

/// Sets initial values, four from each call of the stream.
fn draw(stream: &Stream, values: &mut [f32], four_of: impl Fn([u32; 4]) -> [f32; 4] + Sync) {
    let calls = values.par_chunks_mut(4).enumerate().with_min_len(1024);
    calls.for_each(|(call, four)| {
        four.copy_from_slice(&four_of(stream.words(call as u32))[..four.len()]);
    });
}

/// Four standard normals from four words (Box and Muller 1958): sqrt(-2 ln u) times cos and sin of
/// 2 pi v, with u = 1 - uniform in (0, 1].
fn normals(words: [u32; 4]) -> [f32; 4] {
    let [a, b, c, d] = words.map(|word| f64::from(uniform(word)));
    let pair = |u: f64, v: f64| {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - u));
        let angle = 2.0 * core::f64::consts::PI * v;
        [(radius * libm::cos(angle)) as f32, (radius * libm::sin(angle)) as f32]
    };
    let ([w, x], [y, z]) = (pair(a, b), pair(c, d));
    [w, x, y, z]
}
