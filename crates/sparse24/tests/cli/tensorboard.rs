//! `--tensorboard`: which event files exist, and the records in them.

use crate::support::{Place, SAVED};

/// The events of each file, in the order of the files' names.
fn events(place: &Place, run: &str) -> Vec<Vec<Vec<u8>>> {
    // A record: length (8 bytes), its checksum (4), the event, its checksum (4).
    let records = |bytes: &Vec<u8>| {
        let (mut records, mut rest) = (Vec::new(), &bytes[..]);
        while let Some((length, tail)) = rest.split_first_chunk::<8>() {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap();
            records.push(tail[4..4 + length].to_vec());
            rest = &tail[8 + length..];
        }
        assert!(rest.is_empty(), "{} bytes are left over", rest.len());
        records
    };
    let tree = place.tree(&format!("{run}/tensorboard"));
    assert!(tree.keys().all(|name| name.to_str().unwrap().starts_with("events.out.tfevents.")));
    tree.values().map(|bytes| records(bytes.as_ref().unwrap())).collect()
}

fn holds(event: &[u8], text: &str) -> bool {
    event.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn each_process_writes_a_file_of_its_own() {
    let place = Place::trained(&format!("--tensorboard {SAVED}"));
    let first = &events(&place, "run")[0];
    assert_eq!(first.len(), 1 + 12, "a version and twelve steps");
    assert!(holds(&first[0], "brain.Event:2"));
    for (tag, count) in [
        ("loss", 12),
        ("lr", 12),
        ("grad_norm", 12),
        ("tokens_per_s", 12),
        ("flip_rate", 5),
        ("flip_rate/h.1.mlp.c_fc.weight", 5),
        ("val_loss", 2),
    ] {
        assert_eq!(first.iter().filter(|event| holds(event, tag)).count(), count, "{tag}");
    }

    let lengths = |run: &str| events(&place, run).iter().map(Vec::len).collect::<Vec<_>>();
    place.rewind("run", [8, 10, 12]);
    place.answer("resume run");
    assert_eq!(lengths("run"), [1 + 12, 2 + 8], "a version, a start at step 5, eight steps");
    // Field 7, a message of two bytes: status START; field 2: the step.
    let start = &events(&place, "run")[1][1];
    assert!(start.ends_with(&[0x3a, 0x02, 0x08, 0x01]));
    assert!(start.windows(2).any(|field| field == [0x10, 5]));
    // The clock may have gone back.
    let folder = place.path("run/tensorboard");
    let later = folder.join("events.out.tfevents.5000000000.000000000.sparse24");
    let newest = place.tree("run/tensorboard").into_keys().next_back().unwrap();
    std::fs::rename(folder.join(newest), later).unwrap();
    place.rewind("run", [12]);
    place.answer("resume run");
    assert_eq!(lengths("run"), [1 + 12, 2 + 8, 2 + 2]);
    // A time after which there is none.
    place.write("run/tensorboard/events.out.tfevents.18446744073709551615.1.x", "");
    for _ in 0..2 {
        place.rewind("run", [12]);
        place.answer("resume run");
    }
    assert_eq!(place.tree("run/tensorboard").len(), 6);

    place.train("late", SAVED);
    place.rewind("late", [8, 10, 12]);
    place.answer("resume late --tensorboard");
    assert_eq!(lengths("late"), [1 + 12], "the first file has the earlier steps too");

    place.train("blocked", "");
    place.write("blocked/tensorboard", "a file");
    let (_, err) = place.exits("resume blocked --tensorboard", 4);
    assert!(err.contains("error: ") && err.contains("blocked/tensorboard"), "{err}");
}
