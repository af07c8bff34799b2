//! Things that are not the regular file that a loader expects: nothing, a folder, a link to nothing
//! or to itself, a pipe without a writer, a device without an end, a hole larger than any memory.
//! Each is refused by name, and none is waited for.

use std::{fs, path::Path};

use super::loaders::LOADERS;

const ROOT: &str = "/dev/shm";

/// Every loader refuses what `make` puts in the place of its file, and names it.
fn refused(what: &str, make: impl Fn(&Path)) {
    for (loader, name, load) in LOADERS {
        let folder = tempfile::tempdir_in(ROOT).or_else(|_| tempfile::tempdir()).unwrap();
        let path = folder.path().join(name);
        make(&path);
        let Err(error) = load(&path) else {
            // A run may have no metrics yet.
            let is_empty = loader == "MetricsLog::resume" && what.ends_with("nothing")
                || ["Config::resolve", "MetricsLog::steps", "Shard::open"].contains(&loader)
                    && what.ends_with("hold nothing");
            // Of raw ids only the size can be wrong, and they are read when they are needed.
            let is_unread = loader == "Shard::open" && what == "a hole";
            assert!(is_empty || is_unread, "{loader} accepts {what}");
            continue;
        };
        let message = error.to_string();
        let folder = folder.path().file_name().unwrap().to_str().unwrap();
        let is_named = message.contains(name) || message.contains(folder);
        assert!(is_named, "{loader}, {what}: {message}");
    }
}

#[test]
fn nothing_and_folders() {
    refused("nothing", |_| {});
    refused("a folder", |path| fs::create_dir(path).unwrap());
}

#[cfg(unix)]
#[test]
fn links_devices_and_pipes() {
    use std::{os::unix::fs::symlink, process::Command};
    refused("a link to nothing", |path| symlink("nowhere", path).unwrap());
    refused("a link to itself", |path| symlink(path, path).unwrap());
    for device in ["/dev/zero", "/dev/null"] {
        refused(device, |path| symlink(device, path).unwrap());
    }
    #[cfg(target_os = "linux")]
    refused("an endless file that claims to hold nothing", |path| {
        symlink("/proc/self/pagemap", path).unwrap();
    });
    refused("a pipe", |path| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    });
}

/// A sparse file of more bytes than a process can address; only its beginning takes memory.
#[cfg(target_os = "linux")]
#[test]
fn holes() {
    use super::loaders::MODEL;
    use sparse24_run::interchange::{FORMATS, import};

    const SIZE: u64 = 1 << 47;
    let stretch =
        |path: &Path| fs::File::options().append(true).create(true).open(path)?.set_len(SIZE);
    let folder = tempfile::tempdir_in(ROOT).ok();
    let Some(folder) = folder.filter(|folder| stretch(&folder.path().join("any")).is_ok()) else {
        return println!("skipped: {ROOT} cannot hold a file of 128 TiB");
    };
    refused("a hole", |path| stretch(path).unwrap());
    let path = folder.path().join(MODEL);
    let header = |data: u64| {
        let shape = data / 4;
        format!(r#"{{"w":{{"dtype":"F32","shape":[{shape},1],"data_offsets":[0,{data}]}}}}"#)
    };
    let data = SIZE - 8 - header(SIZE).len() as u64;
    let length = header(data).len() as u64;
    fs::write(&path, [&length.to_le_bytes(), header(data).as_bytes()].concat()).unwrap();
    stretch(&path).unwrap();
    let wanted = [("w".to_owned(), vec![data as usize / 4, 1])];
    let error = import(&path, &FORMATS[0], &wanted).unwrap_err();
    assert!(error.to_string().contains(MODEL), "{error}");
}
