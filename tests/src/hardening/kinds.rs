//! The kinds of values that JSON and TOML can write, and fail to write: what their readers tell
//! apart byte by byte.

/// The kinds of JSON's values.
pub(super) fn json() -> Vec<String> {
    let mut kinds = written(include_str!("kinds/json.txt"));
    kinds.extend(large_json());
    kinds
}

/// A word as a text of JSON, and as the variant that an object names.
pub(super) fn words(word: &str) -> [String; 9] {
    let text = format!("\"{word}\"");
    [
        format!("{{{text}:null}}"),
        format!("\n{{\t{text} :\r null }}"),
        format!("{{{text}:0}}"),
        format!("{{{text}:null,\"x\":0}}"),
        format!("{{{text}}}"),
        format!("{{{text}:"),
        format!("{{{text}:null"),
        format!("\t{text}\r"),
        text,
    ]
}

/// A value of each kind of JSON, with space wherever it may stand.
pub(super) const SPACED: [&str; 7] = [
    " null ",
    "true ",
    "false ",
    "-1.5e+5 ",
    "\"\\ud83d\\ude00\\n\u{e9}\" ",
    "[ 0 , 0 ] ",
    "{ \"x\" : 0 , \"y\" : 0 } ",
];

/// Numbers of every magnitude of 32-bit floats and beyond it, of few digits and of many.
pub(super) fn floats() -> impl Iterator<Item = String> {
    let digits = ["1", "5.5", "9.999999", "1.17549435", "-1.2345678901234567"];
    (-48..=40).flat_map(move |exponent| digits.map(|digits| format!("{digits}e{exponent}")))
}

/// A word with a letter too few, too many, another, or swapped with the next, in letters of ASCII
/// and others.
pub(super) fn slips(word: &str) -> Vec<String> {
    let letters: Vec<char> = word.chars().collect();
    let spelled = |letters: &[&[char]]| letters.concat().into_iter().collect::<String>();
    let around = |at: usize| {
        let (before, letter, after) = (&letters[..at], letters[at], &letters[at + 1..]);
        let next =
            after.split_first().map(|(next, after)| spelled(&[before, &[*next, letter], after]));
        let others = [&[][..], &['x'], &['\u{e9}'], &['x', letter]]
            .map(|other| spelled(&[before, other, after]));
        others.into_iter().chain(next)
    };
    (0..letters.len()).flat_map(around).collect()
}

/// Words beyond ASCII, in which no letter stands twice, up to the longest that is compared with
/// known ones: 64 bytes.
pub(super) fn foreign() -> impl Iterator<Item = String> {
    let word = |length: u32, apart: u32| {
        (0..length).filter_map(|letter| char::from_u32(0x100 + apart * letter)).collect()
    };
    (1..=32).flat_map(move |length| [1, 8, 16].map(|apart| word(length, apart)))
}

/// The kinds of TOML's values.
pub(super) fn toml() -> Vec<String> {
    written(include_str!("kinds/toml.txt"))
}

/// The ways to write a key and its value in TOML.
pub(super) fn toml_lines(key: &str, value: &str) -> Vec<String> {
    named(include_str!("kinds/toml_lines.txt"), &[('k', key), ('v', value)])
}

/// The ways to write the name of a table in TOML.
pub(super) fn toml_headers(name: &str) -> Vec<String> {
    named(include_str!("kinds/toml_headers.txt"), &[('t', name)])
}

/// Kinds in which letters stand for texts; `h` is the number of the first one's first character in
/// hexadecimal, `r` what follows it.
fn named(kinds: &str, texts: &[(char, &str)]) -> Vec<String> {
    let mut rest = texts[0].1.chars();
    let first = rest.next().map_or(0, u32::from);
    let put = |found| match found {
        'h' => format!("{first:04x}"),
        'r' => rest.as_str().to_owned(),
        _ => texts
            .iter()
            .find(|(letter, _)| *letter == found)
            .map_or_else(|| found.to_string(), |(_, text)| (*text).to_owned()),
    };
    written(kinds).iter().map(|line| line.chars().map(put).collect()).collect()
}

