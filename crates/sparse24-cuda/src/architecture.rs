//! The GPU architectures that kernels are compiled for.

use std::fmt;

/// An architecture, named as the compiler names its machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Ampere data centre (A100): the first with sparse tensor cores.
    Sm80,
    /// Ampere (RTX 30, A40).
    Sm86,
    /// Ampere (Jetson Orin): not one of the desktop's, whose machine code it does not run.
    Sm87,
    /// Ada (RTX 40, L40).
    Sm89,
    /// Hopper (H100, H200), with its own instructions.
    Sm90a,
    /// Blackwell data centre (B100, B200), with its own instructions.
    Sm100a,
    /// Blackwell data centre (B300), with its own instructions.
    Sm103a,
    /// Blackwell (Jetson Thor), with its own instructions.
    Sm110a,
    /// Blackwell (RTX 50), with its own instructions.
    Sm120a,
    /// Blackwell (DGX Spark), with its own instructions.
    Sm121a,
}

impl Architecture {
    /// All of them, ascending.
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

    /// The compiler's name.
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

    /// Whether a kernel may start while the previous one still runs.
    #[must_use]
    pub const fn starts_early(self) -> bool {
        !matches!(self, Self::Sm80 | Self::Sm86 | Self::Sm87 | Self::Sm89)
    }

    /// The one whose machine code runs on a device of this compute capability; `None` below 8.0 and
    /// for one not known here.
    #[must_use]
    pub const fn of_capability(major: i32, minor: i32) -> Option<Self> {
        match (major, minor) {
            (8, 0) => Some(Self::Sm80),
            (8, 6) => Some(Self::Sm86),
            (8, 7) => Some(Self::Sm87),
            (8, 9) => Some(Self::Sm89),
            (9, 0) => Some(Self::Sm90a),
            (10, 0) => Some(Self::Sm100a),
            (10, 3) => Some(Self::Sm103a),
            (11, 0) => Some(Self::Sm110a),
            (12, 0) => Some(Self::Sm120a),
            (12, 1) => Some(Self::Sm121a),
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
            let number: i32 = architecture
                .name()
                .trim_start_matches("sm_")
                .trim_end_matches('a')
                .parse()
                .expect("a number");
            assert_eq!(Architecture::of_capability(number / 10, number % 10), Some(architecture));
        }
        for (major, minor) in [(7, 5), (8, 8), (9, 1), (13, 0)] {
            assert_eq!(Architecture::of_capability(major, minor), None);
        }
    }
}
