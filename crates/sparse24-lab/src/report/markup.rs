//! Pieces of a page: escaped text, numbers as a reader wants them, tables.
//!
//! Invariant: what comes from a file passes through [`Text`] (or is a number), so it is text and
//! nothing else, and the page is well-formed as XML too.

use std::fmt::{self, Display, Write};

/// Text between tags or in a quoted attribute.
pub(super) struct Text<'a>(pub(super) &'a str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            '\n' | '\t' => f.write_char(c),
            // No character of XML, or one that turns the text around it.
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                f.write_char('\u{fffd}')
            }
            c if c.is_control() => f.write_char('\u{fffd}'),
            c => f.write_char(c),
        })
    }
}

/// A number with so many significant digits, at most: `0.00123`, `2.84`, `38.3·10³`, `6·10⁻⁶`; a
/// dash for none.
pub(super) fn number(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    let exponential = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) =
        exponential.split_once('e').expect("the exponential form has an exponent");
    let exponent: i32 = exponent.parse().expect("an exponent is an integer");
    let plain = |text: &str| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text.to_owned()
        }
    };
    match exponent {
        -4..=5 => {
            signed(&plain(&format!("{value:.*}", (digits as i32 - 1 - exponent).max(0) as usize)))
        }
        _ => power(&signed(&plain(mantissa)), exponent),
    }
}

/// `mantissa·10ⁿ`, without a mantissa of 1.
fn power(mantissa: &str, exponent: i32) -> String {
    let superscript = |c| match c {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        c => char::from_u32('⁰' as u32 + c as u32 - '0' as u32)
            .expect("superscripts follow each other"),
    };
    let digits: String = exponent.to_string().chars().map(superscript).collect();
    if mantissa == "1" { format!("10{digits}") } else { format!("{mantissa}·10{digits}") }
}

/// With the sign that typography has for it.
pub(super) fn signed(number: &str) -> String {
    number.replace('-', "−")
}

/// `1 step`, `12,000 steps`.
pub(super) fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// `12,000`.
pub(super) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `41.2 s`, `12 min 30 s`, `3 h 20 min`, `2 d 4 h`.
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    let (minutes, hours) = (whole / 60, whole / 3600);
    match seconds {
        s if !s.is_finite() => "–".into(),
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{minutes} min {} s", whole % 60),
        s if s < 172_800.0 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

/// Rows under column heads; every cell is text.
#[derive(Default)]
pub(super) struct Table {
    /// What it holds.
    pub(super) caption: String,
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
    /// The number of the series that it belongs to, where that is one.
    pub(super) series: Option<usize>,
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let series =
            self.series.map(|series| format!(" data-series=\"{series}\"")).unwrap_or_default();
        write!(
            f,
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{0}\"><table{series}><caption>{0}</caption>",
            Text(&self.caption)
        )?;
        f.write_str("<thead><tr>")?;
        self.columns
            .iter()
            .try_for_each(|column| write!(f, "<th scope=\"col\">{}</th>", Text(column)))?;
        f.write_str("</tr></thead><tbody>\n")?;
        for row in &self.rows {
            f.write_str("<tr>")?;
            row.iter().try_for_each(|cell| write!(f, "<td>{}</td>", Text(cell)))?;
            f.write_str("</tr>\n")?;
        }
        f.write_str("</tbody></table></div>\n")
    }
}

#[cfg(test)]
mod tests {
    use super::{Text, counted, duration, number};

    #[test]
    fn text_is_nothing_but_text() {
        let hostile = "<script>alert(\"x\" + 'y')</script>&\u{0}\u{202e}";
        assert_eq!(
            Text(hostile).to_string(),
            "&lt;script&gt;alert(&quot;x&quot; + &#39;y&#39;)&lt;/script&gt;&amp;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn numbers_read_well() {
        let cases = [
            (2.83714, "2.837"),
            (0.00123, "0.00123"),
            (6e-6, "6·10⁻⁶"),
            (-0.5, "−0.5"),
            (1e-7, "10⁻⁷"),
            (38_312.0, "38312"),
            (1.5e12, "1.5·10¹²"),
            (0.0, "0"),
            (100.0, "100"),
            (f64::NAN, "–"),
        ];
        for (value, expected) in cases {
            assert_eq!(number(value, 4), expected, "{value}");
        }
        assert_eq!([counted(1, "step"), counted(300_000, "step")], ["1 step", "300,000 steps"]);
        assert_eq!(
            [3.25, 750.0, 12_000.0, 200_000.0].map(duration),
            ["3.2 s", "12 min 30 s", "3 h 20 min", "2 d 7 h"]
        );
    }
}
