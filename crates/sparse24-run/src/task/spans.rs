//! Questions about paragraphs as windows of tokens, and answers from the outputs of a model.
//!
//! A window holds a question and a part of its context. A context that is too long for one window
//! has several, `stride` tokens apart (`doc_stride` of Devlin et al. 2018). They are made when they
//! are asked for, so a long context that many questions share is held once.

use std::{ops::Range, path::Path};

use rayon::prelude::*;

use super::{
    example::{Example, Layout, Target, TaskSource},
    squad,
};
use crate::{Error, Result, data::Tokenizer};

/// Most tokens of a question.
pub const LONGEST_QUESTION: usize = 64;
/// Most tokens of a predicted answer.
const LONGEST_ANSWER: usize = 30;
/// First and last tokens that are considered, by logit.
const BEST: usize = 20;
/// Most windows of a split. A context that many questions share has far more windows than bytes.
const MOST_WINDOWS: usize = 1 << 21;

/// The questions of a split.
#[derive(Debug, Clone)]
pub struct Spans {
    rules: Rules,
    paragraphs: Vec<Paragraph>,
    questions: Vec<Question>,
    /// Windows before those of each question, and all.
    before: Vec<usize>,
}

/// How windows are made.
#[derive(Debug, Clone, Copy)]
struct Rules {
    layout: Layout,
    /// `[CLS]` and `[SEP]`.
    special: [u32; 2],
    /// Most tokens of a window.
    longest: usize,
    stride: usize,
}

#[derive(Debug, Clone)]
struct Paragraph {
    context: String,
    tokens: Vec<u32>,
    /// The bytes of each token.
    ranges: Vec<Range<u32>>,
}

#[derive(Debug, Clone)]
struct Question {
    id: String,
    paragraph: usize,
    tokens: Vec<u32>,
    /// Bytes of the context.
    answers: Vec<Range<usize>>,
    /// Tokens of the context that hold the first answer.
    target: Option<Range<usize>>,
    /// Whether it was cut.
    was_cut: bool,
}

/// A window of a question.
struct Window<'a> {
    question: &'a Question,
    paragraph: &'a Paragraph,
    /// Its tokens of the context.
    context: Range<usize>,
    /// Its position at which they begin.
    begins: usize,
}

impl Spans {
    /// Reads a file.
    pub(super) fn read(path: &Path, source: &TaskSource, tokenizer: &Tokenizer) -> Result<Self> {
        let &TaskSource { layout, max_length: longest, stride, .. } = source;
        let rules = Rules { layout, special: tokenizer.sentence_tokens(), longest, stride };
        if rules.room(0) == 0 {
            bail!(
                setting = "task.max_length",
                "{longest} tokens hold no token of a context; raise it"
            );
        }
        let read: Vec<(Paragraph, Vec<Question>)> = squad::read(path)?
            .into_par_iter()
            .enumerate()
            .map(|(number, paragraph)| rules.encode(path, number, paragraph, tokenizer))
            .collect::<Result<_, _>>()?;
        let (paragraphs, questions): (Vec<_>, Vec<_>) = read.into_iter().unzip();
        let questions: Vec<Question> = questions.into_iter().flatten().collect();
        let mut before = vec![0];
        for question in &questions {
            let windows = rules.windows(question, &paragraphs[question.paragraph]);
            before.push(before[before.len() - 1] + windows);
        }
        let windows = before[questions.len()];
        if windows > MOST_WINDOWS {
            bail!(
                path,
                "makes {windows} windows, expected at most {MOST_WINDOWS}; raise task.stride or \
                 task.max_length"
            );
        }
        Ok(Self { rules, paragraphs, questions, before })
    }

    /// Number of windows.
    pub(super) fn len(&self) -> usize {
        self.before[self.questions.len()]
    }

    /// Questions that were longer than the limit and were cut.
    pub(super) fn cut(&self) -> usize {
        self.questions.iter().filter(|question| question.was_cut).count()
    }

    /// Tokens of the longest window.
    pub(super) fn longest(&self) -> usize {
        let longest = self.questions.iter().map(|question| {
            let window = self.rules.window(question, &self.paragraphs[question.paragraph], 0);
            self.rules.tokens(&window)
        });
        longest.max().unwrap_or(0)
    }

