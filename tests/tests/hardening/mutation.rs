//! Sound files and known attacks, and what structured changes, flips, cuts and random damage make
//! of them, with the memory of each load counted.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use proptest::{
    collection::vec,
    prelude::any,
    sample::Index,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use sparse24_tests::hardening::{TARGETS, Target, memory_bound};

/// Randomly damaged inputs per target.
const CASES: u32 = 8000;

/// Returns whether the target accepts the input. Panics, and prints the input, if it breaks a
/// promise or holds too much memory.
fn try_input(target: &Target, bytes: &[u8]) -> bool {
    let mut outcome = Ok(false);
    let used = allocation_counter::measure(|| {
        outcome = catch_unwind(AssertUnwindSafe(|| (target.check)(bytes)));
    });
    let input = bytes[..bytes.len().min(4096)].escape_ascii();
    let is_accepted = outcome.unwrap_or_else(|panic| {
        eprintln!("target {}, input b\"{input}\"", target.name);
        resume_unwind(panic)
    });
    let (held, bound) = (used.bytes_max, memory_bound(bytes.len()));
    assert!(held <= bound, "{} held {held} of {bound} bytes: b\"{input}\"", target.name);
    is_accepted
}

/// Tries the seeds of every target, and their variants, on two threads.
#[test]
fn seeds_and_variants() {
    let run = |target: &Target| {
        let seeds = (target.seeds)();
        assert!(try_input(target, &seeds[0]), "{}: the first seed is sound", target.name);
        let inputs = [seeds, (target.variants)()].concat();
        let accepted = inputs.iter().filter(|input| try_input(target, input)).count();
        println!("{}: {accepted} of {} files accepted", target.name, inputs.len());
        assert!(accepted < inputs.len(), "{}: everything is accepted", target.name);
    };
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(target) = TARGETS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(target);
                }
            });
        }
    });
}

#[test]
fn every_byte_flipped_and_every_truncation() {
    for target in TARGETS {
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
    for target in TARGETS {
        let mut seeds = (target.seeds)();
        seeds.retain(|seed| seed.len() <= 8000);
        let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
        let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let input = (any::<Index>(), vec(any::<Damage>(), 1..5));
        let tried = TestRunner::new_with_rng(config, random).run(&input, |(seed, damages)| {
            let mut bytes = seed.get(&seeds).clone();
            damages.iter().for_each(|&with| damage(&mut bytes, &seeds, with));
            try_input(target, &bytes);
            Ok(())
        });
        tried.unwrap_or_else(|error| panic!("{}: {error}", target.name));
    }
}

/// Bytes that lengths, JSON, TOML and their readers stumble over.
#[rustfmt::skip]
const HARD: [&[u8]; 18] = [
    b"\0", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\0\0\0\x80", b"\x7f", b"\"", b"\\u0000",
    b"\\ud800", b"[", b"{", b"}", b",", b"\n", b"\r\n", b"-1", b"1e999", b"nan",
    b"18446744073709551615", b"9223372036854775808",
];

/// The kind of a change, its place, another place, and a byte.
type Damage = (u8, Index, Index, u8);

/// Changes one place: a bit, a byte, a cut, a piece removed or doubled, a piece of another seed, or
/// something hard.
fn damage(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], (kind, at, other, byte): Damage) {
    let at = at.index(bytes.len() + 1);
    let end = (at + 1 + usize::from(byte % 24)).min(bytes.len());
    match kind % 8 {
        0 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
        1 if at < bytes.len() => bytes[at] = byte,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        4 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
        5 => {
            let seed = other.get(seeds);
            let from = other.index(seed.len() + 1);
            bytes.splice(at..end, seed[from..].iter().take(byte.into()).copied());
        }
        _ => {
            let end = if byte % 2 == 0 { at } else { end };
            bytes.splice(at..end, other.get(&HARD).iter().copied());
        }
    }
}
