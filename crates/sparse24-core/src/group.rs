//! A group is four consecutive elements along the contraction dimension; there are six ways to keep
//! two of them.

/// The kept pair `i0 < i1` of a group, one of six.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pattern(u8);

/// `[i0, i1]` of each pattern, lexicographic.
const INDICES: [[u8; 2]; 6] = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];

impl Pattern {
    /// All six, in the order 01, 02, 03, 12, 13, 23.
    pub const ALL: [Self; 6] = [Self(0), Self(1), Self(2), Self(3), Self(4), Self(5)];

    /// The pattern that keeps `first < second`; `None` for any other pair.
    #[must_use]
    pub fn from_indices([first, second]: [u8; 2]) -> Option<Self> {
        Self::ALL.into_iter().find(|pattern| pattern.indices() == [first, second])
    }

    /// The pattern of a metadata nibble; `None` unless it is one of 4, 8, c, 9, d, e.
    #[must_use]
    pub fn from_nibble(nibble: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|pattern| pattern.nibble() == nibble)
    }

    /// The pattern whose kept elements are the set bits (bit i = element i); `None` unless exactly
    /// two of the low four are set.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|pattern| pattern.bits() == bits)
    }

    /// Position in [`Self::ALL`], 0..6.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The kept elements, ascending.
    #[must_use]
    pub fn indices(self) -> [u8; 2] {
        INDICES[self.index()]
    }

    /// The metadata of a group in the hardware's encoding, `i0 | i1 << 2`: 4, 8, c, 9, d, e.
    #[must_use]
    pub fn nibble(self) -> u8 {
        let [first, second] = self.indices();
        first | second << 2
    }

    /// Bit i is set if element i is kept.
    #[must_use]
    pub fn bits(self) -> u8 {
        let [first, second] = self.indices();
        1 << first | 1 << second
    }
}

impl core::fmt::Debug for Pattern {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [first, second] = self.indices();
        write!(f, "Pattern({first}{second})")
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn nibbles_and_bits() {
        assert_eq!(Pattern::ALL.map(Pattern::nibble), [0x4, 0x8, 0xc, 0x9, 0xd, 0xe]);
        assert_eq!(
            Pattern::ALL.map(Pattern::bits),
            [0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100]
        );
    }

    #[test]
    fn everything_else_is_rejected() {
        for pattern in Pattern::ALL {
            assert_eq!(Pattern::from_nibble(pattern.nibble()), Some(pattern));
            assert_eq!(Pattern::from_bits(pattern.bits()), Some(pattern));
            assert_eq!(Pattern::from_indices(pattern.indices()), Some(pattern));
        }
        assert_eq!((0..=u8::MAX).filter_map(Pattern::from_nibble).count(), 6);
        assert_eq!((0..=u8::MAX).filter_map(Pattern::from_bits).count(), 6);
        assert_eq!(Pattern::from_indices([2, 1]), None);
        assert_eq!(Pattern::from_indices([3, 3]), None);
        assert_eq!(Pattern::from_indices([3, 4]), None);
    }
}
