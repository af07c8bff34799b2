//! `--tensorboard`: which files there are, and that each holds whole records. What TensorBoard
//! itself reads is told in docs/guide.md.

use std::fs;

use crate::support::Place;

/// The events of each file, in the order of the files' names: the bytes of a record are behind its
/// length.
fn events(place: &Place, run: &str) -> Vec<Vec<Vec<u8>>> {
    let mut files: Vec<_> = fs::read_dir(place.path(&format!("{run}/tensorboard")))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(
        files.iter().all(|file| file
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("events.out.tfevents.")),
        "{files:?}"
    );
    let records = |bytes: Vec<u8>| {
        let (mut records, mut rest) = (Vec::new(), &bytes[..]);
        while let Some((length, behind)) = rest.split_first_chunk::<8>() {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap();
            records.push(behind[4..4 + length].to_vec());
            rest = &behind[8 + length..];
        }
        assert!(rest.is_empty(), "{} bytes are left over", rest.len());
        records
    };
    files.into_iter().map(|file| records(fs::read(file).unwrap())).collect()
}

fn holds(event: &[u8], text: &str) -> bool {
    event.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn each_start_has_a_file_of_its_own() {
    let place = Place::new();
    place.train("run", "--tensorboard --checkpoint-every 4 --set run.keep_last=9");
    let first = &events(&place, "run")[0];
    assert_eq!(first.len(), 1 + 12, "a version and twelve steps");
    assert!(holds(&first[0], "brain.Event:2"));
    for tag in ["loss", "lr", "grad_norm", "tokens_per_s"] {
        assert!(first[1..].iter().all(|event| holds(event, tag)), "{tag}");
    }
    let sampled = |tag: &str| first[1..].iter().filter(|event| holds(event, tag)).count();
    assert_eq!(
        [sampled("flip_rate"), sampled("flip_rate/h.1.mlp.c_fc.weight"), sampled("val_loss")],
        [5, 5, 2]
    );

    for step in [8, 10, 12] {
        fs::remove_dir_all(place.path(&format!("run/checkpoints/step-{step:08}"))).unwrap();
    }
    place.answer("resume run");
    let files = events(&place, "run");
    assert_eq!(
        files.iter().map(Vec::len).collect::<Vec<_>>(),
        [1 + 12, 2 + 8],
        "goes on by itself: a version, a start at step 5, eight steps"
    );
    // Field 7, a message of two bytes: status START; field 2, the step.
    assert!(
        files[1][1].ends_with(&[0x3a, 0x02, 0x08, 0x01])
            && files[1][1].windows(2).any(|field| field == [0x10, 5])
    );

    place.train("late", "--checkpoint-every 4 --set run.keep_last=9");
    for step in [8, 10, 12] {
        fs::remove_dir_all(place.path(&format!("late/checkpoints/step-{step:08}"))).unwrap();
    }
    place.answer("resume late --tensorboard");
    assert_eq!(
        events(&place, "late").iter().map(Vec::len).collect::<Vec<_>>(),
        [1 + 12],
        "the first file tells what came before it too"
    );
}

#[test]
fn a_folder_that_cannot_be_made_is_refused() {
    let place = Place::new();
    place.train("run", "");
    place.write("run/tensorboard", "a file");
    let output = place.command("resume run --tensorboard").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("error: cannot write to run/tensorboard: "), "{said}");
}
