//! An example as tokens, and its target.

use std::path::PathBuf;

use super::Task;

/// The tokens of an example, in an order that its model expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// BERT: `[CLS] first [SEP]`, and `second [SEP]` in segment 1; `[CLS]` is read, or all for a
    /// span.
    Bert,
    /// The same without segments.
    CrammedBert,
    /// GPT-2: first, then second; the last token is read, or all for a span.
    Gpt2,
}

/// The examples that a configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskSource {
    /// The task.
    pub task: &'static Task,
    /// The folder of its files.
    pub folder: PathBuf,
    /// The order of an example's tokens.
    pub layout: Layout,
    /// Classes of a model, in order, for [`Labels::Found`](super::Labels::Found); if empty, they
    /// are those of the training split.
    pub classes: Vec<String>,
    /// Most tokens of an example.
    pub max_length: usize,
    /// Tokens between the beginnings of the windows of a context.
    pub stride: usize,
}

/// A labelled example.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Token ids, special ones among them.
    pub tokens: Vec<u32>,
    /// The token at which the second sentence begins; the number of tokens if there is none.
    pub second: usize,
    /// The wanted prediction.
    pub target: Target,
}

/// The prediction that is wanted for an example.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// A class, or a number.
    Label(f64),
    /// The positions of the first and the last token of an answer.
    Span([u32; 2]),
}