    fn window(&self, number: usize) -> Window<'_> {
        let question = self.before.partition_point(|&before| before <= number) - 1;
        let at = number - self.before[question];
        let question = &self.questions[question];
        self.rules.window(question, &self.paragraphs[question.paragraph], at)
    }

    /// The tokens of a window. An answer that it does not hold whole is at its first position.
    pub(super) fn example(&self, number: usize) -> Example {
        let Window { question, paragraph, context, begins } = self.window(number);
        let [class, separator] = self.rules.special;
        let mut tokens = Vec::with_capacity(self.rules.longest);
        match self.rules.layout {
            Layout::Gpt2 => tokens.extend(&question.tokens),
            Layout::Bert | Layout::CrammedBert => {
                tokens.push(class);
                tokens.extend(&question.tokens);
                tokens.push(separator);
            }
        }
        tokens.extend(&paragraph.tokens[context.clone()]);
        if self.rules.layout != Layout::Gpt2 {
            tokens.push(separator);
        }
        let target = question.target.as_ref();
        let target = target.filter(|t| context.start <= t.start && t.end <= context.end);
        let position = |token: usize| (begins + token - context.start) as u32;
        let target = target.map_or([0; 2], |t| [position(t.start), position(t.end - 1)]);
        Example { tokens, second: begins, target: Target::Span(target) }
    }

    /// The bytes that identify the questions and the rules, in pieces.
    pub(super) fn identify(&self, mut piece: impl FnMut(&[u8])) {
        let Rules { longest, stride, .. } = self.rules;
        let mut bytes = Vec::new();
        let number = |bytes: &mut Vec<u8>, n: usize| bytes.extend((n as u64).to_le_bytes());
        let ids = |bytes: &mut Vec<u8>, tokens: &[u32]| {
            number(bytes, tokens.len());
            tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
        };
        [longest, stride].into_iter().for_each(|n| number(&mut bytes, n));
        for Question { id, paragraph, tokens, answers, .. } in &self.questions {
            number(&mut bytes, id.len());
            bytes.extend(id.as_bytes());
            number(&mut bytes, *paragraph);
            ids(&mut bytes, tokens);
            number(&mut bytes, answers.len());
            answers.iter().for_each(|answer| {
                number(&mut bytes, answer.start);
                number(&mut bytes, answer.end);
            });
            piece(&bytes);
            bytes.clear();
        }
        for Paragraph { context, tokens, .. } in &self.paragraphs {
            number(&mut bytes, context.len());
            bytes.extend(context.as_bytes());
            ids(&mut bytes, tokens);
            piece(&bytes);
            bytes.clear();
        }
    }

    /// Tokens of all windows.
    pub(super) fn tokens(&self) -> u64 {
        (0..self.len()).map(|number| self.rules.tokens(&self.window(number)) as u64).sum()
    }

    /// The best span of a window by a model's outputs `[length, 2]`: of the 20 tokens of its
    /// context with the largest first logits and the 20 with the largest last ones, the pair with
    /// the largest sum that is at most 30 tokens long; of equal sums, that of the earlier first
    /// token and last token. Returns the sum, and the span's start and end within the context; an
    /// empty span if there is none.
    pub(super) fn best(&self, number: usize, outputs: &[f32]) -> Vec<f32> {
        let Window { context, begins, .. } = self.window(number);
        let found = best_span(&outputs[2 * begins..][..2 * context.len()]);
        let (sum, span) = found.unwrap_or_default();
        vec![sum, span.start as f32, span.end as f32]
    }

    /// The id of each question with the predicted answer: of the best spans of its windows, the one
    /// with the largest sum; of equal sums, that of the earlier window.
    ///
    /// # Panics
    /// Unless there is a best span for each window.
    pub(super) fn answers(&self, spans: &[f32]) -> Vec<(&str, &str)> {
        let spans: &[[f32; 3]] = spans.as_chunks().0;
        assert_eq!(spans.len(), self.len(), "a span for each window");
        let answer = |(number, question): (usize, &'_ Question)| {
            let mut best: Option<(f32, Range<usize>)> = None;
            let all = self.before[number]..self.before[number + 1];
            for (at, &[sum, start, end]) in all.clone().zip(&spans[all]) {
                if start < end && best.as_ref().is_none_or(|(best, _)| sum > *best) {
                    let context = self.window(at).context.start;
                    best = Some((sum, context + start as usize..context + end as usize));
                }
            }
            let paragraph = &self.paragraphs[question.paragraph];
            best.map_or("", |(_, span)| paragraph.text(span))
        };
        let questions: Vec<_> = self.questions.iter().enumerate().collect();
        let texts = questions.into_par_iter().map(answer).collect::<Vec<_>>();
        self.questions.iter().map(|question| question.id.as_str()).zip(texts).collect()
    }

    /// The answers of each question.
    pub(super) fn right(&self) -> Vec<Vec<&str>> {
        let of = |question: &Question| {
            let context = self.paragraphs[question.paragraph].context.as_str();
            question.answers.iter().map(|answer| &context[answer.clone()]).collect()
        };
        self.questions.iter().map(of).collect()
    }
}

