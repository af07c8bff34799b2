//! Which package may depend on which: an import points down, never up, never sideways.
//! Dev-dependencies count as well, so that tests do not smuggle in what the code may not have. What
//! a dependency is used for is not looked at.

use serde_json::Value;

use super::Finding;
use crate::Result;

/// What one package may depend on.
struct Floor {
    package: &'static str,
    /// Packages of this workspace that it may use.
    may_use: &'static [&'static str],
    /// Those of `may_use` that must be optional.
    only_optional: &'static [&'static str],
    /// Packages of others that everybody who takes it gets (not optional, not for tests or build);
    /// `None`: any.
    others: Option<&'static [&'static str]>,
}

/// The house, from the ground up. A new package gets its row here.
const FLOORS: &[Floor] = &[
    Floor {
        package: "sparse24-core",
        may_use: &[],
        only_optional: &[],
        others: Some(&["half", "ndarray", "thiserror"]),
    },
    Floor {
        package: "sparse24-cpu",
        may_use: &["sparse24-core"],
        only_optional: &[],
        others: None,
    },
    Floor {
        package: "sparse24-cuda",
        may_use: &["sparse24-core", "sparse24-cpu"],
        only_optional: &["sparse24-cpu"],
        others: None,
    },
    Floor {
        package: "sparse24-train",
        may_use: &["sparse24-core", "sparse24-cpu", "sparse24-cuda"],
        only_optional: &["sparse24-cpu", "sparse24-cuda"],
        // No tokenizer, file format, clock or terminal comes along for who embeds the layers.
        others: Some(&["half", "libm", "ndarray", "rayon", "thiserror"]),
    },
    Floor {
        package: "sparse24",
        may_use: &["sparse24-core", "sparse24-cpu", "sparse24-cuda", "sparse24-train"],
        only_optional: &["sparse24-cuda"],
        others: None,
    },
    Floor {
        package: "sparse24-tests",
        may_use: &["sparse24-core", "sparse24-cpu", "sparse24-cuda", "sparse24-train", "sparse24"],
        only_optional: &[],
        others: None,
    },
    Floor {
        package: "xtask",
        may_use: &["sparse24-cuda"],
        only_optional: &[],
        others: Some(&["serde_json"]),
    },
];

/// A package of the workspace, as `cargo metadata` tells it.
pub(super) struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    name: String,
    optional: bool,
    /// Neither for tests nor for a build script.
    normal: bool,
}

/// Reads the output of `cargo metadata --no-deps`.
pub(super) fn packages(metadata: &str) -> Result<Vec<Package>> {
    let metadata: Value = serde_json::from_str(metadata)?;
    let name = |value: &Value| {
        value["name"].as_str().map(str::to_owned).ok_or("cargo metadata without a name")
    };
    let dependency = |value: &Value| {
        Ok(Dependency {
            name: name(value)?,
            optional: value["optional"] == Value::Bool(true),
            normal: value["kind"].is_null(),
        })
    };
    let package = |value: &Value| {
        let dependencies =
            value["dependencies"].as_array().ok_or("cargo metadata without dependencies")?;
        Ok(Package {
            name: name(value)?,
            dependencies: dependencies.iter().map(dependency).collect::<Result<_>>()?,
        })
    };
    metadata["packages"]
        .as_array()
        .ok_or("cargo metadata without packages")?
        .iter()
        .map(package)
        .collect()
}

/// Every edge that points up or sideways, and every package of others that a floor does not admit.
pub(super) fn check(packages: &[Package]) -> Vec<Finding> {
    packages.iter().flat_map(|package| check_one(package, packages)).collect()
}

fn check_one(package: &Package, all: &[Package]) -> Vec<Finding> {
    let finding = |what: String, why| Finding {
        path: format!("package {}", package.name),
        line: 1,
        what,
        why,
    };
    let Some(floor) = FLOORS.iter().find(|floor| floor.package == package.name) else {
        return vec![finding(
            "has no row in FLOORS (xtask/src/tidy/layering.rs)".into(),
            "every package has a floor",
        )];
    };
    let breaks = |dependency: &Dependency| {
        let name = dependency.name.as_str();
        if all.iter().any(|ours| ours.name == name) {
            if !floor.may_use.contains(&name) {
                return Some(finding(
                    format!("depends on {name}"),
                    "an import points down, never up, never sideways",
                ));
            }
            if floor.only_optional.contains(&name) && dependency.normal && !dependency.optional {
                return Some(finding(
                    format!("always takes {name}"),
                    "it must be a feature that can be left out",
                ));
            }
            return None;
        }
        let admitted = floor.others.is_none_or(|others| others.contains(&name));
        (dependency.normal && !dependency.optional && !admitted).then(|| {
            finding(
                format!("always takes {name}"),
                "what comes along with this package is kept small on purpose",
            )
        })
    };
    package.dependencies.iter().filter_map(breaks).collect()
}

