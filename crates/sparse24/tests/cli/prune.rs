//! `sparse24 prune` and `sparse24 verify`: round trips, listings and refusals.

use std::fs;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::support::{Place, is_like};

/// A place with a file `in`: matrices, an embedding, a bias, a matrix with lengths that are not
/// multiples of 4, and a NaN in most of them.
fn place() -> Place {
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
    let data = tensors.map(|(_, shape)| values(shape.iter().product::<usize>() as u32));
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap())
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let place = Place::new();
    place.write("in", safetensors::serialize(views, Some(metadata)).unwrap());
    place
}

fn assert_lists(listed: &str, patterns: &[&str]) {
    for pattern in patterns {
        assert!(listed.lines().any(|line| is_like(line, pattern)), "{pattern:?} in {listed}");
    }
}

#[test]
fn pruned_matrices_verify_and_other_tensors_are_unchanged() {
    let place = place();
    let before = place.bytes("in");
    let before = SafeTensors::deserialize(&before).unwrap();
    for mask in ["transposable", "row", "column"] {
        let listed = place.answer(&format!("prune in out --mask {mask}"));
        assert_lists(
            &listed,
            &[
                "pruned   h.0.mlp.weight*keeps*of its numbers*1 NaN",
                "copied   h.0.mlp.bias*1",
                "copied   wte.weight*embedding",
                "copied   odd.weight*multiple",
                "2 tensors pruned*, 3 copied: out",
            ],
        );
        let after = place.bytes("out");
        let after = SafeTensors::deserialize(&after).unwrap();
        for name in ["h.0.mlp.bias", "wte.weight", "odd.weight"] {
            assert_eq!(after.tensor(name).unwrap(), before.tensor(name).unwrap(), "{name}");
        }
        let verified = place.answer(&format!("verify out --mask {mask}"));
        assert_lists(&verified, &["holds    h.1.mlp.weight", "2 tensors proved"]);
    }
    place.answer("prune in greedy --mask transposable --search greedy");
    place.answer("verify greedy");
    place.answer("verify greedy --mask row");
}

#[test]
fn verify_refutes_tensor_by_tensor_and_json_lists_every_tensor() {
    let place = place();
    let (out, err) = place.exits("verify in", 1);
    assert_lists(
        &out,
        &["refuted  h.0.mlp.weight*16 nonzeros*rows 0-3, columns 0-3", "refuted  h.1.mlp.weight"],
    );
    assert!(is_like(&err, "error: in: 2 of 2 tensors*transposable*`h."), "{err}");
    let tensor = |summary: &Value, name: &str| {
        let tensors = summary["tensors"].as_array().unwrap();
        tensors.iter().find(|tensor| tensor["name"] == name).unwrap().clone()
    };
    let summary = place.json(r"prune in out --mask row --include ^h\.0 --json");
    assert_eq!([&summary["mask"], &summary["out"]], [&json!("row-wise 2:4"), &json!("out")]);
    let pruned = tensor(&summary, "h.0.mlp.weight");
    assert_eq!([&pruned["nan"], &pruned["nan_pruned"]], [&json!(1), &json!(0)]);
    assert!((0.5..1.0).contains(&pruned["kept_norm"].as_f64().unwrap()), "{pruned}");
    assert!(tensor(&summary, "h.1.mlp.weight")["skipped"].is_string());
    let (out, _) = place.exits("verify out --mask row --json", 1);
    let summary: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(summary["holds"], false, "h.1 was not included");
    assert_eq!(tensor(&summary, "h.0.mlp.weight")["holds"], true);
    let refuted = tensor(&summary, "h.1.mlp.weight");
    assert_eq!([&refuted["row"], &refuted["column"]], [&json!(0), &json!(0)]);
    let (_, err) = place.exits("verify out --mask column", 1);
    assert!(err.contains("column-wise"), "{err}");
    place.answer("prune in rows --mask row");
    let (_, err) = place.exits("verify rows", 1);
    assert!(err.ends_with("; all are row-wise 2:4: use --mask row\n"), "{err}");
}

#[test]
fn filters_choose_the_tensors_and_quiet_leaves_the_summary() {
    let place = place();
    for (more, expected) in [
        ("--include mlp --exclude h.1", "1 tensor pruned (row-wise 2:4), 4 copied: out\n"),
        ("--embeddings", "3 tensors pruned (row-wise 2:4), 2 copied: out\n"),
        ("--embeddings --include wte", "1 tensor pruned (row-wise 2:4), 4 copied: out\n"),
    ] {
        assert_eq!(place.answer(&format!("prune in out --mask row --quiet {more}")), expected);
        place.answer(&format!("verify out --mask row --quiet {more}"));
    }
    let (out, err) = place.exits("verify in --quiet", 1);
    assert!(out.is_empty() && is_like(&err, "2 of 2 tensors are not transposable"), "{out}{err}");
    place.refuses("verify in --quiet --json", 2, "--quiet*--json");
}

