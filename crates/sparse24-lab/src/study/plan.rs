//! A study file: its keys, how it is resolved, and the runs that it describes.
//!
//! ```toml
//! reference = "dense"
//! seeds = [1, 2, 3]
//! [base]
//! preset = "quickstart"
//! [[arms]]
//! name = "dense"
//! method.name = "dense"
//! ```

use std::path::Path;

use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::{Config, read_table, renamed, table_of, unknown},
};
use toml::{Table, Value};

use crate::{
    Result,
    runs::{Identity, Member, Settings, check_name},
    search::check_seeds,
};

/// Changes to a study file from the command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    /// `key=value` settings for the base.
    pub settings: Vec<String>,
    /// The reference arm.
    pub reference: Option<String>,
}

/// A resolved study: the contents of `study.toml` in its folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub(super) reference: String,
    pub(super) seeds: Vec<u64>,
    pub(super) base: Config,
    pub(super) arms: Vec<PlannedArm>,
    /// None before the dataset is opened.
    pub(super) data: Option<DatasetIdentity>,
}

/// An arm: its settings, and the configuration that they resolve to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedArm {
    pub(super) name: String,
    pub(super) settings: Table,
    pub(super) config: Config,
}

const EXPECTED: &str = "a study: a TOML file of reference, seeds, [base] and [[arms]]";
const EXPECTED_ARMS: &str = "at least two of [[arms]], each with a name and settings";
/// The keys of a study file; only a resolved one has `data`.
const KEYS: [&str; 5] = ["reference", "seeds", "base", "arms", "data"];
/// Settings that all arms share.
const SHARED: [&str; 3] = ["seed", "preset", "data"];

impl Plan {
    /// Reads a study file.
    ///
    /// # Errors
    /// [`Error::Setting`] with the file, the arm and the key; [`Error::Io`].
    pub fn read(path: &Path, overrides: &Overrides) -> Result<Self> {
        let plan = read_table(path, EXPECTED).and_then(|table| Self::of_table(table, overrides));
        plan.map_err(|error| inside(&path.display().to_string(), error))
    }

    /// Reads `study.toml` in a study's folder, which an earlier version may have written.
    pub(super) fn read_resolved(path: &Path) -> Result<Self> {
        let inside = |error| inside(&path.display().to_string(), error);
        let mut table = read_table(path, EXPECTED).map_err(inside)?;
        if let Some(Value::Table(base)) = table.get_mut("base")
            && renamed::is_old(base)
        {
            renamed::update(base);
            let arms = table.get_mut("arms").and_then(Value::as_array_mut).into_iter().flatten();
            arms.filter_map(Value::as_table_mut).for_each(renamed::update_settings);
        }
        Self::of_table(table, &Overrides::default()).map_err(inside)
    }

