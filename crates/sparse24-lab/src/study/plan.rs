//! A study file: what it may say, how it is resolved, and the runs that it means.
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

use std::{collections::BTreeMap, path::Path};

use toml::{Table, Value};

use crate::{
    search::check_seeds,
    series::{Member, check_name},
};
use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::{Config, dotted, read_table, renamed, table_of, unknown},
};

/// What a command line changes of a study file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    /// `key=value` settings of the base.
    pub settings: Vec<String>,
    /// The reference arm.
    pub reference: Option<String>,
}

/// A study, resolved: what `study.toml` in its folder holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub(super) reference: String,
    pub(super) seeds: Vec<u64>,
    pub(super) base: Config,
    pub(super) arms: Vec<PlannedArm>,
    /// Once they were read.
    pub(super) data: Option<DatasetIdentity>,
}

/// An arm: its settings, and the configuration that they give.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedArm {
    pub(super) name: String,
    pub(super) settings: Table,
    pub(super) config: Config,
}

/// What is expected of a study's file.
const EXPECTED: &str = "a study: a TOML file of reference, seeds, [base] and [[arms]]";
/// The keys of a study file; `data` is that of a resolved one.
const KEYS: [&str; 5] = ["reference", "seeds", "base", "arms", "data"];
/// What all arms share.
const SHARED: [&str; 3] = ["seed", "preset", "data"];

fn in_file(path: &Path, error: Error) -> Error {
    match error {
        Error::Setting { key, problem } => {
            Error::setting(format!("{}: {key}", path.display()), problem)
        }
        other => other,
    }
}

impl Plan {
    /// Reads a study file.
    ///
    /// # Errors
    /// [`Error::Setting`] names the file, the arm and the key; [`Error::Io`].
    pub fn read(path: &Path, overrides: &Overrides) -> Result<Self, Error> {
        read_table(path, EXPECTED)
            .and_then(|table| Self::of_table(table, overrides))
            .map_err(|error| in_file(path, error))
    }

    /// Reads the resolved study in a study's folder, which an earlier version may have written.
    ///
    /// # Errors
    /// Same as [`Plan::read`].
    pub(super) fn read_resolved(path: &Path) -> Result<Self, Error> {
        let update = |mut table: Table| {
            if let Some(base) = table.get_mut("base").and_then(Value::as_table_mut)
                && renamed::is_old(base)
            {
                renamed::update(base);
                let arms =
                    table.get_mut("arms").and_then(Value::as_array_mut).into_iter().flatten();
                arms.filter_map(Value::as_table_mut).for_each(renamed::update_settings);
            }
            table
        };
        read_table(path, EXPECTED)
            .and_then(|table| Self::of_table(update(table), &Overrides::default()))
            .map_err(|error| in_file(path, error))
    }

