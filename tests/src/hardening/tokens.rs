//! Token shards in their three layouts, folders of them, tokenizer files, and text.
//!
//! Every id is below its vocabulary, and text survives encoding and decoding.

use std::{fs, path::Path};

use sparse24_run::{
    Error,
    data::{
        Corpus, Dataset, Draw, Tokenizer, TokenizerKind,
        shard::{self, Shard},
    },
};

use super::{Files, document::Document, file, files, path, read, refused};

const HEADER: usize = 128;

pub(super) fn shard(bytes: &[u8]) -> bool {
    let mut is_read = false;
    for bytes in [bytes, &*sealed(bytes)] {
        let path = file("shard.bin", bytes);
        for vocabulary in [None, Some(300)] {
            is_read |= match read_all(&path, vocabulary) {
                Ok((shard, ids)) => accepted(&shard, &ids, vocabulary),
                Err(error) => refused(&error, "shard.bin"),
            }
        }
    }
    is_read
}

/// All ids of a shard, verified.
fn read_all(path: &Path, vocabulary: Option<u32>) -> Result<(Shard, Vec<u32>), Error> {
    let shard = Shard::open(path, vocabulary)?;
    shard.verify()?;
    let mut ids = Vec::new();
    shard.copy_to(0, shard.len(), &mut ids)?;
    Ok((shard, ids))
}

fn accepted(shard: &Shard, ids: &[u32], asked: Option<u32>) -> bool {
    let vocabulary = shard.origin().map(|origin| origin.vocabulary).or(asked);
    assert!(vocabulary.is_none_or(|vocabulary| ids.iter().all(|&id| id < vocabulary)));
    if let Some(origin) = shard.origin() {
        let again = path("again.bin");
        shard::write(&again, origin, |shard| shard.push(ids)).unwrap();
        assert_eq!(read_all(&again, vocabulary).unwrap().1, ids);
    }
    true
}

/// A shard of our layout with its checksums recomputed; any other file unchanged.
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
    let path = path("made.bin");
    let origin = shard::Origin { vocabulary, tokenizer: tokenizer.fingerprint() };
    shard::write(&path, origin, |shard| shard.push(ids)).unwrap();
    read(path)
}

/// A shard in llm.c's layout.
fn llm_c(magic: u32, version: u32, count: u32, ids: &[u8]) -> Vec<u8> {
    let mut bytes = [magic, version, count].map(u32::to_le_bytes).concat();
    bytes.resize(1024, 0);
    bytes.extend(ids);
    bytes
}