/// Numbers that take more than one machine word to read as the nearest 64-bit float: long ones, and
/// those halfway between two floats or next to it.
pub(super) fn long_numbers() -> Vec<String> {
    let mut numbers = Vec::new();
    let exponents = [
        -1200, -400, -342, -325, -308, -150, -30, -17, -1, 0, 1, 9, 22, 38, 150, 290, 308, 309, 400,
    ];
    for zeros in [0, 1, 3, 20, 110, 400, 780] {
        let zeros = "0".repeat(zeros);
        let small = format!("0.{zeros}12345678901234567891");
        for digits in [format!("1{zeros}"), "9".repeat(zeros.len() + 17)] {
            numbers.extend([format!("{digits}.5"), format!("{digits}.{digits}")]);
            numbers.extend(exponents.map(|exponent| format!("{digits}e{exponent}")));
        }
        numbers.extend([format!("-{small}"), small.clone()]);
        numbers.extend(exponents.map(|exponent| format!("{small}e{exponent}")));
    }
    // m 2^k and m 2^-k = m 5^k 10^-k, where m is a bit too long; a short one is for floats below
    // 2^-1022, which have fewer bits.
    for odd in [(1_u64 << 53) + 1, (1 << 53) + 3, (1 << 54) - 1, 1, 3, 7] {
        for k in [
            0, 1, 2, 5, 9, 10, 11, 20, 30, 53, 64, 75, 100, 200, 400, 700, 900, 970, 971, 1010,
            1021, 1022, 1060, 1074, 1075, 1080,
        ] {
            numbers.extend(halfway(odd, 2, k, 0));
            numbers.extend(halfway(odd, 5, k, -k));
        }
    }
    for k in (3..1080).step_by(7) {
        numbers.extend(halfway((1 << 53) + 1, 2, k, 0).into_iter().take(1));
        numbers.extend(halfway((1 << 53) + 3, 5, k, -k).into_iter().take(1));
    }
    numbers
}

/// The number m f^k 10^e, written in several ways, and its neighbours.
fn halfway(odd: u64, factor: u32, k: i32, exponent: i32) -> Vec<String> {
    let digits = (0..k).fold(odd.to_string(), |digits, _| multiplied(&digits, factor));
    let length = digits.len() as i32;
    let (before, last) = digits.split_at(digits.len() - 1);
    let mut numbers = Vec::new();
    numbers.extend(
        ["", "1", "00000000000000000000", "000000000000000000001"]
            .map(|more| format!("{digits}.{more}0e{exponent}")),
    );
    numbers.extend([0, 1, 18, 19, 300].map(|zeros| {
        format!("0.{}{digits}e{}", "0".repeat(zeros), exponent + length + zeros as i32)
    }));
    if let Some(less) = last.parse::<u32>().ok().and_then(|last| last.checked_sub(1)) {
        numbers.push(format!("{before}{less}.99999999999999999999e{exponent}"));
    }
    let (whole, fraction) = digits.split_at(digits.len().div_ceil(2));
    numbers.extend([
        format!("{digits}e{exponent}"),
        format!("{whole}.{fraction}0e{}", exponent + fraction.len() as i32),
    ]);
    numbers
}

/// The digits of a number times another.
pub(super) fn multiplied(digits: &str, factor: u32) -> String {
    let mut carry = 0;
    let mut product = Vec::with_capacity(digits.len() + 2);
    for digit in digits.bytes().rev() {
        let sum = u32::from(digit - b'0') * factor + carry;
        product.push(b'0' + (sum % 10) as u8);
        carry = sum / 10;
    }
    let carried = if carry > 0 { carry.to_string() } else { String::new() };
    carried.chars().chain(product.iter().rev().map(|&digit| char::from(digit))).collect()
}

/// Objects and arrays of so many values that a map of them has levels, and of so many levels.
fn large_json() -> Vec<String> {
    let mut kinds = Vec::new();
    for count in [5, 6, 11, 12, 13, 24, 72, 144, 200] {
        let many =
            |one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<Vec<_>>().join(",");
        kinds.extend(["0", "\"x\"", "{}", "[0]"].map(|value| {
            format!("{{{}}}", many(&|key| format!("\"k{}\":{value}", key * 37 % count)))
        }));
        kinds.extend(
            ["0", "\"x\"", "{}", "[0]"].map(|value| format!("[{}]", many(&|_| value.to_owned()))),
        );
        kinds.extend(["[", "{\"x\":"].map(|open| format!("{}0", open.repeat(count))));
        kinds.push(format!("{}{}", "[".repeat(count), "]".repeat(count)));
        kinds.push(format!("{}0{}", "{\"x\":".repeat(count), "}".repeat(count)));
    }
    kinds
}

/// What is read in wide steps, at every length up to a few of them.
pub(super) fn lengths() -> impl Iterator<Item = usize> {
    (0..=160).chain([255, 256, 257, 511, 512, 513, 1023, 1024, 1025])
}

/// What JSON and TOML are written with, and what they are not.
pub(super) const SYNTAX: [&str; 22] = [
    " ", "\t", "\n", "\r", "\r\n", "\u{c}", "\0", ",", ":", "=", ".", "\"", "'", "\\", "[", "]",
    "{", "}", "#", "0", "x", "\u{e9}",
];

/// An error after so many lines, and after so much of a line.
pub(super) fn late_errors() -> impl Iterator<Item = String> {
    lengths().flat_map(|length| {
        [
            format!("{}!", "\n".repeat(length)),
            format!("\n{}!", " ".repeat(length)),
            format!("{}\u{e9}!", " ".repeat(length)),
        ]
    })
}

/// A kind a line; the pictures of control characters and of the space become those.
fn written(kinds: &str) -> Vec<String> {
    let control = |picture| match picture {
        '␀'..='␠' => char::from((picture as u32 - '␀' as u32) as u8),
        '␡' => '\u{7f}',
        other => other,
    };
    kinds.lines().map(|kind| kind.chars().map(control).collect()).collect()
}
