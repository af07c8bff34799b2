//! Separates the code of Rust source from comments and literals, so that a rule about code does not
//! match prose. Lines keep their numbers. Macros are not expanded, comments do not nest, and raw
//! strings have at most two `#`.

use std::sync::LazyLock;

use regex::{Captures, Regex};

/// A comment, or a string or character literal. Any other quote starts a lifetime.
static PARTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r##"(?xs)
        //[^\n]* | /\*.*?(\*/|\z)
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
    let blank = |part: &Captures<'_>| -> String {
        part[0].chars().map(|c| if c == '\n' { c } else { ' ' }).collect()
    };
    PARTS.replace_all(text, blank).into_owned()
}

#[cfg(test)]
mod tests {
    use super::only;

    #[test]
    fn comments_and_literals_are_blank() {
        for (source, code) in [
            ("a // x\nb", "a     \nb"),
            ("a /* x\n */ b", "a     \n    b"),
            (r#"f("x\"y") + 1"#, "f(      ) + 1"),
            (r##"f(r#"x"y"#) + 1"##, "f(        ) + 1"),
            (r#"f(br"\") + 1"#, "f(     ) + 1"),
            ("<'a>('x', '\\'', r#type)", "<'a>(   ,     , r#type)"),
            ("bar\"x//\"", "bar     "),
            ("\"open", "     "),
        ] {
            assert_eq!(only(source), code, "{source}");
        }
    }
}
