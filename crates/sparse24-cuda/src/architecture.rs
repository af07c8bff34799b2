//! The GPU architectures that kernels are compiled for.

use std::fmt;

/// An architecture, named as the compiler names its machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Ampere data centre (A100): the first with sparse tensor cores.
    Sm80,
    /// Ampere (RTX 30, A40).
    Sm86,
    /// Ada (RTX 40, L40).
    Sm89,
    /// Hopper (H100, H200), with its own instructions.
    Sm90a,
    /// Blackwell data centre (B100, B200), with its own instructions.
    Sm100a,
    /// Blackwell (RTX 50), with its own instructions.
    Sm120a,
}

impl Architecture {
    /// All of them, ascending.
    pub const ALL: [Self; 6] = [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90a, Self::Sm100a, Self::Sm120a];

    /// The compiler's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm120a => "sm_120a",
        }
    }

    /// Whether a kernel may start while the previous one still runs.
    #[must_use]
    pub const fn starts_early(self) -> bool {
        matches!(self, Self::Sm90a | Self::Sm100a | Self::Sm120a)
    }

    /// The one whose machine code runs on a device of this compute capability; `None` below 8.0 and for one not known here.
    #[must_use]
    pub const fn of_capability(major: i32, minor: i32) -> Option<Self> {
        match (major, minor) {
            (8, 0) => Some(Self::Sm80),
            (8, 6 | 7) => Some(Self::Sm86),
            (8, 9) => Some(Self::Sm89),
            (9, 0) => Some(Self::Sm90a),
            (10, 0) => Some(Self::Sm100a),
            (12, 0) => Some(Self::Sm120a),
            _ => None,
        }
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
    fn a_capability_runs_code_of_its_own_generation() {
        for architecture in Architecture::ALL {
            let number: i32 = architecture.name().trim_start_matches("sm_").trim_end_matches('a').parse().expect("a number");
            assert_eq!(Architecture::of_capability(number / 10, number % 10), Some(architecture));
        }
        assert_eq!(Architecture::of_capability(7, 5), None);
        assert_eq!(Architecture::of_capability(8, 7), Some(Architecture::Sm86));
    }
}
