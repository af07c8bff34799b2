//! The curves of one run, read from its `metrics.jsonl`: one object a step. A step that was run
//! again after a resume counts as last written. Fields that no curve needs are not looked at.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use crate::Result;

/// Points are (step, value).
pub(super) struct Run {
    /// The name of the run directory.
    pub(super) name: String,
    pub(super) loss: Vec<(f64, f64)>,
    pub(super) validation: Vec<(f64, f64)>,
    pub(super) flip_rate: Vec<(f64, f64)>,
    /// The last sparse step, if a dense one follows.
    pub(super) switch: Option<f64>,
}

impl Run {
    /// Reads `directory/metrics.jsonl`; an error names the line.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let file = directory.join("metrics.jsonl");
        let text =
            fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut steps = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let at = |what: &str| format!("{}:{number}: {what}", file.display());
            let line: Value = serde_json::from_str(line).map_err(|error| at(&error.to_string()))?;
            let step = line["step"].as_u64().ok_or_else(|| at("no step"))?;
            line["loss"].as_f64().ok_or_else(|| at("no loss"))?;
            line["phase"].as_str().ok_or_else(|| at("no phase"))?;
            steps.insert(step, line);
        }
        if steps.is_empty() {
            return Err(format!("{}: no step", file.display()).into());
        }
        let curve = |field: &str| {
            steps
                .iter()
                .filter_map(|(&step, line)| Some((step as f64, line[field].as_f64()?)))
                .collect()
        };
        let phases = steps.iter().zip(steps.values().skip(1));
        let mut switches =
            phases.filter(|((_, now), next)| now["phase"] == "sparse" && next["phase"] == "dense");
        Ok(Self {
            name: directory
                .file_name()
                .unwrap_or(directory.as_os_str())
                .to_string_lossy()
                .into_owned(),
            loss: curve("loss"),
            validation: curve("val_loss"),
            flip_rate: curve("flip_rate"),
            switch: switches.next().map(|((&step, _), _)| step as f64),
        })
    }
}
