//! A sequence of token ids in memory, as narrow as the vocabulary allows.
//!
//! Invariant: the width is that of the vocabulary, not of the tokens that happen to occur.
//! Deliberately absent: files ([`super::shard`]).

/// Ids that are converted at a time.
const PIECE: usize = 1 << 14;

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

    /// The id at a position.
    ///
    /// # Panics
    /// Outside of the sequence.
    #[must_use]
    pub fn get(&self, at: usize) -> u32 {
        match self {
            Self::U16(tokens) => u32::from(tokens[at]),
            Self::U32(tokens) => tokens[at],
        }
    }

    /// The largest id; `None` for an empty sequence.
    #[must_use]
    pub fn largest(&self) -> Option<u32> {
        match self {
            Self::U16(tokens) => tokens.iter().max().map(|&id| u32::from(id)),
            Self::U32(tokens) => tokens.iter().max().copied(),
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

    /// The ids as little-endian bytes, `width` each (2 only where every id fits), piece by piece.
    pub(crate) fn for_each_piece<E>(
        &self,
        width: usize,
        mut piece: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = Vec::with_capacity(PIECE * width);
        for start in (0..self.len()).step_by(PIECE) {
            bytes.clear();
            for at in start..self.len().min(start + PIECE) {
                bytes.extend_from_slice(&self.get(at).to_le_bytes()[..width]);
            }
            piece(&bytes)?;
        }
        Ok(())
    }
}