#[cfg(test)]
mod tests {
    use super::{FLOORS, check, packages};

    /// What is wrong with a workspace of `package` with the one `dependency`, and of all others
    /// without any.
    fn findings(package: &str, dependency: &str) -> Vec<String> {
        let others = FLOORS.iter().map(|floor| floor.package).filter(|&name| name != package);
        let rest: String =
            others.map(|name| format!(r#", {{"name": "{name}", "dependencies": []}}"#)).collect();
        let metadata = format!(
            r#"{{"packages": [{{"name": "{package}", "dependencies": [{dependency}]}}{rest}]}}"#
        );
        check(&packages(&metadata).unwrap()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn imports_point_down() {
        let allowed = [
            ("sparse24-cpu", "sparse24-core", "null"),
            ("sparse24-cuda", "sparse24-core", "null"),
            ("sparse24-cuda", "sparse24-cpu", r#""dev""#),
            ("sparse24", "sparse24-train", "null"),
            ("sparse24-tests", "sparse24-cpu", "null"),
            ("xtask", "sparse24-cuda", "null"),
        ];
        for (from, to, kind) in allowed {
            let dependency = format!(r#"{{"name": "{to}", "kind": {kind}, "optional": false}}"#);
            assert_eq!(findings(from, &dependency), [""; 0], "{from} -> {to}");
        }
        let refused = [
            ("sparse24-core", "sparse24-cpu"),
            ("sparse24-cpu", "sparse24-cuda"),
            ("sparse24-cpu", "sparse24-train"),
            ("sparse24-cuda", "sparse24-train"),
            ("sparse24-train", "sparse24"),
            ("xtask", "sparse24-core"),
            ("sparse24", "xtask"),
        ];
        for (from, to) in refused {
            for kind in ["null", r#""dev""#, r#""build""#] {
                let dependency = format!(r#"{{"name": "{to}", "kind": {kind}, "optional": true}}"#);
                let wanted = format!(
                    "package {from}:1: depends on {to}, an import points down, never up, never sideways"
                );
                assert_eq!(findings(from, &dependency), [wanted]);
            }
        }
    }

    #[test]
    fn backends_are_optional() {
        let dependency = |name, optional| {
            format!(r#"{{"name": "{name}", "kind": null, "optional": {optional}}}"#)
        };
        for (package, backend) in [
            ("sparse24-train", "sparse24-cpu"),
            ("sparse24-train", "sparse24-cuda"),
            ("sparse24", "sparse24-cuda"),
            ("sparse24-cuda", "sparse24-cpu"),
        ] {
            assert_eq!(findings(package, &dependency(backend, true)), [""; 0]);
            let wanted = format!(
                "package {package}:1: always takes {backend}, it must be a feature that can be left out"
            );
            assert_eq!(findings(package, &dependency(backend, false)), [wanted]);
        }
    }

    #[test]
    fn others_are_admitted_by_name() {
        let dependency = |name, kind, optional| {
            format!(r#"{{"name": "{name}", "kind": {kind}, "optional": {optional}}}"#)
        };
        assert_eq!(findings("sparse24-core", &dependency("half", "null", false)), [""; 0]);
        assert_eq!(findings("sparse24-core", &dependency("proptest", r#""dev""#, false)), [""; 0]);
        assert_eq!(findings("sparse24-train", &dependency("toml", "null", true)), [""; 0]);
        for (package, name) in
            [("sparse24-core", "rayon"), ("sparse24-train", "toml"), ("xtask", "clap")]
        {
            let wanted = format!(
                "package {package}:1: always takes {name}, what comes along with this package is kept small on purpose"
            );
            assert_eq!(findings(package, &dependency(name, "null", false)), [wanted]);
        }
    }

    #[test]
    fn every_package_has_a_floor() {
        let wanted = "package sparse24-new:1: has no row in FLOORS (xtask/src/tidy/layering.rs), every package has a floor";
        assert_eq!(findings("sparse24-new", ""), [wanted]);
    }

    #[test]
    fn metadata_of_another_form_is_an_error() {
        for metadata in [
            "",
            "{}",
            r#"{"packages": [{"name": "x"}]}"#,
            r#"{"packages": [{"dependencies": []}]}"#,
        ] {
            assert!(packages(metadata).is_err(), "{metadata}");
        }
    }
}
