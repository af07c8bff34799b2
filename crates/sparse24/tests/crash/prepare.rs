//! `prepare` is killed at each file operation, then run again.

use std::{fs, os::unix::process::ExitStatusExt, process::Stdio};

use crate::{
    shim::{self, Plan},
    support::Place,
};

#[test]
fn a_killed_prepare_can_be_repeated() {
    let place = Place::new();
    let line = |out: &str| {
        format!(
            "prepare --data {} --tokenizer char --out {}",
            place.path("text").display(),
            place.path(out).display()
        )
    };
    place.answer(&line("whole"));
    let (whole, outs) = (place.tree("whole"), place.path("outs"));
    // Into a new folder, and over one from an earlier `prepare`.
    for before in [None, Some("byte")] {
        let mut operations = 0;
        loop {
            fs::create_dir(&outs).unwrap();
            if let Some(tokenizer) = before {
                place.answer(&line("outs/shards").replace("char", tokenizer));
            }
            let mut command = place.command(&line("outs/shards"));
            shim::under(&mut command, &outs, Plan::Kill(operations));
            let died = command.stdout(Stdio::null()).status().unwrap().signal() == Some(9);
            // The output is complete: absent, the old folder or the new one.
            if place.path("outs/shards").exists() {
                let tokenizer = if place.tree("outs/shards") == whole {
                    "char"
                } else {
                    before.expect("nothing was there before")
                };
                let run = format!(
                    "train --data {} --set data.tokenizer={tokenizer} --set steps=1 --set \
                     model.sequence_length=8",
                    outs.join("shards").display()
                );
                place.answer(&format!(
                    "{run} --set model.layers=1 --set model.d_model=8 --set model.heads=1 --set \
                     batch.size=1 --out run"
                ));
                fs::remove_dir_all(place.path("run")).unwrap();
            }
            place.answer(&line("outs/shards"));
            assert!(place.tree("outs/shards") == whole, "operation {operations}");
            fs::remove_dir_all(&outs).unwrap();
            if !died {
                break;
            }
            operations += 1;
        }
        assert!(operations > 10, "{operations}");
        println!("prepare: killed at each of {operations} operations");
    }
}
