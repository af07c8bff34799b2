//! Scores of predictions, as scikit-learn and SciPy define them, and of answers, as the evaluation
//! script of SQuAD v1.1 does.

use serde::{Deserialize, Serialize};

/// A score of predictions against labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// The share of predictions that are the label.
    Accuracy,
    /// 2 TP / (2 TP + FP + FN) of class 1; 0 if there are none. Of answers, the mean of
    /// that of their words.
    F1,
    /// The share of answers that are a right one after normalization.
    ExactMatch,
    /// Matthews correlation of classes (Gorodkin 2004); 0 where it is undefined.
    Matthews,
    /// Pearson correlation.
    Pearson,
    /// Spearman correlation: Pearson's, of ranks; ties have their mean rank.
    Spearman,
}

impl Score {
    /// Its name in metrics and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::F1 => "f1",
            Self::ExactMatch => "exact_match",
            Self::Matthews => "matthews",
            Self::Pearson => "pearson",
            Self::Spearman => "spearman",
        }
    }

    /// The score of predicted numbers or class ids, in order of the labels; none if it is
    /// undefined: accuracy and correlations without predictions, and correlations if a list is
    /// constant or contains NaN.
    ///
    /// # Panics
    /// Unless there are as many predictions as labels.
    #[must_use]
    pub fn of(self, predictions: &[f64], labels: &[f64]) -> Option<f64> {
        assert_eq!(predictions.len(), labels.len(), "a prediction has a label");
        let pairs = || predictions.iter().zip(labels);
        let score = match self {
            Self::Accuracy | Self::ExactMatch => {
                pairs().filter(|(p, l)| p == l).count() as f64 / labels.len() as f64
            }
            Self::F1 => {
                let count = |wanted: [bool; 2]| {
                    let is = |&(&p, &l): &(&f64, &f64)| [p == 1.0, l == 1.0] == wanted;
                    pairs().filter(is).count() as f64
                };
                let hits = 2.0 * count([true, true]);
                let all = hits + count([true, false]) + count([false, true]);
                if all == 0.0 { 0.0 } else { hits / all }
            }
            Self::Matthews => matthews(predictions, labels),
            Self::Pearson => pearson(predictions, labels),
            Self::Spearman => pearson(&ranks(predictions), &ranks(labels)),
        };
        score.is_finite().then_some(score)
    }
}

impl Score {
    /// The score of predicted answers, each compared with the right answer that is most like it;
    /// none if it is no score of answers, or there are none.
    ///
    /// # Panics
    /// Unless there are right answers for each prediction.
    #[must_use]
    pub fn of_answers(self, predictions: &[&str], right: &[Vec<&str>]) -> Option<f64> {
        assert_eq!(predictions.len(), right.len(), "a prediction has right answers");
        let alike: fn(&[String], &[String]) -> f64 = match self {
            Self::ExactMatch => |found, right| f64::from(u8::from(found == right)),
            Self::F1 => words_f1,
            _ => return None,
        };
        let best = |(found, right): (&&str, &Vec<&str>)| {
            let found = words(found);
            right.iter().map(|right| alike(&found, &words(right))).fold(0.0, f64::max)
        };
        let sum: f64 = predictions.iter().zip(right).map(best).sum();
        Some(sum / right.len() as f64).filter(|score| score.is_finite())
    }
}

/// The words of an answer in lower case, without ASCII punctuation and articles.
fn words(answer: &str) -> Vec<String> {
    let lower = answer.to_lowercase();
    let plain: String = lower.chars().filter(|c| !c.is_ascii_punctuation()).collect();
    // A character that is neither a letter nor a digit ends a word, and may do so for an article.
    let mut text = String::new();
    let mut rest = plain.as_str();
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        text.push_str(if matches!(word, "a" | "an" | "the") { " " } else { word });
        let between = after.chars().next().map_or(0, char::len_utf8);
        text.push_str(&after[..between]);
        rest = &after[between..];
    }
    text.split_whitespace().map(str::to_owned).collect()
}

/// The harmonic mean of precision and recall of words, each counted as often as it occurs.
fn words_f1(found: &[String], right: &[String]) -> f64 {
    let mut left = right.to_vec();
    let take = |word: &&String| {
        let at = left.iter().position(|other| other == *word);
        at.map(|at| left.swap_remove(at)).is_some()
    };
    let common = found.iter().filter(take).count() as f64;
    if common == 0.0 { 0.0 } else { 2.0 * common / (found.len() + right.len()) as f64 }
}