pub(super) fn shard_seeds() -> Files {
    let narrow = ours(300, &[1, 2, 299], &Tokenizer::Byte);
    let wide = ours(70_000, &[5, 69_999], &Tokenizer::Byte);
    let mut seeds = vec![narrow.clone(), wide, Vec::new(), vec![7], vec![1, 0, 200, 0]];
    seeds.extend([b"S24T".to_vec(), narrow[..HEADER].to_vec()]);
    for (at, number) in
        [(4, 2), (8, 3), (8, 4), (12, 0), (12, u32::MAX), (16, u32::MAX), (20, u32::MAX), (0, 0)]
    {
        let mut lying = narrow.clone();
        lying[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
        seeds.push(sealed(&lying));
    }
    let ids = [7, 0, 0, 0, 9, 1, 0, 0];
    for count in [2, 1, 0, u32::MAX] {
        seeds.push(llm_c(20_240_520, 1, count, &ids[..4]));
        seeds.extend([20_240_801, 20_240_520].map(|magic| llm_c(magic, 7, count, &ids)));
    }
    seeds
        .extend([llm_c(20_240_801, 7, 1, &[0xff; 4]), llm_c(20_240_520, 1, 1, &[])[..12].to_vec()]);
    seeds
}

/// Shards of many lengths in every layout, whole, cut and extended.
pub(super) fn shard_variants() -> Files {
    let mut variants = Vec::new();
    // Few ids, around the blocks of the hash and of the reader, and many.
    for count in [0, 1, 2, 3, 31, 63, 64, 65, 255, 256, 448, 512, 960, 1024, 1984, 2048, 4000] {
        let ids: Vec<u32> = (0..count).map(|id| id % 300).collect();
        let bytes: Vec<u32> = ids.iter().map(|id| id % 256).collect();
        let narrow: Vec<u8> = ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect();
        let wide: Vec<u8> = ids.iter().flat_map(|&id| id.to_le_bytes()).collect();
        for whole in [
            ours(256, &bytes, &Tokenizer::Byte),
            ours(300, &ids, &Tokenizer::Byte),
            ours(70_000, &ids, &Tokenizer::Byte),
            llm_c(20_240_520, 1, count, &narrow),
            llm_c(20_240_801, 7, count, &wide),
            narrow,
        ] {
            let cuts =
                (1..=5).filter_map(|cut| Some(whole[..whole.len().checked_sub(cut)?].to_vec()));
            variants.extend(cuts);
            variants.extend([[&whole[..], &[0]].concat(), [&whole[..], &[0; 4]].concat(), whole]);
        }
    }
    variants
}

/// The lengths of `train.bin` and `val.bin`, two bytes each, then both, then `tokenizer.json` if
/// anything is left.
pub(super) fn folder(bytes: &[u8]) -> bool {
    let Some((lengths, rest)) = bytes.split_first_chunk::<4>() else { return false };
    let length = |at: usize| usize::from(u16::from_le_bytes([lengths[at], lengths[at + 1]]));
    let (first, rest) = rest.split_at(length(0).min(rest.len()));
    let (second, tokenizer) = rest.split_at(length(2).min(rest.len()));
    file("data/train.bin", &sealed(first));
    file("data/val.bin", &sealed(second));
    let folder = path("data");
    let described = file("data/tokenizer.json", tokenizer);
    if tokenizer.is_empty() {
        fs::remove_file(described).unwrap();
    }
    let mut is_usable = false;
    for kind in [None, Some(TokenizerKind::Byte), Some(TokenizerKind::Character)] {
        is_usable |= match Dataset::open(Some(&folder), kind, 0.1) {
            Ok(dataset) => usable(&dataset),
            Err(error) => refused(&error, "data"),
        }
    }
    match Dataset::open_with(&folder, Tokenizer::Byte, 0.1) {
        Ok(dataset) => assert_eq!(dataset.vocabulary(), 256),
        Err(error) => _ = refused(&error, "data"),
    }
    is_usable
}

/// A dataset returns batches and windows of ids below its vocabulary.
fn usable(dataset: &Dataset) -> bool {
    let vocabulary = dataset.vocabulary();
    for split in [dataset.train(), dataset.validation()] {
        let checked = split.for_each_piece(|ids| {
            assert!(ids.iter().all(|&id| id < vocabulary));
            Ok(())
        });
        checked.unwrap();
    }
    for context in [1, 3] {
        if let Err(error) = dataset.check_context(context) {
            return refused(&error, "data");
        }
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let draw = Draw { seed: 1, step: 2, micro_step: 3, sequences: 3, context };
        dataset.batch(draw, &mut inputs, &mut targets).unwrap();
        assert_eq!(inputs.len(), 3 * context);
        assert!(inputs.iter().chain(&targets).all(|&id| id < vocabulary));
        let windows = dataset.evaluation_windows(context, 0);
        let counted =
            (0..windows.count()).map(|at| windows.fill(at, 1, &mut inputs, &mut targets).unwrap());
        assert_eq!(counted.sum::<usize>(), windows.predictions());
    }
    true
}

fn pack(train: &[u8], validation: &[u8], tokenizer: &[u8]) -> Vec<u8> {
    let lengths = [train.len() as u16, validation.len() as u16].map(u16::to_le_bytes).concat();
    [&lengths, train, validation, tokenizer].concat()
}

/// A tokenizer's file.
fn described(tokenizer: &Tokenizer) -> Vec<u8> {
    let path = path("described.json");
    tokenizer.save(&path).unwrap();
    read(path)
}

fn abc() -> Tokenizer {
    Tokenizer::Character(vec!['a', 'b', 'c'])
}

pub(super) fn folder_seeds() -> Files {
    let [byte, abc_file] = [Tokenizer::Byte, abc()].map(|tokenizer| described(&tokenizer));
    let [train, validation] =
        [&[1, 2, 3, 4, 5][..], &[6, 7, 8]].map(|ids| ours(256, ids, &Tokenizer::Byte));
    let raw: (&[u8], &[u8]) = (&[1, 0, 2, 0, 3, 0, 4, 0], &[5, 0, 6, 0]);
    let one = llm_c(20_240_801, 7, 1, &[0xff; 4]);
    let two = llm_c(20_240_801, 7, 2, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    vec![
        pack(&train, &validation, &byte),
        pack(&ours(3, &[0, 1, 2, 1], &abc()), &ours(3, &[2, 1], &abc()), &abc_file),
        pack(&train, &validation, &abc_file),
        pack(&train, &validation, b""),
        pack(raw.0, raw.1, b""),
        pack(raw.0, raw.1, &byte),
        pack(&[], &[], b""),
        pack(&[], &[], &byte),
        pack(&one, &two, b""),
        pack(&[0xff; 8], &[0xff; 4], b""),
    ]
}

pub(super) fn folder_variants() -> Files {
    let byte = described(&Tokenizer::Byte);
    let [train, validation] = [&[0, 1, 2, 0, 1][..], &[2, 1, 0]].map(|ids| ours(3, ids, &abc()));
    let other = ours(256, &[1, 2, 3, 4, 5], &Tokenizer::Byte);
    let tokenizers = tokenizer_variants();
    let mut variants: Vec<_> =
        tokenizers.iter().step_by(5).map(|file| pack(&train, &validation, file)).collect();
    for shard in shard_variants() {
        variants.extend([&byte[..], b""].map(|tokenizer| pack(&shard, &shard, tokenizer)));
        variants.extend([pack(&shard, &other, &byte), pack(&other, &shard, &byte)]);
    }
    variants
}

pub(super) fn tokenizer(bytes: &[u8]) -> bool {
    let loaded = match Tokenizer::load(&file("tokenizer.json", bytes)) {
        Ok(loaded) => loaded,
        Err(error) => return refused(&error, "tokenizer.json"),
    };
    let again = path("again.json");
    loaded.save(&again).unwrap();
    let again = Tokenizer::load(&again).unwrap();
    assert_eq!((&again, again.fingerprint()), (&loaded, loaded.fingerprint()));
    let ids: Vec<u32> = (0..loaded.vocabulary()).collect();
    assert!(!ids.is_empty(), "an empty vocabulary");
    let text = loaded.decode(&ids).unwrap();
    if let (Tokenizer::Character(_), Ok(text)) = (&loaded, str::from_utf8(&text)) {
        assert_eq!(loaded.encode(text).unwrap(), ids);
    }
    assert!(loaded.decode(&[loaded.vocabulary()]).is_err());
    true
}

pub(super) fn tokenizer_seeds() -> Files {
    let mut seeds = vec![described(&abc()), described(&Tokenizer::Byte)];
    seeds.push(described(&Tokenizer::for_text(TokenizerKind::Gpt2, "").unwrap()));
    seeds.push(described(&Tokenizer::Character(vec!['\n', 'a', '\u{e9}', '\u{1f600}'])));
    seeds.extend(files(&["", "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\"}}"]));
    seeds.push(b"{\"kind\":\"char\",\"characters\":\"\xff\"}".to_vec());
    seeds
}

pub(super) fn tokenizer_variants() -> Files {
    let text = String::from_utf8(described(&abc())).expect("JSON");
    let words = ["byte", "char", "gpt2", "ba", "aa", "a\n\u{e9}\u{1f600}"];
    Document::json(&text, &words).variants(String::into_bytes)
}

pub(super) fn corpus(bytes: &[u8]) -> bool {
    let corpus = match Corpus::open(&file("corpus.txt", bytes)) {
        Ok(corpus) => corpus,
        Err(error) => return refused(&error, "corpus.txt"),
    };
    let mut is_tokenized = false;
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
            part.copy_to(0, part.len(), &mut ids).unwrap();
        }
        let text = tokenizer.decode(&ids).unwrap();
        // WordPiece leaves out case, accents and the spaces between words and punctuation.
        assert!(kind == TokenizerKind::WordPiece || text == bytes, "{}", kind.name());
        is_tokenized = true;
    }
    is_tokenized
}

pub(super) fn corpus_seeds() -> Files {
    let mut seeds = files(&[
        "to be, or not to be: that is the question",
        "",
        " \n\t",
        "x",
        "\r\na\r\nb",
        "<|endoftext|><|endoftext|>",
        "\u{feff}text",
        "\u{e9}\u{301}\u{1f600}\u{200d}\u{1f469}\u{1f3fd}\u{200d}\u{1f680}",
        "\0\u{1}\u{7f}",
        "don't 's 'S we'll 3.14159 --\t--",
        &(" ".repeat(3000) + "x"),
        &"a".repeat(3000),
        &"0".repeat(3000),
        &"\u{300}".repeat(1500),
    ]);
    seeds.extend([b"text\xff".to_vec(), b"\xf4\x90\x80\x80".to_vec(), b"\xed\xa0\x80".to_vec()]);
    seeds
}

/// Cuts, also within characters.
pub(super) fn corpus_variants() -> Files {
    (0..12).map(|end| "to\r\n\u{e9}\u{20ac}\u{1f600}".as_bytes()[..end].to_vec()).collect()
}
