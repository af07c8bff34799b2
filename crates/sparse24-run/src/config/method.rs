//! The section `[method]`: a row of the table of methods, and choices that replace the row's.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use sparse24_core::phase::{Fraction, Refresh};

use super::unknown;
use crate::{Error, Result};
use sparse24_train::{
    method::{
        Method, PRESETS, Phase,
        words::{Choice, DecayPlace, PhaseOperands, PhaseWord},
    },
    optim::AdamVariant,
};

/// The training method. An empty value, or 0, means the row's own choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MethodConfig {
    /// Name of a row of [`PRESETS`].
    pub name: String,
    /// Factor of masked decay, for methods that have it.
    pub lambda: f32,
    /// Steps between mask searches.
    pub refresh: u32,
    /// Where masked decay is applied: [`DecayPlace`].
    #[serde(default)]
    pub decay: String,
    /// Weight operand of the forward in phases that are not dense:
    /// [`sparse24_train::method::WeightOperand`].
    #[serde(default)]
    pub forward: String,
    /// Weight operand of dgrad: [`sparse24_train::method::DgradOperand`].
    #[serde(default)]
    pub dgrad: String,
    /// Gradient operand of wgrad: [`sparse24_train::method::GradientOperand`].
    #[serde(default)]
    pub wgrad: String,
    /// Phases in order: [`PhaseWord`].
    #[serde(default)]
    pub phases: Vec<String>,
    /// The feed-forward width of `half`, as a share of `model.d_ff`: `1/2` costs as much as a 2:4
    /// product at its best, `10/13` as much as one that is 1.3 times as fast as a dense one.
    #[serde(default = "MethodConfig::half")]
    pub d_ff_ratio: String,
}

impl MethodConfig {
    /// A row of the table, unchanged.
    pub(super) fn of(name: &str, lambda: f32) -> Self {
        let [decay, forward, dgrad, wgrad] = [const { String::new() }; 4];
        Self {
            name: name.to_owned(),
            lambda,
            refresh: 0,
            decay,
            forward,
            dgrad,
            wgrad,
            phases: Vec::new(),
            d_ff_ratio: Self::half(),
        }
    }

    fn half() -> String {
        "1/2".to_owned()
    }

    /// The method as a value.
    pub(super) fn value(&self) -> Result<Method> {
        let Self { name, lambda, refresh, decay, forward, dgrad, wgrad, phases, d_ff_ratio } = self;
        let mut method = Method::preset(name, *lambda).ok_or_else(|| {
            unknown("method.name", name, PRESETS.iter().map(|preset| preset.name))
        })?;
        let ratio = narrowed(d_ff_ratio)?;
        if method.width != Fraction::ONE {
            method.width = ratio;
        }
        if let Some(interval) = NonZeroU32::new(*refresh) {
            method.refresh = Refresh::Every(interval);
        }
        let place = chosen::<DecayPlace>("method.decay", decay)?;
        if let Some(place) = place {
            method.decay = place.with(*lambda);
        }
        let mut sparse = method.sparse_phase();
        let (forward, dgrad, wgrad) = (
            chosen("method.forward", forward)?,
            chosen("method.dgrad", dgrad)?,
            chosen("method.wgrad", wgrad)?,
        );
        (sparse.forward, sparse.dgrad, sparse.wgrad) = (
            forward.unwrap_or(sparse.forward),
            dgrad.unwrap_or(sparse.dgrad),
            wgrad.unwrap_or(sparse.wgrad),
        );
        let keys = [
            ("forward", forward.is_some()),
            ("dgrad", dgrad.is_some()),
            ("wgrad", wgrad.is_some()),
        ];
        if !phases.is_empty() {
            method.phases =
                phases.iter().map(|text| phase(text, sparse)).collect::<Result<_, _>>()?;
        } else if let Some((key, _)) = keys.iter().find(|(_, set)| *set)
            && method.phases.iter().all(Phase::is_dense)
        {
            bail!(
                setting = format!("method.{key}"),
                "all phases of {name} are dense; add a sparse one with method.phases = [\"sparse\"]"
            );
        } else {
            for phase in method.phases.iter_mut().filter(|phase| !phase.is_dense()) {
                *phase = Phase { until: phase.until, optimizer: phase.optimizer, ..sparse };
            }
        }
        if place.is_some_and(|place| place != DecayPlace::None)
            && method.phases.iter().all(|phase| phase.mask().is_none())
        {
            bail!(
                setting = "method.decay",
                "needs a phase whose forward is pruned, and {name} has none; leave it empty"
            );
        }
        Ok(method)
    }
}

/// Parses a phase of the list; `sparse` has the operands of those that are not dense.
fn phase(text: &str, sparse: Phase) -> Result<Phase> {
    const KEY: &str = "method.phases";
    let Ok(PhaseWord { operands, optimizer, until }) = text.parse() else {
        let kinds = <(PhaseOperands, AdamVariant)>::WORDS.iter().map(|(word, _)| *word);
        let known = kinds.collect::<Vec<_>>().join(", ");
        bail!(
            setting = KEY,
            "expected one of {known}, and unless it is the last, its end, as in \"sparse:5/6\" \
                or \"dense:settled\", found {text:?}"
        );
    };
    match operands {
        PhaseOperands::Dense => Ok(Phase { until, optimizer, ..Phase::DENSE }),
        PhaseOperands::OfMethod if sparse.is_dense() => Err(Error::setting(
            KEY,
            format!(
                "the method has no sparse operands for {text:?}; set method.forward or method.wgrad"
            ),
        )),
        PhaseOperands::OfMethod => Ok(Phase { until, optimizer, ..sparse }),
    }
}

fn chosen<C: Choice>(key: &str, word: &str) -> Result<Option<C>> {
    if word.is_empty() {
        return Ok(None);
    }
    C::of(word)
        .map(Some)
        .ok_or_else(|| unknown(key, word, C::WORDS.iter().map(|(known, _)| *known)))
}

fn narrowed(ratio: &str) -> Result<Fraction> {
    let fraction: Option<Fraction> =
        ratio.parse().ok().filter(|fraction: &Fraction| fraction.numerator() > 0);
    fraction.ok_or_else(|| {
        Error::setting(
            "method.d_ff_ratio",
            format!(
                "expected a share above 0 and at most 1, as in \"1/2\" or \"0.77\", found {ratio:?}"
            ),
        )
    })
}
