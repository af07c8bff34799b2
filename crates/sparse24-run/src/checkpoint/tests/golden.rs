//! Golden files of every version of the format: each loads forever, and this build writes its own
//! version byte by byte.

use super::*;

fn golden(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("../../tests/golden/checkpoint-v{version}/step-00000003"))
}

#[test]
fn every_version_loads() {
    let mut first = sample(3);
    (first.state.skipped_steps, first.state.phase_ends) = (0, Vec::new());
    first.auxiliary = vec![NamedTensor {
        name: "scale".into(),
        shape: vec![3],
        values: Values::F32((0..3).map(|i| (i as f32 - 7.5) * -0.0).collect()),
    }];
    for (version, expected) in [(1, first), (2, sample(3))] {
        let loaded = load(&golden(version)).unwrap();
        assert_eq!(loaded, expected, "version {version}");
        let Values::F32(scale) = &loaded.auxiliary[0].values else { panic!("another type") };
        assert_eq!(scale[0].is_sign_negative(), version == 2, "the sign of zero survives");
    }
}

/// If a new version has no golden files yet, they are written, to be reviewed and committed.
#[test]
fn this_version_is_written_byte_by_byte() {
    let (_directory, path) = saved(3);
    let golden = golden(FORMAT_VERSION);
    if !golden.exists() {
        fs::create_dir_all(&golden).unwrap();
        for name in FILES {
            fs::copy(path.join(name), golden.join(name)).unwrap();
        }
        panic!("version {FORMAT_VERSION} had no golden files: wrote {}", golden.display());
    }
    for name in FILES {
        assert!(
            fs::read(path.join(name)).unwrap() == fs::read(golden.join(name)).unwrap(),
            "{name}"
        );
    }
}
