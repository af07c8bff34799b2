//! The GPU architectures that kernels are compiled for.

use std::fmt;

/// An architecture, under the compiler's name for its machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Ampere data centre (A100): the first with sparse tensor cores.
    Sm80,
    /// Ampere (RTX 30, A40).
    Sm86,
    /// Ampere (Jetson Orin); it does not run code for the desktop parts.
    Sm87,
    /// Ada (RTX 40, L40).
    Sm89,
    /// Hopper (H100, H200), with architecture-specific instructions.
    Sm90a,
    /// Blackwell data centre (B100, B200).
    Sm100a,
    /// Blackwell data centre (B300).
    Sm103a,
    /// Blackwell (Jetson Thor).
    Sm110a,
    /// Blackwell (RTX 50).
    Sm120a,
    /// Blackwell (DGX Spark).
    Sm121a,
}

impl Architecture {
    /// All architectures, ascending.
    pub const ALL: [Self; 10] = [
        Self::Sm80,
        Self::Sm86,
        Self::Sm87,
        Self::Sm89,
        Self::Sm90a,
        Self::Sm100a,
        Self::Sm103a,
        Self::Sm110a,
        Self::Sm120a,
        Self::Sm121a,
    ];

    /// The compiler's name, such as `sm_90a`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm87 => "sm_87",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm103a => "sm_103a",
            Self::Sm110a => "sm_110a",
            Self::Sm120a => "sm_120a",
            Self::Sm121a => "sm_121a",
        }
    }

    /// Bytes of shared memory that a thread block can have.
    #[must_use]
    pub const fn shared_memory(self) -> u32 {
        match self {
            Self::Sm80 | Self::Sm87 => 163 << 10,
            Self::Sm86 | Self::Sm89 | Self::Sm120a | Self::Sm121a => 99 << 10,
            Self::Sm90a | Self::Sm100a | Self::Sm103a | Self::Sm110a => 227 << 10,
        }
    }

    /// Whether programmatic dependent launch is available.
    #[must_use]
    pub const fn starts_early(self) -> bool {
        !matches!(self, Self::Sm80 | Self::Sm86 | Self::Sm87 | Self::Sm89)
    }

    /// The architecture of a compute capability; `None` below 8.0 and for unknown ones.
    #[must_use]
    pub fn of_capability(major: i32, minor: i32) -> Option<Self> {
        let name = format!("sm_{major}{minor}");
        Self::ALL.into_iter().find(|known| known.name().trim_end_matches('a') == name)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_map_to_architectures() {
        for (major, minor, architecture) in [
            (8, 0, Architecture::Sm80),
            (9, 0, Architecture::Sm90a),
            (10, 3, Architecture::Sm103a),
            (12, 1, Architecture::Sm121a),
        ] {
            assert_eq!(Architecture::of_capability(major, minor), Some(architecture));
        }
        for (major, minor) in [(7, 5), (8, 8), (9, 1), (13, 0)] {
            assert_eq!(Architecture::of_capability(major, minor), None);
        }
    }
}
