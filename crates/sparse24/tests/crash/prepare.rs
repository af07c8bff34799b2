//! `prepare` is killed at each file operation, then run again.

use std::{fs, os::unix::process::ExitStatusExt, process::Stdio};

use crate::{
    shim::{self, Plan},
    support::Place,
};

#[test]
fn a_killed_prepare_can_be_repeated() {
    let place = Place::new();
    let prepare = |tokenizer: &str, out: &str| {
        let [data, out] = ["text", out].map(|name| place.path(name).display().to_string());
        format!("prepare --data {data} --tokenizer {tokenizer} --out {out} --force")
    };
    let [old, new] = ["byte", "char"].map(|tokenizer| {
        place.answer(&prepare(tokenizer, tokenizer));
        place.tree(tokenizer)
    });
    let (outs, again) = (place.path("outs"), prepare("char", "outs/shards"));
    // Into a new folder, and over one from an earlier `prepare`.
    for before in [None, Some(&old)] {
        let operations = (0..)
            .take_while(|&operation| {
                fs::create_dir(&outs).unwrap();
                if before.is_some() {
                    place.answer(&prepare("byte", "outs/shards"));
                }
                let mut command = place.command(&again);
                shim::under(&mut command, &outs, Plan::Kill(operation));
                let died = command.stdout(Stdio::null()).status().unwrap().signal() == Some(9);
                // The output is complete: absent, the old folder or the new one.
                if place.path("outs/shards").exists() {
                    let found = place.tree("outs/shards");
                    assert!(found == new || Some(&found) == before, "operation {operation}");
                }
                place.answer(&again);
                assert!(place.tree("outs/shards") == new, "operation {operation}");
                fs::remove_dir_all(&outs).unwrap();
                died
            })
            .count();
        assert!(operations > 10, "{operations}");
        println!("prepare: killed at each of {operations} operations");
    }
}
