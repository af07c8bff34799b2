//! A sequence of token ids in memory, as narrow as the vocabulary allows.
//!
//! Invariant: the width is that of the vocabulary, not of the tokens that happen to occur.
//! Deliberately absent: files ([`super::shard`]).

/// Token ids, two bytes each where every id of the vocabulary fits, else four.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokens {
    /// Ids below 2^16.
    U16(Vec<u16>),
    /// Any ids.
    U32(Vec<u32>),
}

impl Tokens {
    /// An empty sequence for a vocabulary of this many tokens.
    #[must_use]
    pub fn for_vocabulary(vocabulary: u32) -> Self {
        if vocabulary <= 1 << 16 { Self::U16(Vec::new()) } else { Self::U32(Vec::new()) }
    }

    /// Appends ids.
    ///
    /// # Panics
    /// If an id does not fit the width.
    pub fn extend(&mut self, ids: impl IntoIterator<Item = u32>) {
        match self {
            Self::U16(tokens) => tokens.extend(
                ids.into_iter()
                    .map(|id| u16::try_from(id).expect("an id fits its vocabulary's width")),
            ),
            Self::U32(tokens) => tokens.extend(ids),
        }
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U16(tokens) => tokens.len(),
            Self::U32(tokens) => tokens.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes a token, in memory and in a shard.
    #[must_use]
    pub fn width(&self) -> usize {
        match self {
            Self::U16(_) => 2,
            Self::U32(_) => 4,
        }
    }

    /// Appends `count` ids from position `start` on to `out`.
    ///
    /// # Panics
    /// Outside of the sequence.
    pub fn copy_to(&self, start: usize, count: usize, out: &mut Vec<u32>) {
        match self {
            Self::U16(tokens) => {
                out.extend(tokens[start..start + count].iter().map(|&id| u32::from(id)))
            }
            Self::U32(tokens) => out.extend_from_slice(&tokens[start..start + count]),
        }
    }
}
