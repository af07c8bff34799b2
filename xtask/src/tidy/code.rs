//! Rust source reduced to its code: what stands inside comments, strings and characters is blanked,
//! so that a rule about code does not trip over prose. Lines keep their numbers. This is a lexer
//! for looking, not a parser: macros are not expanded.

/// `text` with a space for each character inside a comment, a string or a character literal.
pub(super) fn only(text: &str) -> String {
    let source: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < source.len() {
        let end = literal_end(&source, at);
        if end == at {
            code.push(source[at]);
            at += 1;
        } else {
            code.extend(source[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    code
}

/// The lines, from 1, on which `word` stands whole in `code`.
pub(super) fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    let whole = |line: &str, at: usize| {
        let (before, after) =
            (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
        !before.is_some_and(part_of_word) && !after.is_some_and(part_of_word)
    };
    let numbered = (1..).zip(code.lines());
    numbered
        .filter(|(_, line)| line.match_indices(word).any(|(at, _)| whole(line, at)))
        .map(|(number, _)| number)
        .collect()
}

/// Where the comment or literal that starts at `at` ends; `at` if none starts there.
fn literal_end(source: &[char], at: usize) -> usize {
    match (source[at], source.get(at + 1)) {
        ('/', Some('/')) => find(source, at, |rest| rest[0] == '\n'),
        ('/', Some('*')) => block_comment_end(source, at),
        ('"', _) => quoted_end(source, at, '"'),
        ('\'', Some('\\')) => quoted_end(source, at, '\''),
        // Anything else after a quote is a lifetime.
        ('\'', Some(_)) if source.get(at + 2) == Some(&'\'') => at + 3,
        ('r', Some('"' | '#')) => raw_string_end(source, at),
        _ => at,
    }
}

/// The first place from `at` on where `found` holds for the rest, or the end.
fn find(source: &[char], at: usize, found: impl Fn(&[char]) -> bool) -> usize {
    (at..source.len()).find(|&i| found(&source[i..])).unwrap_or(source.len())
}

fn block_comment_end(source: &[char], at: usize) -> usize {
    let (mut depth, mut i) = (1, at + 2);
    while depth > 0 && i < source.len() {
        let step = match source[i..] {
            ['/', '*', ..] => {
                depth += 1;
                2
            }
            ['*', '/', ..] => {
                depth -= 1;
                2
            }
            _ => 1,
        };
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

fn raw_string_end(source: &[char], at: usize) -> usize {
    let hashes = source[at + 1..].iter().take_while(|&&c| c == '#').count();
    let part_of_name = at > 0
        && (source[at - 1].is_alphanumeric() || source[at - 1] == '_')
        && !matches!(source[at - 1], 'b' | 'c');
    if part_of_name || source.get(at + 1 + hashes) != Some(&'"') {
        return at;
    }
    let closes = |rest: &[char]| {
        rest[0] == '"' && rest[1..].iter().take_while(|&&c| c == '#').count() >= hashes
    };
    (find(source, at + hashes + 2, closes) + 1 + hashes).min(source.len())
}

#[cfg(test)]
mod tests {
    use super::{lines_with_word, only};

    #[test]
    fn prose_is_blanked_and_code_stays() {
        for (source, code) in [
            ("a // x\nb", "a     \nb"),
            ("a /* x /* y */ z */ b", "a                   b"),
            (r#"f("x\"y") + 1"#, "f(      ) + 1"),
            (r##"f(r#"x"y"#) + 1"##, "f(        ) + 1"),
            (r#"f(br"\") + 1"#, "f(b    ) + 1"),
            ("f::<'a>('x', '\\'', r#type)", "f::<'a>(   ,     , r#type)"),
            ("bar\"x\"", "bar   "),
            ("\"open", "     "),
        ] {
            assert_eq!(only(source), code, "{source}");
        }
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(lines_with_word("unsafe {\nunsafe_code\n xunsafe\n (unsafe)", "unsafe"), [1, 4]);
    }
}
