//! Token shards in their three layouts, folders of them, tokenizer files, and text.
//!
//! Invariant: every id is below its vocabulary, and text comes back as it was.

use std::fs;

use sparse24_run::data::{
    Corpus, Dataset, Draw, Tokenizer, TokenizerKind, Tokens,
    shard::{self, Shard},
};

use super::{place, refused, values};

const HEADER: usize = 128;

pub(super) fn shard(bytes: &[u8]) {
    for bytes in [bytes, &*sealed(bytes)] {
        let path = place::file("shard.bin", bytes);
        for asked in [None, Some(300)] {
            match shard::read(&path, asked) {
                Ok(read) => accepted(read, asked),
                Err(error) => refused(&error, "shard.bin"),
            }
        }
    }
}

fn accepted(read: Shard, asked: Option<u32>) {
    let vocabulary = read.origin.map(|origin| origin.vocabulary).or(asked);
    assert!(
        read.tokens
            .largest()
            .is_none_or(|largest| vocabulary.is_none_or(|vocabulary| largest < vocabulary))
    );
    if let Some(origin) = read.origin {
        let again = place::path("again.bin");
        shard::write(&again, &read.tokens, origin).unwrap();
        assert_eq!(shard::read(&again, vocabulary).unwrap(), read);
    }
}

/// A shard of our layout with its checksums put right; any other file as it is.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= HEADER && bytes.starts_with(b"S24T") {
        let ids = blake3::hash(&bytes[HEADER..]);
        bytes[56..88].copy_from_slice(ids.as_bytes());
        let header = blake3::hash(&bytes[..96]);
        bytes[96..HEADER].copy_from_slice(header.as_bytes());
    }
    bytes
}

/// A sound shard.
fn ours(vocabulary: u32, ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    let path = place::path("made.bin");
    let mut tokens = Tokens::for_vocabulary(vocabulary);
    tokens.extend(ids.iter().copied());
    shard::write(&path, &tokens, shard::Origin { vocabulary, tokenizer: tokenizer.fingerprint() })
        .unwrap();
    fs::read(path).unwrap()
}

/// A shard of llm.c's.
fn llm_c(magic: u32, version: u32, count: u32, ids: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [magic, version, count].iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(ids);
    bytes
}

