//! The tokenizer of a resumed run, in its file `tokenizer.json`.

use super::{RunDirectory, components::RunData, identity::of_tokenizer};
use crate::{Error, Result, checkpoint::State, data::Tokenizer, disk};

/// Refuses a tokenizer that was rebuilt from the data in place of a lost file, unless it is the
/// checkpoint's or the checkpoint has none.
///
/// # Errors
/// [`Error::File`].
pub(super) fn check_rebuilt(data: &RunData, directory: &RunDirectory, saved: &State) -> Result {
    if [None, data.tokenizer()].map(of_tokenizer).contains(&saved.tokenizer) {
        return Ok(());
    }
    let problem = "is missing or damaged, and cannot be rebuilt from the data; restore it, or copy \
                   it from the run this one started from, or from an import of that model \
                   (`sparse24 import`)";
    Err(Error::file(directory.tokenizer(), problem))
}

/// Saves the data's tokenizer and renames the file of the former one. Returns a notice, which says
/// if the checkpoint with this state uses the former one.
pub(super) fn save_tokenizer(
    data: &RunData,
    directory: &RunDirectory,
    former: Option<Tokenizer>,
    state: Option<State>,
) -> Result<String> {
    let path = directory.tokenizer();
    let notice = match former {
        Some(former) => {
            let (_, kept) = disk::keep(&path)?;
            let is_of = |state: State| state.tokenizer == former.fingerprint().into();
            let why = if state.is_some_and(is_of) { " for earlier checkpoints" } else { "" };
            format!("the previous tokenizer.json is kept as {kept}{why}")
        }
        None => "tokenizer.json was missing or damaged, and was written again from the data".into(),
    };
    data.tokenizer().map_or(Ok(()), |tokenizer| tokenizer.save(&path))?;
    Ok(notice)
}
