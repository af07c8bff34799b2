//! Seeds, and what damage makes of them.

use sparse24_tests::hardening::TARGETS;

use super::{random::Random, trial::try_input};

/// Damaged inputs a target.
const ROUNDS: usize = 8000;

#[test]
fn known_attacks() {
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(seeds.len() >= 8, "{} has few seeds", target.name);
        seeds.iter().for_each(|seed| try_input(target, seed));
    }
}

/// One in so many variants, in every run of the tests: a prime that divides none of the numbers in
/// which variants of a place come.
const SAMPLE: usize = 13;

#[test]
fn values_of_every_kind() {
    try_variants(SAMPLE);
}

#[test]
#[ignore = "minutes: all variants, of which `values_of_every_kind` tries some"]
fn all_values_of_every_kind() {
    try_variants(1);
}

fn try_variants(one_in: usize) {
    for target in &TARGETS {
        let variants = (target.variants)();
        variants.iter().step_by(one_in).for_each(|variant| try_input(target, variant));
        println!("{}: one in {one_in} of {}", target.name, variants.len());
    }
}

#[test]
fn every_byte_flipped_and_every_truncation() {
    for target in &TARGETS {
        for seed in (target.seeds)().iter().filter(|seed| seed.len() <= 2500) {
            for at in 0..seed.len().min(400) {
                for flip in [1 << (at % 8), 0x20, 0xff] {
                    let mut damaged = seed.clone();
                    damaged[at] ^= flip;
                    try_input(target, &damaged);
                }
                try_input(target, &seed[..at]);
            }
        }
    }
}

#[test]
fn random_damage() {
    for (target, number) in TARGETS.iter().zip(1..) {
        let mut random = Random::new(number);
        let seeds: Vec<_> =
            (target.seeds)().into_iter().filter(|seed| seed.len() <= 8000).collect();
        for _ in 0..ROUNDS {
            let mut bytes = seeds[random.below(seeds.len())].clone();
            for _ in 0..=random.below(4) {
                damage(&mut bytes, &seeds, &mut random);
            }
            try_input(target, &bytes);
        }
    }
}

/// What numbers, JSON, TOML and their readers stumble over.
const HARD: [&[u8]; 18] = [
    b"\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\0\0\0\x80",
    b"\x7f",
    b"\"",
    b"\\u0000",
    b"\\ud800",
    b"[",
    b"{",
    b"}",
    b",",
    b"\n",
    b"\r\n",
    b"-1",
    b"1e999",
    b"nan",
    b"18446744073709551615",
    b"9223372036854775808",
];

/// Changes one place: a bit, a byte, a cut, a piece doubled or removed, something hard, or a piece
/// of another seed.
fn damage(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let to = (at + 1 + random.below(24)).min(bytes.len());
    match random.below(8) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.next() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..to)),
        4 => {
            let piece = bytes[at..to].to_vec();
            bytes.splice(at..at, piece);
        }
        5 => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len() + 1);
            bytes.splice(at..to, other[from..].iter().take(random.below(200)).copied());
        }
        _ => drop(bytes.splice(
            at..if random.below(2) == 0 { at } else { to },
            HARD[random.below(HARD.len())].iter().copied(),
        )),
    }
}
