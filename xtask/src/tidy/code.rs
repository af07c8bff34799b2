//! Separates Rust and CUDA source into code, comments and literals, so that a rule about code does
//! not match prose and a rule about prose does not match strings. Lines keep their numbers. This is
//! a lexer, not a parser: macros are not expanded.

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Code,
    Comment,
    Literal,
}

/// `text` with every comment, string and character literal replaced by spaces.
pub(super) fn only(text: &str) -> String {
    keep(text, Part::Code)
}

/// `text` with everything but its comments replaced by spaces.
pub(super) fn comments(text: &str) -> String {
    keep(text, Part::Comment)
}

fn keep(text: &str, kept: Part) -> String {
    let source: Vec<char> = text.chars().collect();
    let mut result = String::with_capacity(text.len());
    let mut at = 0;
    while at < source.len() {
        let (part, end) = part(&source, at);
        let blank = |c: char| if part == kept || c == '\n' { c } else { ' ' };
        result.extend(source[at..end].iter().map(|&c| blank(c)));
        at = end;
    }
    result
}

/// Whether the identifier or word `word` occurs in `text`.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    text.split(|c| !is_part_of_name(c)).any(|part| part == word)
}

/// Whether `c` can be part of an identifier.
pub(super) fn is_part_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The kind of the part that starts at `at`, and where it ends.
fn part(source: &[char], at: usize) -> (Part, usize) {
    match (source[at], source.get(at + 1)) {
        ('/', Some('/')) => (Part::Comment, find(source, at, |rest| rest[0] == '\n')),
        ('/', Some('*')) => (Part::Comment, block_comment_end(source, at)),
        ('"', _) => (Part::Literal, quoted_end(source, at, '"')),
        ('\'', Some('\\')) => (Part::Literal, quoted_end(source, at, '\'')),
        // Anything else after a quote is a lifetime.
        ('\'', Some(_)) if source.get(at + 2) == Some(&'\'') => (Part::Literal, at + 3),
        ('r', Some('"' | '#')) => {
            raw_string_end(source, at).map_or((Part::Code, at + 1), |end| (Part::Literal, end))
        }
        _ => (Part::Code, at + 1),
    }
}

/// The first index from `at` on where `found` holds for the rest, or the end.
fn find(source: &[char], at: usize, found: impl Fn(&[char]) -> bool) -> usize {
    (at..source.len()).find(|&i| found(&source[i..])).unwrap_or(source.len())
}

fn block_comment_end(source: &[char], at: usize) -> usize {
    let (mut depth, mut i) = (1, at + 2);
    while depth > 0 && i < source.len() {
        let (change, step) = match source[i..] {
            ['/', '*', ..] => (1, 2),
            ['*', '/', ..] => (-1, 2),
            _ => (0, 1),
        };
        depth += change;
        i += step;
    }
    i
}

fn quoted_end(source: &[char], at: usize, quote: char) -> usize {
    let mut i = at + 1;
    while i < source.len() && source[i] != quote {
        i += if source[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(source.len())
}

/// The end of a raw string; `None` if the `r` at `at` does not start one.
fn raw_string_end(source: &[char], at: usize) -> Option<usize> {
    let hashes = source[at + 1..].iter().take_while(|&&c| c == '#').count();
    let in_name = at > 0 && is_part_of_name(source[at - 1]) && !matches!(source[at - 1], 'b' | 'c');
    if in_name || source.get(at + 1 + hashes) != Some(&'"') {
        return None;
    }
    let closes = |rest: &[char]| {
        rest[0] == '"' && rest[1..].iter().take_while(|&&c| c == '#').count() >= hashes
    };
    Some((find(source, at + hashes + 2, closes) + 1 + hashes).min(source.len()))
}

#[cfg(test)]
mod tests {
    use super::{comments, only};

    #[test]
    fn code_and_comments_are_separated() {
        for (source, code, prose) in [
            ("a // x\nb", "a     \nb", "  // x\n "),
            ("a /* x /* y */ z */ b", "a                   b", "  /* x /* y */ z */  "),
            (r#"f("x\"y") + 1"#, "f(      ) + 1", "             "),
            (r##"f(r#"x"y"#) + 1"##, "f(        ) + 1", "               "),
            (r#"f(br"\") + 1"#, "f(b    ) + 1", "            "),
            ("<'a>('x', '\\'', r#type)", "<'a>(   ,     , r#type)", "                       "),
            ("bar\"x//\"", "bar     ", "        "),
            ("\"open", "     ", "     "),
        ] {
            assert_eq!(only(source), code, "{source}");
            assert_eq!(comments(source), prose, "{source}");
        }
    }
}
