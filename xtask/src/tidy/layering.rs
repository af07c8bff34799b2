//! The layers of the workspace: which package may depend on which. Dependencies point down only.
//! Dev-dependencies count, so that tests cannot use a package that the code may not.

use serde_json::Value;

use super::Finding;
use crate::Result;

type Names = &'static [&'static str];

/// The normal, build and dev-dependencies that a package may have.
struct Floor {
    package: &'static str,
    /// Packages of this workspace.
    ours: Names,
    /// More packages of this workspace, which must be optional unless they are for tests.
    optional: Names,
    /// External packages that every user of the package gets: normal and not optional. `None`: any.
    external: Option<Names>,
}

const fn floor(
    package: &'static str,
    ours: Names,
    optional: Names,
    external: Option<Names>,
) -> Floor {
    Floor { package, ours, optional, external }
}

const CORE: &str = "sparse24-core";
const CPU: &str = "sparse24-cpu";
const CUDA: &str = "sparse24-cuda";
const TRAIN: &str = "sparse24-train";
const RUN: &str = "sparse24-run";
const LAB: &str = "sparse24-lab";
const COMMAND: &str = "sparse24";

/// Every package of the workspace, from the ground up.
const FLOORS: &[Floor] = &[
    floor(CORE, &[], &[], Some(&["half", "ndarray", "thiserror"])),
    floor(CPU, &[CORE], &[], None),
    floor(CUDA, &[CORE], &[CPU], None),
    // Embedding the layers brings no tokenizer, file format, clock or terminal.
    floor(TRAIN, &[CORE], &[CPU, CUDA], Some(&["half", "libm", "ndarray", "rayon", "thiserror"])),
    floor(RUN, &[CORE, CPU, TRAIN], &[CUDA], None),
    floor(LAB, &[CORE, TRAIN, RUN], &[], None),
    floor(COMMAND, &[CORE, CPU, TRAIN, RUN, LAB], &[CUDA], None),
    floor("sparse24-tests", &[CORE, CPU, CUDA, TRAIN, RUN, LAB, COMMAND], &[], None),
    floor("xtask", &[CUDA], &[], Some(&["serde_json"])),
];

/// A package of the workspace, as `cargo metadata` describes it.
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

/// Every dependency that [`FLOORS`] does not allow.
pub(super) fn check(packages: &[Package]) -> Vec<Finding> {
    packages.iter().flat_map(|package| check_one(package, packages)).collect()
}

fn check_one(package: &Package, all: &[Package]) -> Vec<Finding> {
    let path = format!("package {}", package.name);
    let finding = |what, why| Finding::new("layering", &path, 1, what, why);
    let Some(floor) = FLOORS.iter().find(|floor| floor.package == package.name) else {
        let what = "has no row in FLOORS (xtask/src/tidy/layering.rs)".into();
        return vec![finding(what, "every package has a row")];
    };
    let breaks = |dependency: &Dependency| {
        let name = dependency.name.as_str();
        let always = dependency.normal && !dependency.optional;
        let is_ours = all.iter().any(|ours| ours.name == name);
        if is_ours && !floor.ours.contains(&name) && !floor.optional.contains(&name) {
            return Some(finding(format!("depends on {name}"), "dependencies point down only"));
        }
        if is_ours && floor.optional.contains(&name) && always {
            let why = "it must be a feature that can be left out";
            return Some(finding(format!("always depends on {name}"), why));
        }
        let listed = floor.external.is_none_or(|external| external.contains(&name));
        let why = "its external dependencies are few on purpose";
        (!is_ours && !listed && always).then(|| finding(format!("always depends on {name}"), why))
    };
    package.dependencies.iter().filter_map(breaks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The findings in a workspace where `package` has one dependency and the others have none.
    fn findings(package: &str, dependency: &str) -> Vec<String> {
        let others = FLOORS.iter().map(|floor| floor.package).filter(|&name| name != package);
        let rest: String =
            others.map(|name| format!(r#", {{"name": "{name}", "dependencies": []}}"#)).collect();
        let metadata = format!(
            r#"{{"packages": [{{"name": "{package}", "dependencies": [{dependency}]}}{rest}]}}"#
        );
        check(&packages(&metadata).unwrap()).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn dependencies_keep_to_the_table() {
        // The kinds of a dependency in cargo's metadata.
        let [normal, dev, build] = ["null", r#""dev""#, r#""build""#];
        let up = "depends on";
        let always = "always depends on";
        for (from, to, kind, optional, expected) in [
            (CPU, CORE, normal, false, ""),
            (CUDA, CPU, dev, false, ""),
            (CUDA, CPU, normal, true, ""),
            (CUDA, CPU, normal, false, always),
            (TRAIN, CPU, normal, false, always),
            (TRAIN, CUDA, normal, false, always),
            (TRAIN, RUN, dev, false, up),
            (RUN, CUDA, normal, false, always),
            (RUN, LAB, normal, true, up),
            (LAB, RUN, normal, false, ""),
            (LAB, CUDA, normal, true, up),
            (COMMAND, LAB, normal, false, ""),
            (COMMAND, CUDA, normal, false, always),
            (COMMAND, "xtask", build, false, up),
            (CORE, CPU, normal, true, up),
            (CORE, CPU, dev, true, up),
            (CPU, CUDA, build, true, up),
            (TRAIN, COMMAND, dev, false, up),
            ("sparse24-tests", COMMAND, normal, false, ""),
            ("xtask", CUDA, normal, false, ""),
            ("xtask", CORE, normal, false, up),
            (CORE, "half", normal, false, ""),
            (CORE, "rayon", normal, false, always),
            (CORE, "proptest", dev, false, ""),
            (TRAIN, "serde", normal, true, ""),
            (TRAIN, "toml", normal, false, always),
            (RUN, "toml", normal, false, ""),
        ] {
            let dependency =
                format!(r#"{{"name": "{to}", "kind": {kind}, "optional": {optional}}}"#);
            let expected: Vec<String> =
                [expected].iter().filter(|e| !e.is_empty()).map(|e| format!("{e} {to}")).collect();
            assert_eq!(findings(from, &dependency), expected, "{from} {dependency}");
        }
        assert_eq!(findings("sparse24-new", "").len(), 1, "a package without a row");
    }

    #[test]
    fn unexpected_metadata_is_an_error() {
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
