//! Version 1 of the format, which stored integers as f32 and counters by name.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{DatasetIdentity, Fingerprint, PhaseEnd, PhaseKind, Values};

/// The values of an auxiliary tensor in the type that they have now.
pub(super) fn typed(name: &str, values: Values) -> Values {
    match values {
        Values::F32(values) if name.starts_with("row_order.") || name.starts_with("flips.") => {
            Values::U32(values.into_iter().map(|x| x as u32).collect())
        }
        Values::F32(values) if name.starts_with("dgrad_mask.") => {
            Values::U16(values.into_iter().map(|x| x as u16).collect())
        }
        values => values,
    }
}

/// `state.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    step: u32,
    total_steps: u32,
    phase: u32,
    phase_kind: PhaseKind,
    seed: u64,
    tokens_seen: u64,
    /// `skipped`, and `phase_end.<index>`; other names were allowed.
    method: BTreeMap<String, u64>,
    plan: BTreeMap<String, String>,
    config: BTreeMap<String, String>,
    dataset: DatasetIdentity,
    tokenizer: Fingerprint,
}

impl From<State> for super::State {
    fn from(state: State) -> Self {
        let end = |(key, &step): (&String, &u64)| {
            let phase = key.strip_prefix("phase_end.")?.parse().ok()?;
            Some(PhaseEnd { phase, step: u32::try_from(step).ok()? })
        };
        let mut phase_ends: Vec<_> = state.method.iter().filter_map(end).collect();
        phase_ends.sort_unstable_by_key(|end| end.phase);
        let skipped = state.method.get("skipped").copied().unwrap_or(0);
        Self {
            step: state.step,
            total_steps: state.total_steps,
            phase: state.phase,
            phase_kind: state.phase_kind,
            seed: state.seed,
            tokens_seen: state.tokens_seen,
            skipped_steps: u32::try_from(skipped).unwrap_or(u32::MAX),
            phase_ends,
            plan: state.plan,
            config: state.config,
            dataset: state.dataset,
            tokenizer: state.tokenizer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_integers_become_typed() {
        let state = serde_json::json!({
            "step": 9, "total_steps": 60, "phase": 2, "phase_kind": "sparse", "seed": 1,
            "tokens_seen": 5, "plan": {}, "config": {},
            "method": { "skipped": 7, "phase_end.1": 8, "phase_end.0": 3, "other": 1 },
            "dataset": { "fingerprint": "0".repeat(64), "training_tokens": 1,
                         "held_out_tokens": 1, "vocabulary": 1 },
            "tokenizer": "0".repeat(64),
        });
        let state: State = serde_json::from_value(state).unwrap();
        let state = super::super::State::from(state);
        assert_eq!(state.skipped_steps, 7);
        let ends: Vec<_> = state.phase_ends.iter().map(|end| (end.phase, end.step)).collect();
        assert_eq!(ends, [(0, 3), (1, 8)]);
        let stored = || Values::F32(vec![0.0, 65_535.0]);
        for (name, expected) in [
            ("flips.w", Values::U32(vec![0, 65_535])),
            ("row_order.w", Values::U32(vec![0, 65_535])),
            ("dgrad_mask.w", Values::U16(vec![0, 65_535])),
            ("scale.w", stored()),
        ] {
            assert_eq!(typed(name, stored()), expected);
        }
    }
}