pub(super) fn shard_seeds() -> Vec<Vec<u8>> {
    let narrow = ours(300, &[1, 2, 299], &Tokenizer::Byte);
    let wide = ours(70_000, &[5, 69_999], &Tokenizer::Byte);
    let mut seeds =
        vec![Vec::new(), vec![7], vec![1, 0, 200, 0], b"S24T".to_vec(), narrow[..HEADER].to_vec()];
    for (at, number) in
        [(4, 2), (8, 3), (8, 4), (12, 0), (12, u32::MAX), (16, u32::MAX), (20, u32::MAX), (0, 0)]
    {
        let mut lying = narrow.clone();
        lying[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
        seeds.push(sealed(&lying));
    }
    seeds.extend([narrow, wide]);
    for (magic, version) in [(20_240_520, 1), (20_240_801, 7), (20_240_520, 7)] {
        for count in [2, 1, 0, u32::MAX] {
            seeds.push(llm_c(
                magic,
                version,
                count,
                &[7, 0, 0, 0, 9, 1, 0, 0][..if version == 1 { 4 } else { 8 }],
            ));
        }
    }
    seeds.push(llm_c(20_240_801, 7, 1, &[0xff; 4]));
    seeds.push(llm_c(20_240_520, 1, 1, &[])[..12].to_vec());
    seeds
}

/// Numbers of ids: few, around what is hashed at once, and many.
const COUNTS: [u32; 20] =
    [0, 1, 2, 3, 31, 63, 64, 65, 255, 256, 257, 448, 512, 960, 1024, 1472, 1984, 2048, 3000, 4000];

/// Shards of many lengths in every layout, whole, cut and with more behind them.
pub(super) fn shard_variants() -> Vec<Vec<u8>> {
    let mut variants = Vec::new();
    for count in COUNTS {
        let ids: Vec<u32> = (0..count).map(|id| id % 300).collect();
        let narrow: Vec<u8> = ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect();
        let wide: Vec<u8> = ids.iter().flat_map(|&id| id.to_le_bytes()).collect();
        for whole in [
            ours(256, &ids.iter().map(|id| id % 256).collect::<Vec<_>>(), &Tokenizer::Byte),
            ours(300, &ids, &Tokenizer::Byte),
            ours(70_000, &ids, &Tokenizer::Byte),
            llm_c(20_240_520, 1, count, &narrow),
            llm_c(20_240_801, 7, count, &wide),
            narrow,
        ] {
            variants.extend(
                (1..=5).filter_map(|cut| Some(whole[..whole.len().checked_sub(cut)?].to_vec())),
            );
            variants.extend([[&whole[..], &[0]].concat(), [&whole[..], &[0; 4]].concat(), whole]);
        }
    }
    variants
}

/// The lengths of `train.bin` and `val.bin`, two bytes each, then both, then `tokenizer.json`, if
/// anything is left.
pub(super) fn folder(bytes: &[u8]) {
    let Some((lengths, rest)) = bytes.split_first_chunk::<4>() else { return };
    let (first, rest) =
        rest.split_at(rest.len().min(u16::from_le_bytes([lengths[0], lengths[1]]).into()));
    let (second, tokenizer) =
        rest.split_at(rest.len().min(u16::from_le_bytes([lengths[2], lengths[3]]).into()));
    let path = place::path("data/train.bin");
    let folder = path.parent().expect("a file lies in a folder");
    fs::write(&path, sealed(first)).unwrap();
    fs::write(folder.join("val.bin"), sealed(second)).unwrap();
    let described = folder.join("tokenizer.json");
    if tokenizer.is_empty() {
        let _ = fs::remove_file(described);
    } else {
        fs::write(described, tokenizer).unwrap();
    }
    for kind in [None, Some(TokenizerKind::Byte), Some(TokenizerKind::Character)] {
        match Dataset::open(Some(folder), kind, 0.1) {
            Ok(dataset) => usable(&dataset),
            Err(error) => refused(&error, "data"),
        }
    }
    match Dataset::open_with(folder, Tokenizer::Byte, 0.1) {
        Ok(dataset) => assert_eq!(dataset.vocabulary(), 256),
        Err(error) => refused(&error, "data"),
    }
}

/// A dataset gives batches and windows of ids below its vocabulary.
fn usable(dataset: &Dataset) {
    let largest = dataset.train().largest().max(dataset.validation().largest());
    assert!(
        largest.is_none_or(|largest| largest < dataset.vocabulary()),
        "{largest:?} is beyond {}",
        dataset.vocabulary()
    );
    for context in [1, 3] {
        if let Err(error) = dataset.check_context(context) {
            return refused(&error, "data");
        }
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        dataset.batch(
            Draw { seed: 1, step: 2, micro_step: 3, sequences: 3, context },
            &mut inputs,
            &mut targets,
        );
        assert!(
            inputs.len() == 3 * context
                && inputs.iter().chain(&targets).all(|&id| id < dataset.vocabulary())
        );
        let windows = dataset.evaluation_windows(context);
        let counted: usize = (0..windows.count())
            .map(|first| windows.fill(first, 1, &mut inputs, &mut targets))
            .sum();
        assert_eq!(counted, windows.predictions());
    }
}

fn pack(train: &[u8], validation: &[u8], tokenizer: &[u8]) -> Vec<u8> {
    let lengths = [train.len() as u16, validation.len() as u16];
    [&lengths.map(u16::to_le_bytes).concat(), train, validation, tokenizer].concat()
}

pub(super) fn folder_variants() -> Vec<Vec<u8>> {
    let tokenizer = Tokenizer::Character(vec!['a', 'b', 'c']);
    let [train, validation] =
        [&[0, 1, 2, 0, 1][..], &[2, 1, 0]].map(|ids| ours(3, ids, &tokenizer));
    let mut variants: Vec<_> =
        tokenizer_variants().iter().map(|tokenizer| pack(&train, &validation, tokenizer)).collect();
    let byte = br#"{"sparse24_tokenizer":1,"kind":"byte"}"#;
    let other = ours(256, &[1, 2, 3, 4, 5], &Tokenizer::Byte);
    for shard in shard_variants() {
        variants.extend([&byte[..], b""].map(|tokenizer| pack(&shard, &shard, tokenizer)));
        variants.extend([pack(&shard, &other, byte), pack(&other, &shard, byte)]);
    }
    variants
}

pub(super) fn folder_seeds() -> Vec<Vec<u8>> {
    let pack = |train: &[u8], validation: &[u8], tokenizer: &str| {
        pack(train, validation, tokenizer.as_bytes())
    };
    let byte = r#"{"sparse24_tokenizer":1,"kind":"byte"}"#;
    let character = r#"{"sparse24_tokenizer":1,"kind":"char","characters":"abc"}"#;
    let abc = Tokenizer::Character(vec!['a', 'b', 'c']);
    let (train, validation) =
        (ours(256, &[1, 2, 3, 4, 5], &Tokenizer::Byte), ours(256, &[6, 7, 8], &Tokenizer::Byte));
    vec![
        pack(&train, &validation, byte),
        pack(&ours(3, &[0, 1, 2, 1], &abc), &ours(3, &[2, 1], &abc), character),
        pack(&train, &validation, character),
        pack(&train, &validation, ""),
        pack(&[1, 0, 2, 0, 3, 0, 4, 0], &[5, 0, 6, 0], ""),
        pack(&[1, 0, 2, 0, 3, 0, 4, 0], &[5, 0, 6, 0], byte),
        pack(&[], &[], ""),
        pack(&[], &[], byte),
        pack(
            &llm_c(20_240_801, 7, 1, &[0xff; 4]),
            &llm_c(20_240_801, 7, 2, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
            "",
        ),
        pack(&[0xff; 8], &[0xff; 4], ""),
    ]
}

pub(super) fn tokenizer(bytes: &[u8]) {
    let path = place::file("tokenizer.json", bytes);
    let loaded = match Tokenizer::load(&path) {
        Ok(loaded) => loaded,
        Err(error) => return refused(&error, "tokenizer.json"),
    };
    let again = place::path("again.json");
    loaded.save(&again).unwrap();
    let again = Tokenizer::load(&again).unwrap();
    assert_eq!((&again, again.fingerprint()), (&loaded, loaded.fingerprint()));
    let ids: Vec<u32> = (0..loaded.vocabulary()).collect();
    assert!(!ids.is_empty(), "a vocabulary of nothing");
    let text = loaded.decode(&ids).unwrap();
    if let (Tokenizer::Character(_), Ok(text)) = (&loaded, str::from_utf8(&text)) {
        assert_eq!(loaded.encode(text).unwrap(), ids);
    }
    assert!(loaded.decode(&[loaded.vocabulary()]).is_err());
}

pub(super) fn tokenizer_variants() -> Vec<Vec<u8>> {
    let sound = r#"{"sparse24_tokenizer":1,"kind":"char","characters":"abc"}"#;
    assert!(
        Tokenizer::load(&place::file("tokenizer.json", sound.as_bytes())).is_ok(),
        "is not sound"
    );
    values::files(values::json(sound, &["byte", "char", "gpt2", "ba", "a\\n\\u00e9\\ud83d\\ude00"]))
}

pub(super) fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "",
        "{}",
        "[1]",
        r#"{"sparse24_tokenizer":1,"kind":"byte"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"gpt2"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"char","characters":"\n abc\u00e9\ud83d\ude00"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ba"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"char","characters":"\ud800"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"char","characters":""}"#,
        r#"{"sparse24_tokenizer":1,"kind":"char"}"#,
        r#"{"sparse24_tokenizer":4294967296,"kind":"byte"}"#,
        r#"{"sparse24_tokenizer":1,"sparse24_tokenizer":1,"kind":"byte"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"\u001b[2J"}"#,
        r#"{"sparse24_tokenizer":1,"kind":"byte","characters":null,"x":[]}"#,
        "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\"}}",
    ]
    .map(Into::into)
    .into();
    seeds.push(vec![b'['; 5000]);
    seeds.push(format!(r#"{{"sparse24_tokenizer":1,"kind":"{}"}}"#, "k".repeat(5000)).into_bytes());
    seeds.push(b"{\"sparse24_tokenizer\":1,\"kind\":\"char\",\"characters\":\"\xff\"}".to_vec());
    seeds
}

pub(super) fn corpus(bytes: &[u8]) {
    let path = place::file("corpus.txt", bytes);
    let corpus = match Corpus::open(&path) {
        Ok(corpus) => corpus,
        Err(error) => return refused(&error, "corpus.txt"),
    };
    for kind in TokenizerKind::ALL {
        let tokenizer = Tokenizer::for_text(kind, corpus.text()).unwrap();
        let dataset = match Dataset::from_corpus(&corpus, tokenizer.clone(), 0.1) {
            Ok(dataset) => dataset,
            Err(error) => {
                refused(&error, "corpus.txt");
                continue;
            }
        };
        let mut ids = Vec::new();
        for part in [dataset.train(), dataset.validation()] {
            part.copy_to(0, part.len(), &mut ids);
        }
        assert_eq!(tokenizer.decode(&ids).unwrap(), bytes, "{}", kind.name());
    }
}

pub(super) fn corpus_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "",
        " \n\t",
        "x",
        "to be, or not to be: that is the question",
        "\r\na\r\nb",
        "<|endoftext|><|endoftext|>",
    ]
    .map(Into::into)
    .into();
    seeds.extend(
        [
            "\u{feff}text",
            "é\u{301}😀\u{200d}👩🏽‍🚀",
            "\0\u{1}\u{7f}",
            "don't 's 'S we'll 3.14159 --\t--",
        ]
        .map(Into::into),
    );
    seeds.extend([b"text\xff".to_vec(), b"\xf4\x90\x80\x80".to_vec(), b"\xed\xa0\x80".to_vec()]);
    seeds.extend(
        [" ".repeat(3000) + "x", "a".repeat(3000), "0".repeat(3000), "\u{300}".repeat(1500)]
            .map(String::into_bytes),
    );
    seeds
}