impl Rules {
    /// Special tokens before the question, between, and after the context.
    fn specials(self) -> usize {
        match self.layout {
            Layout::Gpt2 => 0,
            Layout::Bert | Layout::CrammedBert => 3,
        }
    }

    /// Most tokens of the context beside a question of this many.
    fn room(self, question: usize) -> usize {
        self.longest.saturating_sub(self.specials() + question)
    }

    fn encode(
        self,
        path: &Path,
        number: usize,
        paragraph: squad::Paragraph,
        tokenizer: &Tokenizer,
    ) -> Result<(Paragraph, Vec<Question>)> {
        let squad::Paragraph { place, context, questions } = paragraph;
        let refuse = |at: String, error: &Error| {
            Error::file(path, format!("{}{at}: {error}", squad::place_of(place)))
        };
        let encoded = tokenizer.encode_with_ranges(&context);
        let (tokens, ranges) = encoded.map_err(|error| refuse(".context".to_owned(), &error))?;
        let held = |answer: &Range<usize>| {
            let start = ranges.partition_point(|token| token.end <= answer.start);
            let end = ranges.partition_point(|token| token.start < answer.end);
            (start < end).then_some(start..end)
        };
        // Half of the window is left to the context.
        let longest = LONGEST_QUESTION.min(self.room(0) / 2);
        let questions = questions.into_iter().enumerate().map(|(i, question)| {
            let squad::Question { id, text, answers } = question;
            let tokens = tokenizer.encode(&text);
            let mut tokens =
                tokens.map_err(|error| refuse(format!(".qas[{i}].question"), &error))?;
            let was_cut = tokens.len() > longest;
            tokens.truncate(longest);
            let target = held(&answers[0]);
            Ok(Question { id, paragraph: number, tokens, answers, target, was_cut })
        });
        let questions = questions.collect::<Result<_>>()?;
        let ranges = ranges.iter().map(|range| range.start as u32..range.end as u32).collect();
        Ok((Paragraph { context, tokens, ranges }, questions))
    }

    /// Windows of a question.
    fn windows(self, question: &Question, paragraph: &Paragraph) -> usize {
        let room = self.room(question.tokens.len());
        1 + paragraph.tokens.len().saturating_sub(room).div_ceil(self.stride.min(room))
    }

    fn window<'a>(self, question: &'a Question, paragraph: &'a Paragraph, at: usize) -> Window<'a> {
        let room = self.room(question.tokens.len());
        let start = at * self.stride.min(room);
        let context = start..paragraph.tokens.len().min(start + room);
        let begins = question.tokens.len() + self.specials().saturating_sub(1);
        Window { question, paragraph, context, begins }
    }

    fn tokens(self, window: &Window<'_>) -> usize {
        self.specials() + window.question.tokens.len() + window.context.len()
    }
}

impl Paragraph {
    /// The text of tokens: their bytes, and those of the characters that they cut, without white
    /// space at both ends.
    fn text(&self, tokens: Range<usize>) -> &str {
        let (first, last) = (&self.ranges[tokens.start], &self.ranges[tokens.end - 1]);
        let is_boundary = |&at: &usize| self.context.is_char_boundary(at);
        let start = (0..=first.start as usize).rev().find(is_boundary).unwrap_or(0);
        let end = (last.end as usize..).find(is_boundary).unwrap_or(self.context.len());
        self.context[start..end].trim()
    }
}

