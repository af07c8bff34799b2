//! The files of sentence pairs.

use std::num::NonZeroU32;

use sparse24_run::{
    data::TokenizerKind,
    translation::{Bleu, PairSource, Pairs, TranslationBatches},
};
use sparse24_train::{
    nn::BatchShape,
    objective::{Batch, Objective},
    schedule::GradientAccumulation,
};

use super::{Files, file, path, refused};

const SOUND: &str = "one dog\ntwo dogs and a cat\nthree\n";
const DICTIONARY: &str = "one 3\ntwo@@ 2\ndogs 1\n";
/// The file that an input is: training files of two languages, and a dictionary.
const FILES: [&str; 3] = ["train.en", "train.de", "dict.en.txt"];

/// The number of a file, then its contents.
pub(super) fn pairs(bytes: &[u8]) -> bool {
    let Some((&number, rest)) = bytes.split_first() else { return false };
    let number = usize::from(number) % FILES.len();
    let has_dictionary = number == 2;
    for name in ["train.en", "train.de", "val.en", "val.de"] {
        file(&format!("pairs/{name}"), SOUND.as_bytes());
    }
    for name in ["dict.en.txt", "dict.de.txt"] {
        if has_dictionary {
            file(&format!("pairs/{name}"), DICTIONARY.as_bytes());
        } else {
            // It may be there from the input before.
            let _ = std::fs::remove_file(path(&format!("pairs/{name}")));
        }
    }
    file(&format!("pairs/{}", FILES[number]), rest);
    if has_dictionary {
        file("pairs/dict.de.txt", rest);
    }
    let kind = if has_dictionary { TokenizerKind::Dictionary } else { TokenizerKind::Bpe };
    let (folder, languages) = (path("pairs"), ["en", "de"].map(str::to_owned));
    let source = PairSource { folder, languages, kind, vocabulary: 300, longest: 16 };
    let pairs = match Pairs::open(source, None) {
        Ok(pairs) => pairs,
        Err(error) => return refused(&error, "pairs"),
    };
    let most = BatchShape { size: 2, sequence_length: 16 };
    let accumulation = GradientAccumulation::constant(NonZeroU32::MIN);
    let batches = TranslationBatches { pairs: &pairs, seed: 1, most, accumulation };
    let mut batch = Batch::default();
    for step in 1..=3 {
        batches.fill(step, 0, &mut batch).expect("held in memory");
        let shape = batch.shape.expect("its own");
        assert!(shape.tokens() <= most.tokens() && shape.sequence_length <= 16);
        assert_eq!([batch.source.len(), batch.tokens.len()], [shape.tokens(); 2]);
        let vocabulary = pairs.tokenizer().vocabulary();
        assert!(batch.source.iter().chain(&batch.tokens).all(|&id| id < vocabulary));
    }
    let lines = String::from_utf8_lossy(rest);
    let score = Bleu::of(lines.lines().map(|line| [line, line])).score();
    assert!(score == 0.0 || (score - 100.0).abs() <= 1e-9, "{score}");
    true
}

fn sound() -> [Vec<u8>; 3] {
    [(0, SOUND), (1, SOUND), (2, DICTIONARY)]
        .map(|(number, text)| [&[number], text.as_bytes()].concat())
}

pub(super) fn pairs_seeds() -> Files {
    let long = [b"\0".to_vec(), vec![b'a'; 1 << 20], b"\nb\nc\n".to_vec()].concat();
    let attacks: [&[u8]; 7] = [
        b"\0\xef\xbb\xbfone\ntwo\nthree\n",
        b"\x01one\n\xff\nthree\n",
        b"\x01one\n\nthree\n",
        b"\0one\r\ntwo\0\r\n\x1b[31mthree",
        b"\x02one 1\none 2\n",
        b"\x02<pad> 1\n",
        b"\x02one 99999999999999999999\n",
    ];
    sound().into_iter().chain(attacks.map(<[u8]>::to_vec)).chain([long]).collect()
}

/// Sound files, doubled and cut at each of their bytes.
pub(super) fn pairs_variants() -> Files {
    let cut = |file: &Vec<u8>| (1..file.len()).map(|at| file[..at].to_vec()).collect::<Vec<_>>();
    let doubled = |file: &Vec<u8>| [&file[..], &file[1..]].concat();
    sound().iter().flat_map(|file| [vec![doubled(file)], cut(file)].concat()).collect()
}
