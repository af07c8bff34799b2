//! Checkpoints with flipped bits, cut, or with bytes added: an error that names the file and the
//! bytes, never a load.

use std::io::Write;

use super::*;

/// In place: a file cut to nothing and written anew is flushed to the device by some file systems,
/// a hundred thousand times here.
fn overwrite(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::options().write(true).create(true).truncate(false).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// The bytes of a file before its first tensor; all of a JSON file.
fn header(name: &str, bytes: &[u8]) -> usize {
    if name.ends_with(".json") {
        bytes.len()
    } else {
        8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
    }
}

/// Whether a message names this file and bytes in it, and the tensor that holds byte `at` if one
/// does.
fn locates(message: &str, name: &str, good: &[u8], at: usize) -> bool {
    let in_tensor = at >= header(name, good) && at < good.len();
    let place = message.split_once(&format!("{name}: ")).map_or("", |(_, place)| place);
    place.contains(" byte ")
        || place.contains(", bytes ")
            && in_tensor == (!place.contains("\"header\"") && name.ends_with(".safetensors"))
}

#[test]
fn a_flip_of_any_bit_of_any_header_is_located() {
    let (_directory, path) = saved(1);
    let mut flips = 0;
    for name in FILES {
        let file = path.join(name);
        let good = fs::read(&file).unwrap();
        flips += 8 * header(name, &good);
        for (at, bit) in (0..header(name, &good)).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            overwrite(&file, &bad);
            let message = problem(load(&path));
            assert!(locates(&message, name, &good, at), "bit {bit} of byte {at}: {message}");
        }
        overwrite(&file, &good);
    }
    println!("{flips} flips in headers, each located");
    load(&path).unwrap();
}

#[test]
fn a_hundred_thousand_random_flips_and_cuts_are_located() {
    let (_directory, path) = saved(1);
    let mut numbers = Numbers(1);
    let whole = FILES.map(|name| fs::read(path.join(name)).unwrap());
    for round in 0..100_000 {
        let which = numbers.below(FILES.len());
        let (name, good) = (FILES[which], &whole[which]);
        let mut bad = good.clone();
        match round % 4 {
            0 => bad.truncate(numbers.below(good.len())),
            1 => bad.resize(good.len() + 1 + numbers.below(99), numbers.below(256) as u8),
            _ => {
                for _ in 0..=numbers.below(8) {
                    let at = numbers.below(bad.len());
                    bad[at] ^= 1 << numbers.below(8);
                }
            }
        }
        let file = path.join(name);
        overwrite(&file, &bad);
        let loaded = load(&path);
        match good.iter().zip(&bad).position(|(good, bad)| good != bad) {
            // Two flips may undo each other.
            None if good.len() == bad.len() => drop(loaded.unwrap()),
            at => {
                let message = problem(loaded);
                let at = at.unwrap_or(good.len().min(bad.len()));
                assert!(locates(&message, name, good, at), "round {round}, byte {at}: {message}");
            }
        }
        overwrite(&file, good);
    }
}

#[test]
fn damage_names_the_file_the_tensor_and_the_bytes() {
    let (_directory, path) = saved(1);
    let file = path.join(MODEL);
    let good = fs::read(&file).unwrap();
    let (length, data) = (good.len(), good.len() - 4 * (40 + 128 + 8));
    let flipped = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        bad
    };
    for (bad, expected) in [
        (
            flipped(data + 4 * 40 + 5),
            format!(
                "is damaged in \"h.0.mlp.c_fc.weight\", bytes {}..{}",
                data + 160,
                data + 160 + 512
            ),
        ),
        (flipped(10), format!("is damaged in \"header\", bytes 0..{data}")),
        (
            good[..length - 1].to_vec(),
            format!(
                "ends at byte {}, but the manifest says {length}, which is within \
                 \"h.0.ln_1.weight\"",
                length - 1
            ),
        ),
    ] {
        fs::write(&file, bad).unwrap();
        let message = problem(load(&path));
        assert!(message.ends_with(&format!("model.safetensors: {expected}")), "{message}");
    }
    fs::remove_file(&file).unwrap();
    let error = load(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Input);
    assert!(error.to_string().starts_with("cannot read ") && error.to_string().contains(MODEL));
}
