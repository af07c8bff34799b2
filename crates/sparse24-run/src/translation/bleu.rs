//! BLEU (Papineni et al. 2002) as sacrebleu computes it by default (Post 2018): cased, one
//! reference, 13a tokenization, exponential smoothing.

use std::collections::HashMap;

/// The longest n-gram.
const N: usize = 4;

/// The counts of a corpus.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bleu {
    /// n-grams of the translations that their references have too, for n = 1 to 4, each as often
    /// as in the reference at most.
    pub correct: [u64; N],
    /// n-grams of the translations.
    pub total: [u64; N],
    /// Tokens of the translations and of the references.
    pub lengths: [u64; 2],
}

impl Bleu {
    /// The settings in sacrebleu's form.
    pub const SIGNATURE: &str = concat!(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:sparse24-",
        env!("CARGO_PKG_VERSION")
    );

    /// The counts of translations and their references.
    #[must_use]
    pub fn of<'a>(pairs: impl IntoIterator<Item = [&'a str; 2]>) -> Self {
        let mut bleu = Self::default();
        pairs.into_iter().for_each(|pair| bleu.add(pair));
        bleu
    }

    /// Adds a translation and its reference.
    pub fn add(&mut self, pair: [&str; 2]) {
        let [found, reference] = pair.map(tokenized_13a);
        let [found, reference] =
            [&found, &reference].map(|text| text.split(' ').filter(|token| !token.is_empty()));
        let [found, reference]: [Vec<&str>; 2] = [found.collect(), reference.collect()];
        self.lengths[0] += found.len() as u64;
        self.lengths[1] += reference.len() as u64;
        for n in 1..=N {
            let mut left: HashMap<&[&str], u64> = HashMap::new();
            reference.windows(n).for_each(|gram| *left.entry(gram).or_default() += 1);
            for gram in found.windows(n) {
                self.total[n - 1] += 1;
                if let Some(count) = left.get_mut(gram).filter(|count| **count > 0) {
                    *count -= 1;
                    self.correct[n - 1] += 1;
                }
            }
        }
    }

    /// The brevity penalty times the geometric mean of the four precisions, in percent. The k-th
    /// precision of 0 counts as 1 / 2^k of an n-gram; without any correct n-gram, or without
    /// n-grams of four tokens, the score is 0.
    #[must_use]
    pub fn score(&self) -> f64 {
        if self.correct == [0; N] || self.total.contains(&0) {
            return 0.0;
        }
        let mut smoothing = 1.0;
        let logarithms = self.correct.iter().zip(&self.total).map(|(&correct, &total)| {
            let correct = if correct > 0 {
                correct as f64
            } else {
                smoothing *= 2.0;
                1.0 / smoothing
            };
            (correct / total as f64).ln()
        });
        let mean = logarithms.sum::<f64>() / N as f64;
        100.0 * self.brevity_penalty() * mean.exp()
    }

    /// e^(1 - r / c) for translations of c tokens that are shorter than their references of r.
    #[must_use]
    pub fn brevity_penalty(&self) -> f64 {
        let [found, reference] = self.lengths.map(|length| length as f64);
        if found >= reference { 1.0 } else { (1.0 - reference / found).exp() }
    }
}

/// The tokens of a line, apart by single spaces, as mteval-v13a.pl and sacrebleu find them.
#[must_use]
pub fn tokenized_13a(line: &str) -> String {
    // Python's white space has the separators of ASCII too.
    let is_space = |c: char| c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}');
    let line = line
        .trim_end_matches(is_space)
        .replace("<skipped>", "")
        .replace("-\n", "")
        .replace('\n', " ");
    let line = if line.contains('&') {
        line.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    } else {
        line
    };
    let is_symbol =
        |c: char| matches!(c, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/');
    let mut apart = String::with_capacity(2 * line.len() + 2);
    for c in format!(" {line} ").chars() {
        if is_symbol(c) {
            apart.extend([' ', c, ' ']);
        } else {
            apart.push(c);
        }
    }
    let is_stop = |c: char| matches!(c, '.' | ',');
    let is_digit = |c: char| c.is_ascii_digit();
    // Periods and commas are tokens but between digits, and so is a dash after a digit.
    let apart = pairs(&apart, |a, b| (!is_digit(a) && is_stop(b)).then_some([a, ' ', b, ' ']));
    let apart = pairs(&apart, |a, b| (is_stop(a) && !is_digit(b)).then_some([' ', a, ' ', b]));
    let apart = pairs(&apart, |a, b| (is_digit(a) && b == '-').then_some([a, ' ', b, ' ']));
    let tokens = apart.split(is_space).filter(|token| !token.is_empty());
    tokens.collect::<Vec<_>>().join(" ")
}

/// Replaces pairs of characters from left to right; a character is in one pair at most.
fn pairs(text: &str, replaced: impl Fn(char, char) -> Option<[char; 4]>) -> String {
    let mut out = String::with_capacity(2 * text.len());
    let mut characters = text.chars().peekable();
    while let Some(a) = characters.next() {
        match characters.peek().and_then(|&b| replaced(a, b)) {
            Some(four) => {
                out.extend(four);
                characters.next();
            }
            None => out.push(a),
        }
    }
    out
}

#[cfg(test)]
mod tests;
