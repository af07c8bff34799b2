//! Whether the runs of a set fit on this machine: those side by side in its memory, and the
//! checkpoints of all on its disk.

use std::path::Path;

use sparse24_run::{Error, disk, machine::Memory, run::Needs};

use super::Keep;
use crate::{Result, count::counted};

/// Refuses runs of which `jobs` at a time need more memory than there is, or whose checkpoints will
/// not fit on the disk of `folder`. Each has its needs, and the number of checkpoints that it has
/// already; `keep` is what stays of a finished one.
///
/// # Errors
/// [`Error::Setting`] for memory; [`Error::Room`].
pub fn check_needs(
    folder: &Path,
    runs: &[(Needs, u64)],
    jobs: usize,
    keep: Keep,
    memory: Option<&Memory>,
) -> Result {
    // Runs take different times, so any of them may be side by side.
    let largest = |need: &dyn Fn(&(Needs, u64)) -> u64| {
        let mut needs: Vec<u64> = runs.iter().map(need).collect();
        needs.sort_unstable_by(|a, b| b.cmp(a));
        needs.into_iter().take(jobs).fold(0, u64::saturating_add)
    };
    let needed = largest(&|(needs, _)| needs.memory);
    if let Some(problem) = memory.and_then(|memory| memory.refuses(needed, 1)) {
        return Err(match jobs {
            1 => Error::setting("model", problem),
            _ => Error::setting(
                "--jobs",
                format!("running {jobs} runs at a time {problem}, or lower --jobs"),
            ),
        });
    }
    let kept = |(needs, there): &(Needs, u64)| {
        needs.checkpoint.saturating_mul(needs.kept.saturating_sub(*there))
    };
    let (count, needed) = match keep {
        Keep::Checkpoints => {
            let all = runs.iter().map(kept).fold(0, u64::saturating_add);
            (runs.len(), all.saturating_add(largest(&|(needs, _)| needs.checkpoint)))
        }
        Keep::Results => (jobs, largest(&|run| kept(run).saturating_add(run.0.checkpoint))),
    };
    disk::check_room(folder, needed, || format!("the checkpoints of {}", counted(count, "run")))
}
