//! Tokens and scores beside sacrebleu's.

use super::*;

const LINES: &str = include_str!("../../../assets/corpus.txt");
const SCORES: &str = include_str!("scores.txt");

/// The score of a corpus whose translations and references are these lines.
fn score(found: &[&str], reference: &[&str]) -> f64 {
    Bleu::of(found.iter().zip(reference).map(|(&a, &b)| [a, b])).score()
}

#[test]
fn lines_have_the_tokens_of_13a() {
    for (line, expected) in [
        ("Hello, World!", "Hello , World !"),
        ("It costs 1,000.50 (2-3) Euro.", "It costs 1,000.50 ( 2 - 3 ) Euro ."),
        ("A.B. c-d 5-6 'x'", "A . B . c-d 5 - 6 'x'"),
        ("&quot;a&amp;b&quot; &lt;", "\" a & b \" <"),
        ("ein-\nfach <skipped>so\n", "einfach so"),
        ("\u{201e}Gr\u{f6}\u{df}e\u{201c} \u{a0}x", "\u{201e}Gr\u{f6}\u{df}e\u{201c} x"),
        ("", ""),
    ] {
        assert_eq!(tokenized_13a(line), expected, "{line:?}");
    }
}

#[test]
fn scores_of_small_corpora_are_those_of_sacrebleu() {
    for (found, reference, expected) in [
        (&["the cat sat on the mat"][..], &["the cat sat on the mat"][..], 100.00000000000004),
        (&["a b c d e f"][..], &["a b c x y z"][..], 30.213753973567677),
        (&["a b"][..], &["a b"][..], 0.0),
        (&["x y z w"][..], &["a b c d"][..], 0.0),
        (&["a b c d e x y"][..], &["a b c d z e x y q r s t"][..], 29.10832123176842),
        (&["Ein Hund, der läuft."][..], &["Ein Hund, der rennt und läuft."][..], 43.29820146406896),
        (&["the the the the the"][..], &["the cat is on the mat"][..], 10.400597689005304),
    ] {
        let score = score(found, reference);
        assert!((score - expected).abs() <= 1e-9, "{found:?}: {score}");
    }
}

/// Pairs of a linear congruential generator: 500 of random characters, then 500 of lines of the
/// embedded corpus. `tests/peers/bleu.py` makes the same ones.
struct Pairs {
    state: u32,
    characters: Vec<&'static str>,
    lines: Vec<&'static str>,
}

impl Pairs {
    fn new() -> Self {
        let singles = "    abcdeABC0123456789....,,,,----&&;;:!?'\"()[]{}<>/@#$%^*_`~|+=\\\
                       \u{e4}\u{df}\u{20ac}\u{201e}\u{201c}\u{2013}\u{a0}\u{2009}\
                       \u{3000}\t\u{1c}\u{85}";
        let characters = singles.split("").filter(|single| !single.is_empty());
        let others = ["&amp;", "&quot;", "&lt;", "<skipped>", "-\n", "\n"];
        let lines = LINES.split('\n').collect();
        Self { state: 1, characters: characters.chain(others).collect(), lines }
    }

    fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.state >> 16) as usize % n
    }

    fn character(&mut self) -> &'static str {
        let at = self.below(self.characters.len());
        self.characters[at]
    }

    /// A line with words, in words.
    fn words(&mut self) -> Vec<&'static str> {
        loop {
            let at = self.below(self.lines.len());
            if !self.lines[at].trim_matches(' ').is_empty() {
                return self.lines[at].split(' ').collect();
            }
        }
    }

    /// The reference, and before it the same with some units dropped, replaced or doubled.
    fn pair(
        &mut self,
        reference: &[&'static str],
        draw: fn(&mut Self) -> &'static str,
        between: &str,
    ) -> [String; 2] {
        let mut found = Vec::new();
        for &unit in reference {
            match self.below(10) {
                0 => {}
                1 => found.push(draw(self)),
                2 => found.extend([unit, unit]),
                _ => found.push(unit),
            }
        }
        [found.join(between), reference.join(between)]
    }

    fn random(&mut self) -> [String; 2] {
        let length = 1 + self.below(60);
        let reference: Vec<_> = (0..length).map(|_| self.character()).collect();
        self.pair(&reference, Self::character, "")
    }

    fn real(&mut self) -> [String; 2] {
        let reference = self.words();
        self.pair(&reference, |pairs| pairs.words()[0], " ")
    }
}

#[test]
fn scores_of_random_and_real_pairs_are_those_of_sacrebleu() {
    let mut pairs = Pairs::new();
    let mut made: Vec<_> = (0..500).map(|_| pairs.random()).collect();
    made.extend((0..500).map(|_| pairs.real()));
    let score = |made: &[[String; 2]]| {
        Bleu::of(made.iter().map(|pair| pair.each_ref().map(String::as_str))).score()
    };
    let expected: Vec<f64> =
        SCORES.split_whitespace().map(|score| score.parse().expect("a number")).collect();
    assert_eq!(expected.len(), made.len());
    for (pair, expected) in made.iter().zip(expected) {
        // Stored with four decimals.
        let found = score(std::slice::from_ref(pair));
        assert!((found - expected).abs() <= 5.1e-5, "{found} for {expected}: {pair:?}");
    }
    // sacrebleu sums the same logarithms, so only rounding differs.
    for (made, expected) in [
        (&made[..500], 42.48343511193005),
        (&made[500..], 72.21525210772144),
        (&made[..], 54.28160192934336),
    ] {
        let found = score(made);
        assert!((found - expected).abs() <= 1e-9, "{found} for {expected}");
    }
}