/// (n c - sum_k p_k t_k) / sqrt((n^2 - sum p_k^2) (n^2 - sum t_k^2)), where c predictions of n are
/// right, and class k is predicted p_k times and right t_k times.
fn matthews(predictions: &[f64], labels: &[f64]) -> f64 {
    let n = labels.len() as f64;
    let mut classes: Vec<f64> = predictions.iter().chain(labels).copied().collect();
    classes.sort_by(f64::total_cmp);
    classes.dedup();
    let times = |of: &[f64], class: f64| of.iter().filter(|&&x| x == class).count() as f64;
    let counts: Vec<[f64; 2]> =
        classes.iter().map(|&class| [times(predictions, class), times(labels, class)]).collect();
    let sum = |term: fn(&[f64; 2]) -> f64| counts.iter().map(term).sum::<f64>();
    let right = predictions.iter().zip(labels).filter(|(p, l)| p == l).count() as f64;
    let square = n * n;
    let below = (square - sum(|[p, _]| p * p)) * (square - sum(|[_, t]| t * t));
    if below == 0.0 { 0.0 } else { (n * right - sum(|[p, t]| p * t)) / below.sqrt() }
}

fn pearson(x: &[f64], y: &[f64]) -> f64 {
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    let (mean_x, mean_y) = (mean(x), mean(y));
    let sum = |term: &dyn Fn(f64, f64) -> f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| term(x - mean_x, y - mean_y)).sum()
    };
    sum(&|x, y| x * y) / (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt()
}

/// Ranks from 1; equal values share the mean of theirs. NaN has the rank NaN.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = first as f64 + (equal.len() as f64 + 1.0) / 2.0;
        equal.iter().for_each(|&at| ranks[at] = if values[at].is_nan() { f64::NAN } else { rank });
        first += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are from scikit-learn 1.9 and SciPy 1.17.
    #[test]
    fn scores_are_those_of_scikit_learn_and_scipy() {
        let (p, l) = ([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [1., 0., 0., 1., 1., 1., 0., 0.]);
        let classes = [[0., 1., 2., 2., 1., 0., 2.], [0., 2., 2., 2., 1., 1., 0.]];
        let values = [[0.5, 1.5, 2.5, 2.5, 4.0, 0.0], [1.0, 1.0, 3.0, 2.0, 5.0, 0.5]];
        for (score, predictions, labels, expected) in [
            (Score::Accuracy, &p[..], &l[..], Some(0.75)),
            (Score::F1, &p, &l, Some(0.75)),
            (Score::Matthews, &p, &l, Some(0.5)),
            (Score::Matthews, &classes[0], &classes[1], Some(0.34375)),
            (Score::Matthews, &[1.0, 1.0], &[0.0, 1.0], Some(0.0)),
            (Score::F1, &[0.0, 0.0], &[0.0, 0.0], Some(0.0)),
            (Score::Pearson, &values[0], &values[1], Some(0.933_643_187_048_381_5)),
            (Score::Spearman, &values[0], &values[1], Some(0.970_588_235_294_117_8)),
            (Score::Pearson, &[1.0, 1.0], &[0.0, 1.0], None),
            (Score::Spearman, &[f64::NAN, 1.0], &[0.0, 1.0], None),
            (Score::Accuracy, &[], &[], None),
        ] {
            let found = score.of(predictions, labels);
            let close = match (found, expected) {
                (Some(found), Some(expected)) => (found - expected).abs() < 1e-12,
                (found, expected) => found == expected,
            };
            assert!(close, "{score:?}: {found:?}, expected {expected:?}");
        }
    }

    /// Expected values are from the definition in the evaluation script of SQuAD v1.1.
    #[test]
    fn scores_of_answers_are_those_of_squad() {
        for (found, right, exact, f1) in [
            ("the Denver Broncos!", &["Denver Broncos"][..], 1.0, 1.0),
            ("Denver", &["Denver Broncos", "Carolina Panthers"], 0.0, 2.0 / 3.0),
            ("a an the", &["The"], 1.0, 0.0),
            ("", &["x"], 0.0, 0.0),
            ("308", &["308 points", "308"], 1.0, 1.0),
            ("to be or not to be", &["to be, to be"], 0.0, 0.8),
            ("A-team", &["team"], 0.0, 0.0),
            ("U.S.A.", &["usa"], 1.0, 1.0),
            ("der Äpfel Café", &["DER ÄPFEL CAFÉ"], 1.0, 1.0),
            ("the\u{2014}end", &["\u{2014}end"], 1.0, 1.0),
            ("thé end", &["end"], 0.0, 2.0 / 3.0),
            ("Saint\u{a0}Bernadette  Soubirous", &["Saint Bernadette Soubirous"], 1.0, 1.0),
            ("1,000", &["1000"], 1.0, 1.0),
        ] {
            for (score, expected) in [(Score::ExactMatch, exact), (Score::F1, f1)] {
                // Beside an answer that is right.
                let value = score.of_answers(&[found, "x"], &[right.to_vec(), vec!["x"]]);
                let value = value.expect("a score of answers");
                let close = (value - (expected + 1.0) / 2.0).abs() < 1e-12;
                assert!(close, "{score:?} of {found:?}: {value}, expected {expected} and 1");
            }
        }
        assert_eq!(Score::F1.of_answers(&[], &[]), None);
        assert_eq!(Score::Accuracy.of_answers(&["x"], &[vec!["x"]]), None);
    }
}