#[test]
fn a_model_in_several_files_is_pruned_like_one() {
    let place = place();
    place.shard("in", "model", ".0.");
    for (name, contents) in [
        ("config.json", "{}"),
        ("pytorch_model.bin", "dense"),
        (".git", ""),
        ("vocab.txt", "a"),
        ("old.safetensors", "old"),
    ] {
        place.write(&format!("model/{name}"), contents);
    }
    place.folder("model/1_Pooling");
    let before = place.tree("model");
    place.answer("prune in one --mask row");
    let one = place.bytes("one");
    let one = SafeTensors::deserialize(&one).unwrap();
    for (input, out) in [("model", "pruned"), ("model/model.safetensors.index.json", "again")] {
        let listed = place.answer(&format!("prune {input} {out} --mask row"));
        assert_lists(&listed, &["pruned   h.1.mlp.weight*", &format!("2 tensors pruned*: {out}")]);
        place.answer(&format!("verify {out} --mask row --quiet"));
        let after = place.tree(out);
        let left_out = [".git", "1_Pooling", "old.safetensors", "pytorch_model.bin"];
        assert_lists(&listed, &[&format!("left out: {}", left_out.join(", "))]);
        let names = before.keys().filter(|name| !left_out.iter().any(|out| name.ends_with(out)));
        assert!(names.eq(after.keys()), "{:?}", after.keys());
        let mut tensors = 0;
        for (name, contents) in after {
            let contents = contents.unwrap();
            if name.extension().is_some_and(|e| e == "safetensors") {
                for (name, tensor) in SafeTensors::deserialize(&contents).unwrap().iter() {
                    assert_eq!(tensor, one.tensor(name).unwrap());
                    tensors += 1;
                }
            } else {
                assert_eq!(Some(&contents), before[&name].as_ref(), "{name:?}");
            }
        }
        assert_eq!(tensors, 5);
    }
    assert!(place.tree("model") == before);
    let (_, err) = place.exits("verify model", 1);
    assert!(is_like(&err, "error: model: 2 of 2 tensors*not transposable"), "{err}");
    place.refuses("prune model pruned --mask row", 3, "pruned: is not an empty folder");
    place.refuses("prune model model --mask row", 3, "model: is the input");
    place.write("model/model-00002-of-00002.safetensors", "cut");
    place.refuses("prune model new --mask row", 3, "model/model-00002-of-*: *3 bytes");
}

#[test]
fn unusable_files_and_arguments_are_refused() {
    let place = place();
    let whole = place.bytes("in");
    place.write("cut", &whole[..whole.len() - 1]);
    place.write("nothing", b"\x02\0\0\0\0\0\0\0{}");
    place.folder("folder");
    for (line, code, pattern) in [
        ("verify nowhere", 3, "nowhere: *does not exist"),
        ("verify cut", 3, "cut: *tensor `"),
        ("verify in --include wte", 3, "in: holds no tensor*transposable*of 5, the first is `"),
        ("verify nothing", 3, "nothing: holds no tensor*it has no tensors"),
        ("prune folder out --mask row", 3, "folder: holds no \"model.safetensors\""),
        ("prune cut out --mask row", 3, "cut: *tensor `"),
        ("prune in out --mask row --strict", 3, "in: --strict: 1 matrix cannot be pruned*`odd."),
        ("prune in in --mask row", 3, "in: is the input"),
        ("prune in text --mask row", 3, "text: exists and is not a safetensors file"),
        ("prune in folder --mask row", 3, "folder: is a folder"),
        ("prune in nowhere/out --mask row", 4, "cannot write nowhere/out"),
        ("prune in out --mask row --include bias", 3, "in: *row-wise"),
        ("prune in out --mask row --search greedy", 2, "--search greedy*transposable"),
    ] {
        place.refuses(line, code, pattern);
    }
}

#[cfg(unix)]
#[test]
fn only_a_regular_file_is_replaced_and_links_are_followed() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    let place = place();
    let _listener = UnixListener::bind(place.path("socket")).unwrap();
    for (target, link) in
        [("socket", "to-socket"), ("/dev/null", "to-null"), ("loop", "loop"), ("in", "to-in")]
    {
        symlink(target, place.path(link)).unwrap();
    }
    for (out, code, pattern) in [
        ("to-socket", 3, "to-socket: *regular file"),
        ("to-null", 3, "to-null: *regular file"),
        ("loop", 4, "cannot write loop"),
        ("to-in", 3, "is the input"),
    ] {
        // Not `refuses`, which reads all files.
        let (_, err) = place.exits(&format!("prune in {out} --mask row"), code);
        assert!(is_like(&err, pattern), "{err}");
    }
    let kind = |name| fs::symlink_metadata(place.path(name)).unwrap().file_type();
    assert!(!kind("socket").is_file() && kind("to-null").is_symlink(), "something was replaced");

    place.answer("prune in out --mask row");
    let expected = place.bytes("out");
    place.folder("folder");
    place.write("folder/old", place.bytes("in"));
    for (link, target) in [("to-old", "folder/old"), ("to-new", "folder/new")] {
        symlink(target, place.path(link)).unwrap();
        place.answer(&format!("prune in {link} --mask row"));
        assert!(kind(link).is_symlink(), "{link} was replaced");
        assert!(place.bytes(target) == expected, "{target}");
    }
}
