//! Words of commands that messages print.

use std::path::Path;

/// Quotes a path or an argument as one word for a shell.
#[must_use]
pub fn word(text: impl AsRef<Path>) -> String {
    // A line feed would begin a line of its own.
    let text = text.as_ref().display().to_string().replace('\n', "\u{fffd}");
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,=@%:".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_quoted_only_where_needed() {
        for (path, expected) in [
            ("runs/a-1", "runs/a-1"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
            ("$x", "'$x'"),
            ("", "''"),
        ] {
            assert_eq!(word(path), expected);
        }
    }
}
