//! The files of every version of the format: they load for ever, and this build writes those of its
//! own version to the byte.

use super::*;

fn golden(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("../../tests/golden/checkpoint-v{version}/step-00000003"))
}

#[test]
fn every_version_loads() {
    for version in 1..=FORMAT_VERSION {
        assert_eq!(load(&golden(version)).unwrap(), sample(3), "version {version}");
    }
}

/// Where a new version has no files yet, they are written, to be looked at and committed.
#[test]
fn this_version_is_written_to_the_byte() {
    let (_directory, path) = saved(3);
    let golden = golden(FORMAT_VERSION);
    if !golden.exists() {
        fs::create_dir_all(&golden).unwrap();
        for name in FILES {
            fs::copy(path.join(name), golden.join(name)).unwrap();
        }
        panic!(
            "version {FORMAT_VERSION} has no golden files; they were written to {}",
            golden.display()
        );
    }
    for name in FILES {
        assert!(
            fs::read(path.join(name)).unwrap() == fs::read(golden.join(name)).unwrap(),
            "{name} is not what version {FORMAT_VERSION} is"
        );
    }
}
