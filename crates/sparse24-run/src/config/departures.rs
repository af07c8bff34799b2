//! What a configuration changes of its preset.
//!
//! Invariant: the preset with these settings is the configuration again. Deliberately absent: what
//! they mean.

use toml::{Table, Value};

use super::{Config, named_preset, table_of};

impl Config {
    /// The settings that are not those of its preset, each as `--set` takes it.
    #[must_use]
    pub fn departures(&self) -> Vec<String> {
        let mut departures = Vec::new();
        let expected =
            named_preset(&self.preset).map(|preset| table_of(&preset)).unwrap_or_default();
        depart(&table_of(self), &expected, "", &mut departures);
        departures
    }
}

/// Appends `key=value` for each value of `found` that `expected` has otherwise.
fn depart(found: &Table, expected: &Table, prefix: &str, to: &mut Vec<String>) {
    for (key, value) in found {
        match (value, expected.get(key)) {
            (Value::Table(found), Some(Value::Table(expected))) => {
                depart(found, expected, &format!("{prefix}{key}."), to)
            }
            (value, expected) if Some(value) == expected => {}
            // Most are of single precision, which has shorter names.
            (&Value::Float(x), _) if f64::from(x as f32).to_bits() == x.to_bits() => {
                to.push(format!("{prefix}{key}={:?}", x as f32))
            }
            (value, _) => to.push(format!("{prefix}{key}={value}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_with_its_departures_is_the_configuration_again() {
        let settings = [
            "steps=7",
            "optimizer.learning_rate=3e-4",
            "data.validation_share=0.25",
            "data.path=\"a b\"",
            "model.bias=true",
            "seed=9",
        ];
        let settings: Vec<String> = settings.map(str::to_owned).into();
        let config = Config::resolve(Some("shakespeare-char"), None, &settings).unwrap();
        let mut departures = config.departures();
        assert_eq!(Config::resolve(Some("shakespeare-char"), None, &departures).unwrap(), config);
        departures.sort();
        let expected = [
            "data.path=\"a b\"",
            "data.validation_share=0.25",
            "model.bias=true",
            "optimizer.learning_rate=0.0003",
            "seed=9",
            "steps=7",
        ];
        assert_eq!(departures, expected);
        assert!(
            Config::resolve(Some("shakespeare-char"), None, &[]).unwrap().departures().is_empty()
        );
    }
}