    fn of_table(mut table: Table, overrides: &Overrides) -> Result<Self> {
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(unknown("study", key, KEYS[..4].iter().copied()));
        }
        let data = table.remove("data").map(Value::try_into).transpose();
        let data = data.map_err(|e: toml::de::Error| Error::setting("data", e.message()))?;
        let seeds = match table.remove("seeds") {
            Some(Value::Array(seeds)) => seeds.iter().map(seed).collect::<Result<Vec<_>, _>>()?,
            found => return expected("seeds", "an array of integers such as [1, 2, 3]", found),
        };
        check_seeds(&seeds, 2)?;
        let base = match table.remove("base") {
            None => Table::new(),
            Some(Value::Table(base)) => base,
            found => return expected("base", "a section of settings", found),
        };
        let base = Config::of_base(base, &overrides.settings).map_err(|e| inside("base", e))?;
        base.check_corpus()?;
        let found = match table.remove("arms") {
            Some(Value::Array(found)) => found,
            found => return expected("arms", EXPECTED_ARMS, found),
        };
        let mut arms: Vec<PlannedArm> = Vec::new();
        for (at, arm) in found.into_iter().enumerate() {
            let mut settings = match arm {
                Value::Table(settings) => settings,
                found => return expected("arms", "[[arms]] with a name and settings", Some(found)),
            };
            let name = match settings.remove("name") {
                Some(Value::String(name)) => name,
                found => {
                    return expected(&format!("arms, number {}: name", at + 1), "a name", found);
                }
            };
            check_name("arms", &name)?;
            // Some file systems ignore the case of folder names.
            if arms.iter().any(|other| other.name.eq_ignore_ascii_case(&name)) {
                let problem = format!("{name:?} is listed twice (case is ignored)");
                return Err(Error::setting("arms", problem));
            }
            let key = format!("arms.{name}");
            if let Some(shared) = SHARED.into_iter().find(|shared| settings.contains_key(*shared)) {
                let place = if shared == "seed" { "`seeds` lists it" } else { "set it in [base]" };
                let problem =
                    format!("must be the same for all arms, which are compared on it; {place}");
                return Err(Error::setting(format!("{key}.{shared}"), problem));
            }
            let config = base.with(settings.clone()).map_err(|error| inside(&key, error))?;
            arms.push(PlannedArm { name, settings, config });
        }
        if arms.len() < 2 {
            let problem = format!("expected at least two to compare, found {}", arms.len());
            return Err(Error::setting("arms", problem));
        }
        let reference = match (overrides.reference.clone(), table.remove("reference")) {
            (Some(name), _) | (None, Some(Value::String(name))) => name,
            (None, found) => return expected("reference", "the name of an arm", found),
        };
        if !arms.iter().any(|arm| arm.name == reference) {
            return Err(unknown("reference", &reference, arms.iter().map(|arm| arm.name.as_str())));
        }
        Ok(Self { reference, seeds, base, arms, data })
    }

    /// The document that resolves to this study.
    pub(super) fn to_toml(&self) -> String {
        let arm = |arm: &PlannedArm| {
            let name = [("name".to_owned(), Value::String(arm.name.clone()))];
            Value::Table(name.into_iter().chain(arm.settings.clone()).collect())
        };
        let data = |data| Value::try_from(data).expect("the identity of a dataset is TOML");
        let seed = |&seed: &u64| Value::Integer(i64::try_from(seed).expect("it was checked"));
        let document = [
            ("reference", Some(Value::String(self.reference.clone()))),
            ("seeds", Some(Value::Array(self.seeds.iter().map(seed).collect()))),
            ("data", self.data.map(data)),
            ("base", Some(Value::Table(table_of(&self.base)))),
            ("arms", Some(Value::Array(self.arms.iter().map(arm).collect()))),
        ];
        let pairs = document.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        toml::to_string(&pairs.collect::<Table>()).expect("tables are TOML")
    }

    /// Settings that a restart must not change. The reference affects no run.
    pub(super) fn identity(&self) -> Identity {
        let base = self.base.decisive();
        let mut settings: Settings =
            base.iter().map(|(key, value)| (format!("base {key}"), value.clone())).collect();
        settings.remove("base seed");
        settings.extend(self.data.map(|data| ("data".to_owned(), data.fingerprint.to_string())));
        let arm = |arm: &PlannedArm| {
            // Compared by their effect, so the spelling of a setting does not matter.
            let mut settings = arm.config.decisive();
            settings.retain(|key, value| base.get(key) != Some(value));
            (arm.name.clone(), settings)
        };
        let seeds = self.seeds.iter().copied().collect();
        Identity { settings, arms: self.arms.iter().map(arm).collect(), seeds }
    }

    pub(super) fn reference(&self) -> usize {
        let position = self.arms.iter().position(|arm| arm.name == self.reference);
        position.expect("it was checked that the reference is an arm")
    }

    /// The runs, all arms of a seed before the next seed, so an unfinished study has complete
    /// comparisons.
    pub(super) fn members(&self) -> Vec<Member> {
        let of_seed = |&seed: &u64| {
            let member = move |arm: &PlannedArm| {
                let config = Config { seed, ..arm.config.clone() };
                Member { arm: arm.name.clone(), until: config.steps, config }
            };
            self.arms.iter().map(member)
        };
        self.seeds.iter().flat_map(of_seed).collect()
    }
}

fn seed(value: &Value) -> Result<u64> {
    let seed = value.as_integer().and_then(|seed| u64::try_from(seed).ok());
    seed.ok_or_else(|| {
        Error::setting("seeds", format!("expected integers of at least 0, found {value}"))
    })
}

fn expected<T>(key: &str, what: &str, found: Option<Value>) -> Result<T> {
    let found = found.map_or("nothing".to_owned(), |found| found.to_string());
    Err(Error::setting(key, format!("expected {what}, found {found}")))
}

/// Adds the file or section that a configuration error is in.
fn inside(place: &str, error: Error) -> Error {
    match error {
        Error::Setting { key, problem } => Error::setting(format!("{place}: {key}"), problem),
        other => other,
    }
}
