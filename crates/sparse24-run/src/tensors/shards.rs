//! The safetensors files of a model: one, or several with an index, as Hugging Face writes them.
//!
//! Invariant: every file lies in the folder that the user named, and index and files agree on every
//! tensor: none is missing, in another file or in two.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{Entry, TensorFile, container::header_limit};
use crate::{Error, Result, disk};

/// The weights of a folder in one file.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// Ends the name of an index; `model` and this is that of a folder.
const INDEX: &str = ".safetensors.index.json";

/// Longest index of any folder. A longer one may take a sixteenth of its folder, so that memory
/// stays below that of the files.
const INDEX_LIMIT: u64 = 1 << 21;

/// The opened files of a model.
pub(crate) struct Shards {
    /// The path that the user named: a file, a folder or an index.
    pub(crate) path: PathBuf,
    /// By name.
    pub(crate) files: Vec<TensorFile>,
    /// The folder of the files, unless a file was named.
    pub(crate) folder: Option<PathBuf>,
    /// The index, if there is one.
    index: Option<PathBuf>,
}

impl Shards {
    /// Opens a safetensors file, an index, or the `model.safetensors` of a folder or else its
    /// index.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let (is_folder, named) = (path.is_dir(), path.to_owned());
        if !is_folder && !is_index(path) {
            let expected = "a safetensors file, or a folder with a model.safetensors";
            let files = vec![TensorFile::open(path).map_err(|e| e.expecting(expected))?];
            return Ok(Self { path: named, files, folder: None, index: None });
        }
        let folder = Some(if is_folder { path } else { disk::parent(path) }.to_owned());
        let one = path.join(WEIGHTS);
        if is_folder && one.is_file() {
            check_inside(&one)?;
            let files = vec![TensorFile::open(&one)?];
            return Ok(Self { path: named, files, folder, index: None });
        }
        let index = if is_folder { path.join(format!("model{INDEX}")) } else { path.to_owned() };
        if is_folder && !index.is_file() {
            let advice = match path.join("pytorch_model.bin").is_file() {
                true => {
                    "; \"pytorch_model.bin\" is not read: save the weights again as safetensors"
                }
                false => "",
            };
            bail!(path, "holds no {WEIGHTS:?}{advice}");
        }
        if is_folder {
            check_inside(&index)?;
        }
        Ok(Self { path: named, files: read_index(&index)?, folder, index: Some(index) })
    }

    /// Bytes of all files.
    pub(crate) fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size as u64).sum()
    }

    /// The files of the folder that go with the weights, and the names of what does not: folders,
    /// hidden files and other weights.
    pub(crate) fn companions(&self) -> Result<(Vec<PathBuf>, Vec<String>)> {
        const OTHERS: [&str; 11] = [
            "safetensors",
            "bin",
            "pt",
            "pth",
            "ckpt",
            "h5",
            "msgpack",
            "onnx",
            "gguf",
            "npz",
            "ot",
        ];
        let Some(folder) = &self.folder else { return Ok(Default::default()) };
        let (mut found, mut left_out) = (Vec::new(), Vec::new());
        for name in disk::names(folder)? {
            let path = folder.join(&name);
            let is_hidden = name.as_encoded_bytes().starts_with(b".");
            let is_weights = path.extension().is_some_and(|e| OTHERS.iter().any(|o| e == *o))
                || is_index(&path) && self.index.as_ref() != Some(&path);
            if path.is_file() && !is_hidden && !is_weights {
                check_inside(&path)?;
                found.push(path);
            } else if !self.files.iter().any(|file| file.path == path) {
                left_out.push(name.to_string_lossy().into_owned());
            }
        }
        found.sort();
        left_out.sort();
        Ok((found, left_out))
    }
}

fn is_index(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(INDEX.as_bytes())
}