    fn of_table(mut table: Table, overrides: &Overrides) -> Result<Self, Error> {
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(unknown("study", key, KEYS[..4].iter().copied()));
        }
        let data = table
            .remove("data")
            .map(Value::try_into)
            .transpose()
            .map_err(|e: toml::de::Error| Error::setting("data", e.message()))?;
        let seeds = match table.remove("seeds") {
            Some(Value::Array(seeds)) => seeds.iter().map(seed).collect::<Result<Vec<_>, _>>()?,
            found => {
                return Err(expected(
                    "seeds",
                    "an array of whole numbers, as [1, 2, 3]",
                    found.as_ref(),
                ));
            }
        };
        check_seeds("seeds", &seeds, 2)?;
        let base = match table.remove("base").unwrap_or_else(|| Value::Table(Table::new())) {
            Value::Table(base) => Config::of_document(base, &overrides.settings)
                .map_err(|error| inside("base", error))?,
            other => return Err(expected("base", "a section of settings", Some(&other))),
        };
        base.check_corpus()?;
        let Some(Value::Array(found)) = table.remove("arms") else {
            return Err(Error::setting(
                "arms",
                "expected at least two, each as [[arms]] with a name and settings",
            ));
        };
        let mut arms: Vec<PlannedArm> = Vec::new();
        for (at, arm) in found.into_iter().enumerate() {
            let Value::Table(mut settings) = arm else {
                return Err(expected("arms", "[[arms]] with a name and settings", Some(&arm)));
            };
            let name = match settings.remove("name") {
                Some(Value::String(name)) => name,
                found => {
                    return Err(expected(
                        &format!("arms, number {}: name", at + 1),
                        "a name",
                        found.as_ref(),
                    ));
                }
            };
            check_name("arms", &name)?;
            // Folders that differ in case alone are one on some systems.
            if let Some(other) = arms.iter().find(|other| other.name.eq_ignore_ascii_case(&name)) {
                let case = if other.name == name { "" } else { ", but for its case" };
                return Err(Error::setting("arms", format!("{name:?} is named twice{case}")));
            }
            let key = format!("arms.{name}");
            if let Some(shared) = SHARED.into_iter().find(|shared| settings.contains_key(*shared)) {
                let place = if shared == "seed" { "`seeds` names it" } else { "set it in [base]" };
                return Err(Error::setting(
                    format!("{key}.{shared}"),
                    format!("is shared by all arms, since they are compared on it; {place}"),
                ));
            }
            let config = base.with(settings.clone()).map_err(|error| inside(&key, error))?;
            arms.push(PlannedArm { name, settings, config });
        }
        if arms.len() < 2 {
            return Err(Error::setting(
                "arms",
                format!("expected at least two, to be compared, found {}", arms.len()),
            ));
        }
        let reference = match (overrides.reference.clone(), table.remove("reference")) {
            (Some(name), _) | (None, Some(Value::String(name))) => name,
            (None, found) => {
                return Err(expected("reference", "the name of an arm", found.as_ref()));
            }
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
        let data =
            self.data.map(|data| Value::try_from(data).expect("a description of data is TOML"));
        let seeds = self
            .seeds
            .iter()
            .map(|&seed| Value::Integer(i64::try_from(seed).expect("it was checked")));
        let document = [
            ("reference", Some(Value::String(self.reference.clone()))),
            ("seeds", Some(Value::Array(seeds.collect()))),
            ("data", data),
            ("base", Some(Value::Table(table_of(&self.base)))),
            ("arms", Some(Value::Array(self.arms.iter().map(arm).collect()))),
        ];
        let document: Table = document
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)))
            .collect();
        toml::to_string(&document).expect("tables are TOML")
    }

    /// What a restart must find again; the reference decides no run.
    pub(super) fn decides(&self) -> BTreeMap<String, String> {
        let mut decides: BTreeMap<_, _> =
            self.seeds.iter().map(|seed| (format!("seeds\u{1}{seed}"), String::new())).collect();
        for arm in &self.arms {
            decides.insert(format!("arms\u{1}{}", arm.name), String::new());
            decides.extend(
                dotted(arm.settings.clone())
                    .into_iter()
                    .map(|(key, value)| (format!("arms\u{1}{}\u{1}{key}", arm.name), value)),
            );
        }
        decides.extend(self.data.map(|data| ("data".to_owned(), data.fingerprint.to_string())));
        let base = self.base.decisive().into_iter().filter(|(key, _)| key != "seed");
        decides.extend(base.map(|(key, value)| (format!("base\u{1}{key}"), value)));
        decides
    }

    /// The runs, all arms of a seed before the next seed, so that an unfinished study has whole
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

fn seed(value: &Value) -> Result<u64, Error> {
    let whole = value.as_integer().and_then(|seed| u64::try_from(seed).ok());
    whole.ok_or_else(|| {
        Error::setting("seeds", format!("expected whole numbers of at least 0, found {value}"))
    })
}

fn expected(key: &str, what: &str, found: Option<&Value>) -> Error {
    let found = found.map_or("nothing".to_owned(), ToString::to_string);
    Error::setting(key, format!("expected {what}, found {found}"))
}

/// The section that an error of a configuration is in.
fn inside(section: &str, error: Error) -> Error {
    match error {
        Error::Setting { key, problem } => Error::setting(format!("{section}: {key}"), problem),
        other => other,
    }
}
