//! `sparse24 prune` and `sparse24 verify` as their user meets them: round trips, lists, and every
//! way in which they refuse.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

fn sparse24(args: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sparse24")).args(args).current_dir(folder).output().unwrap()
}

fn answer(args: &[&str], folder: &Path) -> String {
    let output = sparse24(args, folder);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refusal(args: &[&str], folder: &Path, code: i32) -> String {
    let output = sparse24(args, folder);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{message}");
    message
}

/// A file with matrices, an embedding, a bias, a matrix that does not divide, and a NaN.
fn write(path: &Path) {
    let values = |count: u32| -> Vec<u8> {
        let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        (0..count).flat_map(|i| if i == 5 { f32::NAN } else { value(i) }.to_le_bytes()).collect()
    };
    let tensors: [(&str, &[usize]); 5] = [
        ("h.0.mlp.weight", &[8, 12]),
        ("h.1.mlp.weight", &[4, 4]),
        ("h.0.mlp.bias", &[8]),
        ("wte.weight", &[12, 8]),
        ("odd.weight", &[6, 6]),
    ];
    let data: Vec<_> =
        tensors.iter().map(|(_, shape)| values(shape.iter().product::<usize>() as u32)).collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap())
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    fs::write(path, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
}

#[test]
fn what_is_pruned_verifies_and_the_rest_is_untouched() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(&root.join("in"));
    let before = fs::read(root.join("in")).unwrap();
    let before = SafeTensors::deserialize(&before).unwrap();
    for mask in ["transposable", "row", "column"] {
        let listed = answer(&["prune", "in", "out", "--mask", mask], root);
        assert!(
            listed.contains("pruned   h.0.mlp.weight") && listed.contains("1 NaN, all kept"),
            "{listed}"
        );
        assert!(
            listed.contains("copied   h.0.mlp.bias") && listed.contains("of dimension 1, not 2"),
            "{listed}"
        );
        assert!(
            listed.contains("copied   wte.weight") && listed.contains("an embedding, by its name"),
            "{listed}"
        );
        assert!(listed.contains("copied   odd.weight") && listed.contains("multiple"), "{listed}");
        assert!(
            listed.ends_with(", 3 copied: out\n") && listed.contains("\n2 tensors pruned"),
            "{listed}"
        );
        let after = fs::read(root.join("out")).unwrap();
        let after = SafeTensors::deserialize(&after).unwrap();
        for name in ["h.0.mlp.bias", "wte.weight", "odd.weight"] {
            assert_eq!(after.tensor(name).unwrap(), before.tensor(name).unwrap(), "{name}");
        }
        let verified = answer(&["verify", "out", "--mask", mask], root);
        assert!(
            verified.contains("holds    h.1.mlp.weight")
                && verified.contains("\n2 tensors proved "),
            "{verified}"
        );
        let summary: Value =
            serde_json::from_str(&answer(&["verify", "out", "--mask", mask, "--json"], root))
                .unwrap();
        assert_eq!(summary["holds"], true);
    }
    assert!(
        answer(&["prune", "in", "greedy", "--mask", "transposable", "--search", "greedy"], root)
            .contains("2 tensors pruned")
    );
    answer(&["verify", "greedy"], root);
    answer(&["verify", "greedy", "--mask", "row"], root);
}

#[test]
fn a_script_reads_json() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(&root.join("in"));
    let summary: Value = serde_json::from_str(&answer(
        &["prune", "in", "out", "--mask", "row", "--include", r"^h\.0", "--json"],
        root,
    ))
    .unwrap();
    assert_eq!(
        (&summary["mask"], &summary["out"]),
        (&Value::from("row-wise 2:4"), &Value::from("out"))
    );
    let tensor = |name: &str| {
        summary["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == name).unwrap()
    };
    let pruned = tensor("h.0.mlp.weight");
    assert_eq!((&pruned["nan"], &pruned["nan_pruned"]), (&Value::from(1), &Value::from(0)));
    let kept = pruned["kept_norm"].as_f64().unwrap();
    assert!(kept > 0.5 && kept < 1.0, "{kept}");
    assert_eq!(tensor("h.1.mlp.weight")["skipped"], "not included");
    assert_eq!(tensor("odd.weight")["skipped"], "not included");
    let verified = sparse24(&["verify", "out", "--mask", "row", "--json"], root);
    assert_eq!(
        verified.status.code(),
        Some(1),
        "h.1 was left out, and odd.weight's 6 columns are skipped"
    );
    let summary: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!(summary["holds"], false);
    let tensor = |name: &str| {
        summary["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == name).unwrap()
    };
    assert_eq!(tensor("h.0.mlp.weight")["holds"], true);
    assert_eq!(
        (&tensor("h.1.mlp.weight")["row"], &tensor("h.1.mlp.weight")["column"]),
        (&Value::from(0), &Value::from(0))
    );
}

#[test]
fn verify_refutes_tensor_by_tensor() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(&root.join("in"));
    let output = sparse24(&["verify", "in"], root);
    assert_eq!(output.status.code(), Some(1));
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(
        listed.contains("refuted  h.0.mlp.weight") && listed.contains("refuted  h.1.mlp.weight"),
        "{listed}"
    );
    assert!(
        listed.contains(
            "no transposable pattern covers the 16 nonzeros of the tile at rows 0-3, columns 0-3"
        ),
        "{listed}"
    );
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.starts_with("error: in: 2 of 2 tensors are not transposable; the first is `h."),
        "{message}"
    );
    answer(&["prune", "in", "out", "--mask", "row"], root);
    assert!(refusal(&["verify", "out"], root, 1).contains("not transposable"));
    assert!(
        refusal(&["verify", "out", "--mask", "column"], root, 1).contains("not column-wise 2:4")
    );
}

