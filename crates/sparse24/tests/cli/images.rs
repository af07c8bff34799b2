//! A DeiT: what follows its training, and its refusals.

use crate::support::Place;

const PNG: &[u8] = include_bytes!("../../../../tests/src/hardening/rgb.png");

/// Class folders with an image each.
fn write_images(place: &Place, folder: &str, classes: &[&str]) {
    for split in ["train", "val"] {
        for class in classes {
            place.write(&format!("{folder}/{split}/{class}/a.png"), PNG);
        }
    }
}

const SMALL: &str = "--preset deit-cifar-cpu --steps 4 --set model.layers=1 \
    --set model.heads=2 --set model.d_model=16 --set model.d_ff=16 --set batch.size=2 \
    --set model.image_size=8 --set model.sequence_length=5 --set optimizer.warmup_steps=1";

#[test]
fn a_run_of_images_begins_others_and_names_what_it_cannot_do() {
    let place = Place::new();
    write_images(&place, "images", &["ants", "bees", "cats"]);
    write_images(&place, "fewer", &["ants", "bees"]);
    place.answer(&format!("train {SMALL} --data images --out run"));
    // Images of other classes get a new head.
    for data in ["images", "fewer"] {
        let out = format!("from-{data}");
        place.answer(&format!("train {SMALL} --init-from run --data {data} --out {out}"));
        assert_eq!(
            place.json(&format!("eval {out} --json"))["tokens"],
            3 - u64::from(data == "fewer")
        );
    }
    for (line, code, pattern) in [
        ("eval run --data fewer", 3, "fewer: has 2 classes, the model 3"),
        ("eval run --tokens 1", 2, "--tokens: *evaluated on all"),
        ("sample run", 3, "run does not generate text: it is a DeiT"),
    ] {
        place.refuses(line, code, pattern);
    }
    // Without images, a model has the classes of ImageNet: the size in table 1 of DeiT's paper.
    assert_eq!(place.json("estimate --preset deit-tiny --json")["parameters"], 5_717_416);
}
