//! Separates Rust and CUDA source into code, comments and literals, so that a rule about code does
//! not match prose and a rule about prose does not match strings. Lines keep their numbers. Macros
//! are not expanded, comments do not nest, and raw strings have at most two `#`.

use std::sync::LazyLock;

use regex::{Captures, Regex};

/// A comment, or a string or character literal. Any other quote starts a lifetime.
static PARTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r##"(?xs)
        (?<comment> //[^\n]* | /\*.*?(\*/|\z) )
        | \b[bc]?r"[^"]*("|\z) | \b[bc]?r\#".*?("\#|\z) | \b[bc]?r\#\#".*?("\#\#|\z)
        | "(\\.|[^"\\])*("|\z)
        | '(\\.[^']*|[^\\'])'"##,
    )
});

pub(super) fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is valid")
}

/// `text` with every comment, string and character literal replaced by spaces.
pub(super) fn only(text: &str) -> String {
    PARTS.replace_all(text, |part: &Captures<'_>| blank(&part[0])).into_owned()
}

/// `text` with everything but its comments replaced by spaces.
pub(super) fn comments(text: &str) -> String {
    let (mut result, mut end) = (String::new(), 0);
    for comment in PARTS.captures_iter(text).filter_map(|part| part.name("comment")) {
        result += &blank(&text[end..comment.start()]);
        result += comment.as_str();
        end = comment.end();
    }
    result + &blank(&text[end..])
}

fn blank(text: &str) -> String {
    text.chars().map(|c| if c == '\n' { c } else { ' ' }).collect()
}

#[cfg(test)]
mod tests {
    use super::{comments, only};

    #[test]
    fn code_and_comments_are_separated() {
        for (source, code, prose) in [
            ("a // x\nb", "a     \nb", "  // x\n "),
            ("a /* x\n */ b", "a     \n    b", "  /* x\n */  "),
            (r#"f("x\"y") + 1"#, "f(      ) + 1", "             "),
            (r##"f(r#"x"y"#) + 1"##, "f(        ) + 1", "               "),
            (r#"f(br"\") + 1"#, "f(     ) + 1", "            "),
            ("<'a>('x', '\\'', r#type)", "<'a>(   ,     , r#type)", "                       "),
            ("bar\"x//\"", "bar     ", "        "),
            ("\"open", "     ", "     "),
        ] {
            assert_eq!(only(source), code, "{source}");
            assert_eq!(comments(source), prose, "{source}");
        }
    }
}
