//! Arguments whose value has one of a few names.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sparse24_core::MaskKind;
use sparse24_lab::runs::Keep;
use sparse24_run::{data::TokenizerKind, interchange::Dtype, pruning::Search};

/// Parses one of the names; the help lists them with their descriptions, which may be empty.
fn one_of<T: Clone + Send + Sync + 'static, const N: usize>(
    choices: [(&'static str, &'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let names = choices.clone().map(|(name, help, _)| match help {
        "" => PossibleValue::new(name),
        help => PossibleValue::new(name).help(help),
    });
    PossibleValuesParser::new(names).map(move |found| {
        let choice = choices.iter().find(|(name, ..)| *name == found);
        choice.expect("the parser accepts only these names").2.clone()
    })
}

pub(crate) fn mask() -> impl TypedValueParser<Value = MaskKind> {
    let tile = "Two of four along rows and along columns, in every 4x4 tile";
    one_of([
        ("transposable", tile, MaskKind::Transposable),
        ("row", "Two of four along the last dimension", MaskKind::RowWise),
        ("column", "Two of four along the first dimension", MaskKind::ColumnWise),
    ])
}

pub(crate) fn search() -> impl TypedValueParser<Value = Search> {
    let greedy = "A 2-approximation: largest values first, while the pattern has free places";
    one_of([
        ("exact", "The best of the 90 patterns", Search::Exact),
        ("greedy", greedy, Search::Greedy),
    ])
}

/// The files of finished runs to keep.
pub(crate) fn keep() -> impl TypedValueParser<Value = Keep> {
    one_of([
        ("checkpoints", "All files", Keep::Checkpoints),
        ("results", "All files except checkpoints", Keep::Results),
    ])
}

/// The tokenizers whose name gives their vocabulary.
pub(crate) fn tokenizer() -> impl TypedValueParser<Value = TokenizerKind> {
    one_of([TokenizerKind::Byte, TokenizerKind::Gpt2].map(|kind| (kind.name(), "", kind)))
}

pub(crate) fn dtype() -> impl TypedValueParser<Value = Dtype> {
    one_of([("f32", "", Dtype::F32), ("f16", "", Dtype::F16), ("bf16", "", Dtype::Bf16)])
}