/// The sum and the tokens of the best span among the tokens that have these first and last logits.
fn best_span(logits: &[f32]) -> Option<(f32, Range<usize>)> {
    let best = |column: usize| {
        let of = |token: usize| logits[2 * token + column];
        let mut tokens: Vec<usize> = (0..logits.len() / 2).collect();
        tokens.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
        tokens.truncate(BEST);
        tokens.sort_unstable();
        tokens
    };
    let (firsts, lasts) = (best(0), best(1));
    let mut found: Option<(f32, Range<usize>)> = None;
    for &first in &firsts {
        for &last in lasts.iter().filter(|last| (first..first + LONGEST_ANSWER).contains(last)) {
            let sum = logits[2 * first] + logits[2 * last + 1];
            if found.as_ref().is_none_or(|(best, _)| sum > *best) {
                found = Some((sum, first..last + 1));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::task::find;

    const CONTEXT: &str = "In 1843 Ada wrote the first program, and \u{c9}mile read it.";

    /// Two questions, of which the second is longer than a window lets it be.
    fn spans(layout: Layout, max_length: usize, stride: usize) -> Result<Spans> {
        let question = |id: &str, text: &str, answer: &str| {
            let start =
                CONTEXT.chars().count() - CONTEXT.split_once(answer).unwrap().1.chars().count();
            let start = start - answer.chars().count();
            serde_json::json!({
                "id": id, "question": text, "answers": [{"text": answer, "answer_start": start}],
            })
        };
        let questions =
            [question("w", "Who?", "Ada"), question("r", &"r".repeat(70), "\u{c9}mile")];
        let paragraph = serde_json::json!({"context": CONTEXT, "qas": questions});
        read(&paragraph, layout, max_length, stride)
    }

    fn read(
        paragraph: &serde_json::Value,
        layout: Layout,
        max_length: usize,
        stride: usize,
    ) -> Result<Spans> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let data = serde_json::json!({"data": [{"paragraphs": [paragraph]}]});
        fs::write(file.path(), data.to_string()).unwrap();
        let (task, folder) = (find("squad").unwrap(), file.path().to_owned());
        let source = TaskSource { task, folder, layout, classes: Vec::new(), max_length, stride };
        Spans::read(file.path(), &source, &Tokenizer::Byte)
    }

    #[test]
    fn windows_cover_the_context() {
        for (layout, max_length, stride, first) in [
            (Layout::Bert, 27, 9, vec![256, 87, 104, 111, 63, 256, 73, 110]),
            (Layout::Gpt2, 27, 9, vec![87, 104, 111, 63, 73, 110]),
            (Layout::Gpt2, 27, 1000, vec![87, 104, 111, 63, 73, 110]),
            (Layout::Bert, 300, 128, vec![256, 87, 104, 111, 63, 256, 73, 110]),
        ] {
            let spans = spans(layout, max_length, stride).unwrap();
            assert_eq!(spans.example(0).tokens[..first.len()], first);
            assert_eq!(spans.cut(), 1);
            for question in 0..2 {
                let mut next = 0;
                let mut holds = false;
                for number in spans.before[question]..spans.before[question + 1] {
                    let Window { context, begins, question, .. } = spans.window(number);
                    let Example { tokens, target, second } = spans.example(number);
                    assert_eq!((second, tokens.len() <= max_length), (begins, true));
                    assert!(context.start <= next && context.end > next, "{context:?} at {next}");
                    assert!(number == 0 || context.start == 0 || tokens.len() > context.len());
                    next = context.end;
                    let target = match target {
                        Target::Span([0, 0]) => continue,
                        Target::Span([first, last]) => first as usize..last as usize + 1,
                        Target::Label(label) => panic!("{label}"),
                    };
                    holds = true;
                    let bytes: Vec<u8> = tokens[target].iter().map(|&token| token as u8).collect();
                    assert_eq!(bytes, CONTEXT.as_bytes()[question.answers[0].clone()]);
                }
                assert_eq!(next, CONTEXT.len(), "{layout:?} {max_length} {stride}");
                assert!(holds || stride > 27, "no window holds the answer");
            }
            assert_eq!(spans.longest(), {
                let lengths = (0..spans.len()).map(|number| spans.example(number).tokens.len());
                lengths.max().unwrap()
            });
        }
        let error = spans(Layout::Bert, 3, 1).unwrap_err().to_string();
        assert!(error.contains("task.max_length: 3 tokens hold no token"), "{error}");
        // A megabyte asks for the memory of seventeen million examples.
        let question = |id: u32| {
            let answers = [serde_json::json!({"text": "a", "answer_start": 0})];
            serde_json::json!({"id": id.to_string(), "question": "?", "answers": answers})
        };
        let questions: Vec<_> = (0..17).map(question).collect();
        let paragraph = serde_json::json!({"context": "a".repeat(1 << 20), "qas": questions});
        let error = read(&paragraph, Layout::Gpt2, 9, 1).unwrap_err().to_string();
        assert!(error.contains("makes 17825673 windows, expected at most 2097152"), "{error}");
    }

    #[test]
    fn an_answer_is_the_best_span_of_all_windows() {
        let spans = spans(Layout::Gpt2, 27, 9).unwrap();
        let length = 30;
        let mut outputs = vec![0.0; spans.len() * length * 2];
        let mut set = |window: usize, column: usize, token: usize, logit: f32| {
            let Window { context, begins, .. } = spans.window(window);
            outputs[2 * (window * length + begins + token - context.start) + column] = logit;
        };
        let second = spans.before[1];
        // The end of "Ada", in the second window; and less likely, in the first one, "1843".
        set(0, 0, 3, 2.0);
        set(0, 1, 6, 1.0);
        set(1, 0, 9, 2.0);
        set(1, 1, 10, 1.5);
        // Half of a character at both ends, and white space: an answer is whole characters.
        let accent = CONTEXT.find('\u{c9}').unwrap();
        let window = (second..spans.len())
            .find(|&number| spans.window(number).context.contains(&(accent + 2)))
            .unwrap();
        set(window, 0, accent + 1, 5.0);
        set(window, 1, accent + 6, 5.0);
        // Tokens of the question and of padding are not answers.
        outputs[2 * window * length] = 99.0;
        outputs[2 * (window * length + length - 1) + 1] = 99.0;
        let windows = outputs.chunks(2 * length).enumerate();
        let kept: Vec<f32> =
            windows.flat_map(|(number, outputs)| spans.best(number, outputs)).collect();
        assert_eq!(spans.answers(&kept), [("w", "da"), ("r", "\u{c9}mile")]);
        assert_eq!(spans.right(), [["Ada"], ["\u{c9}mile"]]);
    }

    /// The best pair of logits, and the rules about length, order and number.
    #[test]
    fn the_best_span_is_in_order_and_short() {
        let of = |logits: &[(usize, usize, f32)], tokens: usize| {
            let mut all = vec![0.0; 2 * tokens];
            logits.iter().for_each(|&(token, column, logit)| all[2 * token + column] = logit);
            best_span(&all)
        };
        for (logits, tokens, expected) in [
            (&[(3, 0, 1.0), (5, 1, 1.0)][..], 40, Some((2.0, 3..6))),
            (&[(5, 0, 1.0), (3, 1, 1.0)], 40, Some((1.0, 0..4))),
            (&[(2, 0, 1.0), (31, 1, 1.0)], 40, Some((2.0, 2..32))),
            (&[(2, 0, 3.0), (32, 1, 1.0)], 40, Some((3.0, 2..3))),
            (&[], 3, Some((0.0, 0..1))),
            (&[], 0, None),
        ] {
            assert_eq!(of(logits, tokens), expected, "{logits:?}");
        }
        // Only 20 last tokens are considered: here those before the first one.
        let lasts = (0..20).map(|token| (token, 1, 1.0));
        let firsts = (30..50).map(|token| (token, 0, 9.0));
        assert_eq!(of(&lasts.chain(firsts).collect::<Vec<_>>(), 60), None);
    }
}