/// Refuses a link out of the folder of a file. In the cache of Hugging Face, all files are links to
/// `blobs` beside `snapshots`.
pub(crate) fn check_inside(path: &Path) -> Result {
    let real = |path: &Path| fs::canonicalize(path).map_err(|e| Error::io("read", path, e));
    let (folder, file) = (real(disk::parent(path))?, real(path)?);
    let cache = folder.parent().filter(|parent| parent.ends_with("snapshots"));
    let blobs = cache.and_then(Path::parent).map(|cache| cache.join("blobs"));
    if file.starts_with(folder) || blobs.is_some_and(|blobs| file.starts_with(blobs)) {
        return Ok(());
    }
    Err(Error::file(path, "is a link out of its folder; put the file itself there"))
}

/// Opens the files that an index names, whose tensors are those that it lists.
fn read_index(index: &Path) -> Result<Vec<TensorFile>> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object with weight_map")]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let (folder, refuse) = (disk::parent(index), |problem| Err(Error::file(index, problem)));
    let sizes = disk::names(folder)?.into_iter().filter_map(|name| {
        Some(fs::metadata(folder.join(name)).ok().filter(|kind| kind.is_file())?.len())
    });
    let text = disk::read_small(index, INDEX_LIMIT.max(sizes.sum::<u64>() / 16))
        .map_err(|e| e.expecting("the index of a model in several files"))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|e| Error::file(index, format!("not an index of safetensors files: {e}")))?;
    let (mut files, mut headers, mut size) = (Vec::new(), 0, 0);
    for name in weight_map.values().collect::<BTreeSet<_>>() {
        let is_name = Path::new(name).file_name().is_some_and(|file| file == name.as_str());
        if !is_name || !name.ends_with(".safetensors") || name.contains(char::is_control) {
            let expected = "expected the name of a .safetensors file in its folder";
            return refuse(format!("places a tensor in {name:?}, {expected}"));
        }
        let path = folder.join(name);
        let missing = "a file that the index of the model names; download it again";
        let file = check_inside(&path).and_then(|()| TensorFile::open(&path));
        let file = file.map_err(|e| e.expecting(missing))?;
        (headers, size) = (headers + file.start as u64, size + file.size as u64);
        if headers > header_limit(size) {
            return refuse("its files have longer headers than their data allow".to_owned());
        }
        files.push((name, file));
    }
    let mut listed: BTreeSet<_> = weight_map.iter().collect();
    for (name, file) in &files {
        for Entry { name: tensor, .. } in &file.entries {
            if !listed.remove(&(tensor, *name)) {
                return refuse(format!(
                    "does not place the tensor `{tensor}` in {name:?}, which holds it"
                ));
            }
        }
    }
    match listed.first() {
        None => Ok(files.into_iter().map(|(_, file)| file).collect()),
        Some((tensor, name)) => {
            refuse(format!("places the tensor `{tensor}` in {name:?}, which does not hold it"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        error::problem,
        tensors::{Layout, header},
    };

    /// A file of these tensors, each four bytes of zeros.
    fn file(names: &[&str]) -> Vec<u8> {
        let layout = |name: &&str| Layout {
            name: (*name).to_owned(),
            dtype: safetensors::Dtype::F32,
            shape: vec![1],
        };
        let mut bytes = header(&[], &names.iter().map(layout).collect::<Vec<_>>());
        bytes.resize(bytes.len() + 4 * names.len(), 0);
        bytes
    }

    /// A folder with two files, and the sound index of them.
    fn model() -> (tempfile::TempDir, Value) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("x.safetensors"), file(&["a", "b"])).unwrap();
        fs::write(folder.path().join("y.safetensors"), file(&["c"])).unwrap();
        let map = json!({ "c": "y.safetensors", "a": "x.safetensors", "b": "x.safetensors" });
        (folder, json!({ "metadata": { "total_size": 12 }, "weight_map": map }))
    }

    fn open(folder: &Path, index: &str) -> Result<Vec<String>> {
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        let names = |file: TensorFile| file.entries.into_iter().map(|entry| entry.name);
        Shards::open(folder).map(|model| model.files.into_iter().flat_map(names).collect())
    }

    #[test]
    fn hostile_indexes_are_refused() {
        let (folder, index) = model();
        let outside = tempfile::tempdir().unwrap();
        let there = outside.path().join("z.safetensors");
        fs::write(&there, file(&["a", "b"])).unwrap();
        assert_eq!(open(folder.path(), &index.to_string()).unwrap(), ["a", "b", "c"]);
        let text = index.to_string();
        let in_file = |name: &str| text.replace("x.safetensors", name);
        let without_c = text.replace(r#","c":"y.safetensors""#, "");
        assert_ne!(without_c, text);
        for (index, expected) in [
            (in_file("../z.safetensors"), "\"../z.safetensors\", expected the name of a"),
            (in_file(there.to_str().unwrap()), "expected the name of a .safetensors file"),
            (in_file("sub/x.safetensors"), "expected the name of a .safetensors file"),
            (in_file("x\\u0000.safetensors"), "places a tensor in \"x\\0.safetensors\", expected"),
            (in_file("x\\n.safetensors"), "places a tensor in \"x\\n.safetensors\", expected"),
            ("7".to_owned(), "expected an object with weight_map"),
            (in_file(""), "places a tensor in \"\", expected the name"),
            (in_file("pytorch_model.bin"), "expected the name of a .safetensors file"),
            (in_file("gone.safetensors"), "gone.safetensors: does not exist, expected a file that"),
            (in_file("y.safetensors"), "tensor `a` in \"y.safetensors\", which does not hold it"),
            (text.replace("\"b\"", "\"a\""), "not place the tensor `b` in \"x.safetensors\""),
            (without_c.replace(",\"b\":\"x.safetensors\"", ""), "not place the tensor `b` in \"x."),
            (text.replace("\"y.safetensors\"", "7"), "integer `7`, expected a string"),
            (text.replace("weight_map", "weights"), "missing field `weight_map`"),
            ("[".repeat(9999), "not an index of safetensors files"),
            (String::new(), "not an index of safetensors files: EOF"),
        ] {
            let message = problem(open(folder.path(), &index));
            assert!(message.contains(expected), "{index}: {message}");
        }
        // A file that no index names is not looked at.
        assert_eq!(open(folder.path(), &without_c).unwrap(), ["a", "b"]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::symlink;
            let link = |from: &Path| {
                let _ = fs::remove_file(folder.path().join("w.safetensors"));
                symlink(from, folder.path().join("w.safetensors")).unwrap();
                open(folder.path(), &in_file("w.safetensors"))
            };
            assert_eq!(link(Path::new("x.safetensors")).unwrap(), ["a", "b", "c"]);
            let message = problem(link(&there));
            assert!(message.contains("w.safetensors: is a link out of its folder"), "{message}");
            let index = format!("model{INDEX}");
            fs::rename(folder.path().join(&index), outside.path().join("index")).unwrap();
            symlink(outside.path().join("index"), folder.path().join(&index)).unwrap();
            let message = problem(Shards::open(folder.path()).map(|_| vec![String::new()]));
            assert!(message.contains("is a link out of its folder"), "{message}");
            // But Hugging Face's cache consists of links.
            let snapshot = outside.path().join("snapshots/0");
            fs::create_dir_all(&snapshot).unwrap();
            fs::create_dir(outside.path().join("blobs")).unwrap();
            fs::rename(&there, outside.path().join("blobs/z")).unwrap();
            symlink("../../blobs/z", snapshot.join(WEIGHTS)).unwrap();
            assert_eq!(Shards::open(&snapshot).unwrap().files.len(), 1);
        }
    }

    #[test]
    fn headers_may_be_long_where_the_data_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.safetensors");
        let length: u64 = (1 << 24) + 8;
        let entry = |data: u64| {
            let json =
                format!(r#"{{"w":{{"dtype":"U8","shape":[{data}],"data_offsets":[0,{data}]}}}}"#);
            let padding = " ".repeat(length as usize - json.len());
            json + &padding
        };
        for (data, accepted) in [(length * 7 - 8, true), (length * 7 - 9, false)] {
            fs::write(&path, [&length.to_le_bytes(), entry(data).as_bytes()].concat()).unwrap();
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(8 + length + data)
                .unwrap();
            let opened = TensorFile::open(&path).map(drop);
            assert_eq!(opened.is_ok(), accepted, "{opened:?}");
        }
    }
}
