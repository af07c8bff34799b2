//! The ranks of a run as processes, on one or several machines.
//!
//! [`placement`] reads from the environment which rank this process is; [`Tcp`] joins it with the
//! others; [`agree`] refuses ranks that were started with something else.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io,
    net::TcpListener,
};

use sparse24_train::group::Group;

use crate::Error;

mod farewell;
mod frames;
mod handshake;
mod placement;
mod tcp;
#[cfg(test)]
mod tests;

pub use farewell::{Farewell, GRACE};
pub use handshake::Secret;
pub use placement::{Environment, Placement, placement, several};
pub use tcp::{Joining, Tcp};

/// Values that must be equal on all ranks, by key.
pub type Facts = Vec<(String, String)>;

/// A random port that is free on this machine. It is below those that systems choose for
/// connections: one of these could be taken before rank 0 listens there.
///
/// # Errors
/// The error of the last of a hundred attempts.
pub fn free_port() -> io::Result<u16> {
    let first = RandomState::new().build_hasher().finish() % 20_000;
    let bind = |at| {
        let port = 10_000 + ((first + at) % 20_000) as u16;
        TcpListener::bind(("127.0.0.1", port)).map(|_| port)
    };
    (1..100).map(bind).find_map(Result::ok).map_or_else(|| bind(0), Ok)
}

/// Refuses ranks with other facts than rank 0, with the same error on all ranks.
///
/// # Errors
/// [`Error::Setting`] with the first key that differs, and its value on each rank; an error of the
/// kind [`Peer`](crate::ErrorKind::Peer) if a rank is gone.
pub fn agree(group: &mut dyn Group, facts: &Facts) -> Result<(), Error> {
    let all = group.all_gather(&serde_json::to_vec(facts).expect("texts are JSON"))?;
    let all: Vec<Facts> =
        all.iter().map(|facts| serde_json::from_slice(facts)).collect::<Result<_, _>>().map_err(
            |error| sparse24_train::Error::Peer(format!("a rank sent bad facts: {error}")),
        )?;
    let keys = all.iter().flatten().map(|(key, _)| key);
    for key in keys {
        let value = |facts: &Facts| {
            let found = facts.iter().find(|(name, _)| name == key);
            found.map_or("nothing".to_owned(), |(_, value)| value.clone())
        };
        let values: Vec<_> = all.iter().map(value).collect();
        if values.iter().any(|value| *value != values[0]) {
            bail!(setting = key, "differs between ranks: {}", by_rank(&values));
        }
    }
    Ok(())
}

/// Each value with the ranks that have it.
pub(crate) fn by_rank(values: &[String]) -> String {
    let mut different: Vec<&String> = Vec::new();
    values.iter().for_each(|value| {
        if !different.contains(&value) {
            different.push(value);
        }
    });
    let described = different.into_iter().map(|value| {
        let ranks = (0..values.len()).filter(|&rank| values[rank] == *value);
        format!("{} found {value}", ranks_of(ranks))
    });
    described.collect::<Vec<_>>().join(", ")
}

/// `rank 2`, or `ranks 0, 1`.
pub(crate) fn ranks_of(ranks: impl Iterator<Item = usize>) -> String {
    let ranks: Vec<_> = ranks.map(|rank| rank.to_string()).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "))
}
