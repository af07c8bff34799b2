//! Counts in words.

/// A count with its noun: `1 run`, `300,000 steps`.
#[must_use]
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(count as u64))
}

/// `12,000`.
pub(crate) fn grouped(count: u64) -> String {
    let digits: Vec<char> = count.to_string().chars().collect();
    let groups = digits.rchunks(3).rev().map(String::from_iter);
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn counts_have_separators_and_plurals() {
        for (count, expected) in [(1, "1 step"), (0, "0 steps"), (300_000, "300,000 steps")] {
            assert_eq!(counted(count, "step"), expected);
        }
    }
}
