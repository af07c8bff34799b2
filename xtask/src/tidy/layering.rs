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
const WGPU: &str = "sparse24-wgpu";
const BACKEND: &str = "sparse24-backend";
const TRAIN: &str = "sparse24-train";
const CONFORMANCE: &str = "sparse24-conformance";
const RUN: &str = "sparse24-run";
const WEB: &str = "sparse24-web";
const LAB: &str = "sparse24-lab";
const COMMAND: &str = "sparse24";

/// Every package of the workspace, from the ground up.
const FLOORS: &[Floor] = &[
    floor(CORE, &[], &[], Some(&["half", "ndarray", "thiserror"])),
    floor(CPU, &[CORE], &[], None),
    floor(CUDA, &[CORE], &[CPU], None),
    floor(WGPU, &[CORE], &[], Some(&["ndarray", "pollster", "thiserror", "wgpu"])),
    floor(BACKEND, &[CORE], &[CPU, CUDA, WGPU], Some(&["half", "ndarray", "rayon", "thiserror"])),
    // Embedding the layers brings no tokenizer, file format, clock or terminal.
    floor(TRAIN, &[CORE, BACKEND], &[], Some(&["libm", "ndarray", "rayon"])),
    floor(CONFORMANCE, &[CORE, BACKEND], &[], Some(&["half", "libm", "ndarray"])),
    floor(RUN, &[CORE, CPU, TRAIN], &[CUDA], None),
    // Its tests compare with the command's runs.
    floor(WEB, &[CORE, TRAIN], &[RUN], None),
    floor(LAB, &[CORE, TRAIN, RUN], &[], None),
    floor(COMMAND, &[CORE, CPU, TRAIN, RUN, LAB], &[CONFORMANCE, CUDA], None),
    floor("sparse24-tests", &[CORE, CPU, CUDA, TRAIN, CONFORMANCE, RUN, LAB, COMMAND], &[], None),
    floor("xtask", &[CUDA], &[], Some(&["base64", "clap", "rayon", "regex", "serde_json"])),
];

/// Every dependency that [`FLOORS`] does not allow, given the output of `cargo metadata --no-deps`.
pub(super) fn check(metadata: &str) -> Result<Vec<Finding>> {
    let metadata: Value = serde_json::from_str(metadata)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata without packages")?;
    let name = |package: &Value| package["name"].as_str().map(str::to_owned);
    let names = packages.iter().map(name).collect::<Option<Vec<String>>>();
    let names = names.ok_or("cargo metadata without a name")?;
    let check = |(name, package): (&String, _)| check_package(name, package, &names);
    Ok(names.iter().zip(packages).flat_map(check).collect())
}

fn check_package(package: &str, metadata: &Value, ours: &[String]) -> Vec<Finding> {
    let path = format!("package {package}");
    let finding = |what, why| Finding::new(&path, 1, what, why);
    let Some(floor) = FLOORS.iter().find(|floor| floor.package == package) else {
        let what = "has no row in FLOORS (xtask/src/tidy/layering.rs)".into();
        return vec![finding(what, "every package has a row")];
    };
    let breaks = |dependency: &Value| {
        let name = dependency["name"].as_str()?;
        // Of no kind: neither for tests nor for a build script.
        let always = dependency["kind"].is_null() && dependency["optional"] != true;
        let what = format!("always depends on {name}");
        if !ours.iter().any(|ours| ours == name) {
            let listed = floor.external.is_none_or(|external| external.contains(&name));
            let why = "its external dependencies are few on purpose";
            return (!listed && always).then(|| finding(what, why));
        }
        if floor.optional.contains(&name) {
            return always.then(|| finding(what, "it must be a feature that can be left out"));
        }
        let why = "dependencies point down only";
        (!floor.ours.contains(&name)).then(|| finding(format!("depends on {name}"), why))
    };
    metadata["dependencies"].as_array().into_iter().flatten().filter_map(breaks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The findings in a workspace where `package` has one dependency and the others have none.
    fn findings(package: &str, dependency: &str) -> Vec<String> {
        let others = FLOORS.iter().map(|floor| floor.package).filter(|&name| name != package);
        let rest: String = others.map(|name| format!(r#", {{"name": "{name}"}}"#)).collect();
        let metadata = format!(
            r#"{{"packages": [{{"name": "{package}", "dependencies": [{dependency}]}}{rest}]}}"#
        );
        check(&metadata).unwrap().into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn dependencies_keep_to_the_table() {
        // The kinds of a dependency in cargo's metadata.
        let [normal, dev, build] = ["null", r#""dev""#, r#""build""#];
        let (up, always) = ("depends on", "always depends on");
        for (from, to, kind, optional, expected) in [
            (CPU, CORE, normal, false, ""),
            (CUDA, CPU, dev, false, ""),
            (CUDA, CPU, normal, true, ""),
            (CUDA, CPU, normal, false, always),
            (TRAIN, RUN, dev, false, up),
            (RUN, LAB, normal, true, up),
            (CPU, CUDA, build, true, up),
            (CORE, "half", normal, false, ""),
            (CORE, "rayon", normal, false, always),
            (CORE, "proptest", dev, false, ""),
            (TRAIN, "serde", normal, true, ""),
            (RUN, "toml", normal, false, ""),
        ] {
            let dependency =
                format!(r#"{{"name": "{to}", "kind": {kind}, "optional": {optional}}}"#);
            let expected: Vec<String> =
                [expected].iter().filter(|e| !e.is_empty()).map(|e| format!("{e} {to}")).collect();
            assert_eq!(findings(from, &dependency), expected, "{from} {dependency}");
        }
        assert_eq!(findings("sparse24-new", "").len(), 1, "a package without a row");
        assert!(check("{}").is_err() && check(r#"{"packages": [{}]}"#).is_err());
    }
}
