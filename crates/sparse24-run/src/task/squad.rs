//! Paragraphs with questions and answers, in the files of SQuAD v1.1 (Rajpurkar et al. 2016, arXiv
//! 1606.05250) and of data sets that follow it:
//!
//! ```text
//! {"data": [{"paragraphs": [{"context": "...", "qas": [
//!     {"id": "...", "question": "...", "answers": [{"text": "...", "answer_start": 0}]}
//! ]}]}]}
//! ```
//!
//! `answer_start` counts Unicode code points. Other fields are ignored.

use std::{borrow::Cow, collections::HashSet, fmt, marker::PhantomData, ops::Range, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};

use super::read::{LONGEST, MOST};
use crate::{Error, Result, disk};

/// A text, and the questions about it.
#[derive(Debug)]
pub(super) struct Paragraph {
    /// Its place in the file, for messages: the number of its article, and its own.
    pub(super) place: [usize; 2],
    pub(super) context: String,
    pub(super) questions: Vec<Question>,
}

/// A question with its answers.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) id: String,
    pub(super) text: String,
    /// Bytes of the context; at least one answer.
    pub(super) answers: Vec<Range<usize>>,
}

/// Reads a file.
///
/// # Errors
/// [`Error::File`] naming the place in the file; [`Error::Io`].
pub(super) fn read(path: &Path) -> Result<Vec<Paragraph>> {
    let bytes = disk::read_small(path, MOST)?;
    let document: Document<'_> = serde_json::from_slice(&bytes)
        .map_err(|error| Error::file(path, format!("is not a file like SQuAD's: {error}")))?;
    let mut ids = HashSet::new();
    let mut read = Vec::new();
    for (i, article) in document.data.0.iter().enumerate() {
        for (j, paragraph) in article.paragraphs.0.iter().enumerate() {
            let refuse = |(at, problem): (String, String)| {
                Error::file(path, format!("{}{at}: {problem}", place_of([i, j])))
            };
            // One without questions is of no use.
            if !paragraph.qas.0.is_empty() {
                read.push(paragraph.check([i, j], &mut ids).map_err(refuse)?);
            }
        }
    }
    match read.is_empty() {
        false => Ok(read),
        true => Err(Error::file(path, "holds no question")),
    }
}

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(borrow)]
    data: List<Article<'a>>,
}

#[derive(Deserialize)]
struct Article<'a> {
    #[serde(borrow)]
    paragraphs: List<InFile<'a>>,
}

/// A paragraph as the file has it.
#[derive(Deserialize)]
struct InFile<'a> {
    #[serde(borrow)]
    context: Cow<'a, str>,
    #[serde(borrow)]
    qas: List<Asked<'a>>,
}

#[derive(Deserialize)]
struct Asked<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(borrow)]
    question: Cow<'a, str>,
    #[serde(borrow)]
    answers: List<Answer<'a>>,
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
    answer_start: usize,
}

/// A place in words.
pub(super) fn place_of([article, paragraph]: [usize; 2]) -> String {
    format!("data[{article}].paragraphs[{paragraph}]")
}

impl<'a> InFile<'a> {
    /// Turns code points into bytes. Fails with a place below the paragraph, and the problem.
    fn check<'s>(
        &'s self,
        place: [usize; 2],
        ids: &mut HashSet<&'s str>,
    ) -> Result<Paragraph, (String, String)> {
        if self.context.len() > LONGEST {
            let length = self.context.len();
            let problem = format!("has {length} bytes, expected at most {LONGEST}");
            return Err((".context".to_owned(), problem));
        }
        let places = Places::of(&self.context);
        let mut questions = Vec::with_capacity(self.qas.0.len());
        for (i, Asked { id, question, answers }) in self.qas.0.iter().enumerate() {
            let refuse = |problem: String| (format!(".qas[{i}]"), problem);
            if !ids.insert(id) {
                return Err(refuse(format!("has the id {id:?} of an earlier question")));
            }
            if question.len() > LONGEST {
                return Err(refuse(format!("has a question of more than {LONGEST} bytes")));
            }
            if question.trim().is_empty() {
                return Err(refuse("has no question".to_owned()));
            }
            if answers.0.is_empty() {
                return Err(refuse("has no answer".to_owned()));
            }
            let range = |(j, answer): (usize, &Answer<'a>)| {
                let Answer { text, answer_start } = answer;
                let start = places.byte(*answer_start);
                let range = start.map(|start| start..start + text.len());
                let is_there = |range: &Range<usize>| {
                    !text.is_empty() && self.context[range.start..].starts_with(&**text)
                };
                range.filter(is_there).ok_or_else(|| {
                    let problem = format!(
                        "has the answer {text:?}, which is not in the context at its answer_start \
                         {answer_start}"
                    );
                    (format!(".qas[{i}].answers[{j}]"), problem)
                })
            };
            let answers = answers.0.iter().enumerate().map(range).collect::<Result<_, _>>()?;
            let (id, text) = (id.to_string(), question.trim().to_owned());
            questions.push(Question { id, text, answers });
        }
        Ok(Paragraph { place, context: self.context.to_string(), questions })
    }
}

/// Where the code points of a text are.
struct Places<'a> {
    text: &'a str,
    /// The byte of every [`EVERY`]th code point.
    marks: Vec<usize>,
}

const EVERY: usize = 64;

