//! Escaped text, numbers for readers, and tables.
//!
//! Invariant: everything that comes from a file passes through [`Text`] or is a number, so it is
//! never markup, and the page is well-formed XML.

use std::fmt::{self, Display, Write};

use super::figure::data_run;

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
            // Not allowed in XML, or changes the direction of the text around it.
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                f.write_char('\u{fffd}')
            }
            c if c.is_control() => f.write_char('\u{fffd}'),
            c => f.write_char(c),
        })
    }
}

/// A number with at most `digits` significant digits: `0.00123`, `2.84`, `1.5·10¹²`, `6·10⁻⁶`; a
/// dash if it is not finite.
pub(super) fn number(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    let plain = |text: &str| {
        minus(if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.')
        } else {
            text
        })
    };
    let exponential = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) = exponential.split_once('e').expect("the form has an exponent");
    let power: i32 = exponent.parse().expect("an exponent is an integer");
    if (-4..=5).contains(&power) {
        return plain(&format!("{value:.*}", (digits as i32 - 1 - power).max(0) as usize));
    }
    let superscript = |c: char| match c.to_digit(10) {
        Some(digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().nth(digit as usize).expect("a decimal digit"),
        None => '⁻',
    };
    let power: String = exponent.chars().map(superscript).collect();
    match plain(mantissa).as_str() {
        "1" => format!("10{power}"),
        mantissa => format!("{mantissa}·10{power}"),
    }
}

/// A number for a column of a table: all its digits are shown, so that neighbours align.
pub(super) fn cell(value: f64) -> String {
    digits(value, 5)
}

/// [`number`] with exactly `digits` significant digits.
pub(super) fn digits(value: f64, digits: usize) -> String {
    match value.abs().log10().floor() {
        power if (-4.0..=5.0).contains(&power) => {
            minus(&format!("{value:.*}", (digits as f64 - 1.0 - power).max(0.0) as usize))
        }
        _ => number(value, digits),
    }
}

/// With a typographic minus sign.
pub(super) fn minus(number: &str) -> String {
    number.replace('-', "−")
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

#[derive(Default)]
pub(super) struct Table {
    pub(super) caption: String,
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
    /// The run that the table belongs to.
    pub(super) run: Option<usize>,
}

impl Table {
    pub(super) fn new(
        caption: impl Into<String>,
        columns: &[&str],
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Self {
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        Self { caption: caption.into(), columns, rows: rows.into_iter().collect(), run: None }
    }

    pub(super) fn of_run(self, run: usize) -> Self {
        Self { run: Some(run), ..self }
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = data_run(self.run);
        let caption = Text(&self.caption);
        // Columns of numbers are aligned at the right.
        let is_number = |cell: &String| !cell.replace(" to ", "").contains(char::is_alphabetic);
        let is_right = |at: &usize| {
            !self.rows.is_empty() && self.rows.iter().all(|row| row.get(*at).is_some_and(is_number))
        };
        let right = (0..self.columns.len()).filter(is_right);
        let aligned = right.map(|at| format!("n{}", at + 1)).collect::<Vec<_>>().join(" ");
        write!(
            f,
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{caption}\"{run}>\
             <table class=\"{aligned}\"><caption>{caption}</caption><thead><tr>"
        )?;
        for column in &self.columns {
            write!(f, "<th scope=\"col\">{}</th>", Text(column))?;
        }
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
    use super::{Text, duration, number};

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(
            Text("<b a=\"x\" + 'y'>&\u{0}\u{202e}").to_string(),
            "&lt;b a=&quot;x&quot; + &#39;y&#39;&gt;&amp;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn numbers_are_short() {
        for (value, expected) in [
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
        ] {
            assert_eq!(number(value, 4), expected, "{value}");
        }
        assert_eq!(
            [3.25, 750.0, 12_000.0, 200_000.0].map(duration),
            ["3.2 s", "12 min 30 s", "3 h 20 min", "2 d 7 h"]
        );
    }
}