#[test]
fn every_refusal_says_why_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(&root.join("in"));
    fs::write(root.join("short"), b"1234567").unwrap();
    fs::write(root.join("text"), b"this is no safetensors file").unwrap();
    let whole = fs::read(root.join("in")).unwrap();
    fs::write(root.join("cut"), &whole[..whole.len() - 1]).unwrap();
    fs::create_dir_all(root.join("folder/full")).unwrap();
    let before: Vec<_> =
        fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    for (file, code, expected) in [
        ("nowhere", 3, "error: nowhere: does not exist, expected a safetensors file"),
        ("folder", 3, "error: folder: is a folder, expected a file"),
        ("short", 3, "error: short: not a valid safetensors file: 7 bytes"),
        ("text", 3, "error: text: not a valid safetensors file: header length 2338328219631577204"),
        ("cut", 3, "error: cut: not a valid safetensors file: tensor `"),
    ] {
        for args in [&["verify", file][..], &["prune", file, "out", "--mask", "row"]] {
            let message = refusal(args, root, code);
            assert!(message.starts_with(expected) && message.lines().count() == 1, "{message}");
        }
    }
    for (args, code, expected) in [
        (
            &["prune", "in", "out", "--mask", "row", "--strict"][..],
            3,
            "error: in: strict pruning leaves no matrix out, but 1 cannot be pruned",
        ),
        (
            &["prune", "in", "in", "--mask", "row"],
            3,
            "error: in: is the input; the unpruned weights would be lost",
        ),
        (
            &["prune", "in", "folder", "--mask", "row"],
            3,
            "error: folder: is a folder, expected a file or a new name",
        ),
        (&["prune", "in", "text/out", "--mask", "row"], 4, "error: cannot write text/out: "),
        (&["prune", "in", "nowhere/out", "--mask", "row"], 4, "error: cannot write nowhere/out: "),
        (
            &["prune", "in", "out", "--mask", "row", "--include", "bias"],
            3,
            "error: in: holds no tensor that could be row-wise 2:4 pruned",
        ),
        (
            &["verify", "in", "--include", "wte"],
            3,
            "error: in: holds no tensor that could be transposable pruned",
        ),
        (
            &["prune", "in", "out", "--mask", "row", "--search", "greedy"],
            2,
            "error: --search greedy found with a --mask other than transposable",
        ),
        (&["prune", "in", "out"], 2, "--mask"),
        (&["prune", "in", "out", "--mask", "diagonal"], 2, "invalid value 'diagonal'"),
        (&["verify", "in", "--include", "("], 2, "unclosed group"),
    ] {
        let message = refusal(args, root, code);
        assert!(message.contains(expected), "{message}");
    }
    let after: Vec<_> =
        fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(before, after, "a refusal wrote something");
    assert_eq!(fs::read(root.join("in")).unwrap(), whole);
}

#[cfg(unix)]
#[test]
fn only_a_file_is_replaced_and_a_link_is_followed() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(&root.join("in"));
    fs::create_dir(root.join("folder")).unwrap();
    let _listener = UnixListener::bind(root.join("socket")).unwrap();
    symlink("socket", root.join("to-socket")).unwrap();
    symlink("/dev/null", root.join("to-null")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    let prune = |out| ["prune", "in", out, "--mask", "row"];
    for out in ["socket", "to-socket", "to-null"] {
        let message = refusal(&prune(out), root, 3);
        assert!(
            message.starts_with(&format!(
                "error: {out}: is not a regular file, which alone can be replaced"
            )),
            "{message}"
        );
    }
    assert!(refusal(&prune("loop"), root, 4).starts_with("error: cannot write loop: "));
    let kind = |name| fs::symlink_metadata(root.join(name)).unwrap().file_type();
    assert!(
        !kind("socket").is_file() && kind("to-null").is_symlink(),
        "a refusal replaced something"
    );

    answer(&prune("out"), root);
    let expected = fs::read(root.join("out")).unwrap();
    fs::write(root.join("folder/old"), "old").unwrap();
    for (link, target) in [("to-old", "folder/old"), ("to-new", "folder/new")] {
        symlink(target, root.join(link)).unwrap();
        answer(&prune(link), root);
        assert!(kind(link).is_symlink(), "{link} was replaced");
        assert!(fs::read(root.join(target)).unwrap() == expected, "{target}");
    }
    symlink("in", root.join("to-in")).unwrap();
    assert!(refusal(&prune("to-in"), root, 3).contains("is the input"));
}