impl<'a> Places<'a> {
    fn of(text: &'a str) -> Self {
        Self { text, marks: text.char_indices().step_by(EVERY).map(|(byte, _)| byte).collect() }
    }

    /// The byte of a code point of the text.
    fn byte(&self, point: usize) -> Option<usize> {
        let mark = *self.marks.get(point / EVERY)?;
        self.text[mark..].char_indices().nth(point % EVERY).map(|(byte, _)| mark + byte)
    }
}

/// A list whose errors name the element.
struct List<T>(Vec<T>);

/// The element of a [`List`].
trait Element {
    /// Name of the list.
    const LIST: &'static str;
    /// Name of the list in an element.
    const BELOW: &'static str;
}

impl Element for Article<'_> {
    const LIST: &'static str = "data";
    const BELOW: &'static str = "paragraphs";
}

impl Element for InFile<'_> {
    const LIST: &'static str = "paragraphs";
    const BELOW: &'static str = "qas";
}

impl Element for Asked<'_> {
    const LIST: &'static str = "qas";
    const BELOW: &'static str = "answers";
}

impl Element for Answer<'_> {
    const LIST: &'static str = "answers";
    const BELOW: &'static str = "";
}

impl<'de, T: Deserialize<'de> + Element> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Elements<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de> + Element> Visitor<'de> for Elements<T> {
            type Value = List<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "the list `{}`", T::LIST)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<T>, A::Error> {
                let mut elements = Vec::new();
                loop {
                    match list.next_element() {
                        Ok(Some(element)) => elements.push(element),
                        Ok(None) => return Ok(List(elements)),
                        Err(error) => {
                            let (place, error) = (elements.len(), error.to_string());
                            let is_place = error.starts_with(&format!("{}[", T::BELOW));
                            let then = if is_place { "." } else { ": " };
                            let error = format!("{}[{place}]{then}{error}", T::LIST);
                            return Err(A::Error::custom(error));
                        }
                    }
                }
            }
        }

        json.deserialize_seq(Elements(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Paragraph>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path())
    }

    /// A file of one paragraph, which XQuAD's have before the version.
    fn file(context: &str, questions: &str) -> String {
        let paragraph = format!(r#"{{"context": "{context}", "qas": [{questions}]}}"#);
        format!(r#"{{"data": [{{"paragraphs": [{paragraph}], "title": "t"}}], "version": "1.1"}}"#)
    }

    fn question(id: &str, text: &str, start: usize) -> String {
        let answers = format!(r#"[{{"answer_start": {start}, "text": "{text}"}}]"#);
        format!(r#"{{"answers": {answers}, "id": "{id}", "question": " Who? "}}"#)
    }

    #[test]
    fn answers_are_found_by_code_point() {
        let context = "é😀".repeat(100) + "Zoë";
        let questions = [question("a", "Zoë", 200), question("b", "é", 64)].join(",");
        let read = read_text(&file(&context, &questions)).unwrap();
        let [Paragraph { questions, .. }] = &read[..] else { panic!("{read:?}") };
        let answers = questions.iter().map(|question| question.answers[0].clone());
        assert_eq!(answers.collect::<Vec<_>>(), [600..604, 192..194]);
        assert_eq!((questions[0].id.as_str(), questions[1].text.as_str()), ("a", "Who?"));
    }

    #[test]
    fn what_is_no_such_file_is_refused_by_its_place() {
        let asked = |question: String| file("Zoë is here", &question);
        for (text, place, problem) in [
            (asked(question("a", "Zoe", 0)), "data[0].paragraphs[0].qas[0].answers[0]", "\"Zoe\""),
            (asked(question("a", "here", 8)), "qas[0].answers[0]: ", "answer_start 8"),
            (asked(question("a", "here", 99)), "qas[0].answers[0]: ", "answer_start 99"),
            (asked(question("a", "", 0)), "qas[0].answers[0]: ", "the answer \"\""),
            (
                asked([question("a", "Zoë", 0), question("a", "is", 4)].join(",")),
                "data[0].paragraphs[0].qas[1]: ",
                "the id \"a\" of an earlier question",
            ),
            (
                asked(question("a", "Zoë", 0).replace(" Who? ", " ")),
                "paragraphs[0].qas[0]: ",
                "has no question",
            ),
            (
                asked(r#"{"id": "a", "question": "Who?", "answers": []}"#.to_owned()),
                "paragraphs[0].qas[0]: ",
                "has no answer",
            ),
            (
                asked(r#"{"id": "a", "answers": []}"#.to_owned()),
                "data[0].paragraphs[0].qas[0]: ",
                "missing field `question`",
            ),
            (
                asked(question("a", "Zoë", 0).replace(": 0", ": \"0\"")),
                "data[0].paragraphs[0].qas[0].answers[0]: ",
                "invalid type: string \"0\"",
            ),
            (
                file(&"x".repeat(1_048_577), &question("a", "x", 0)),
                "data[0].paragraphs[0].context: ",
                "has 1048577 bytes, expected at most 1048576",
            ),
            (file("x", ""), "", "holds no question"),
            ("{\"data\": [".to_owned(), "data[0]: ", "EOF"),
            ("[]".to_owned(), "is not a file like SQuAD's", "invalid length 0"),
        ] {
            let error = read_text(&text).unwrap_err().to_string();
            assert!(error.contains(place) && error.contains(problem), "{text}: {error}");
        }
    }
}
