//! Instruction-set levels, and all unsafe code of this crate.
//!
//! Invariant: an [`Available`] exists only for a level that this machine has, so that holding one proves that its instructions may run.
//! Every kernel gives the same bits at every level: multiplications and additions are never contracted.

/// An instruction-set level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Simd {
    /// What the target always has.
    Portable,
    /// AVX2 with BMI2 and F16C (x86-64-v3 without FMA).
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VBMI2, beside AVX2's.
    Avx512,
}

impl Simd {
    /// All levels, ascending.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The highest level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Available::best().simd()
    }

    /// The proof that this machine has the level; `None` if it has not.
    #[must_use]
    pub fn available(self) -> Option<Available> {
        let present = match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.available().is_some()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi2")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        };
        present.then_some(Available(self))
    }
}

impl core::fmt::Display for Simd {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        })
    }
}

/// A level that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Available(Simd);

impl Available {
    /// The highest level of this machine.
    #[must_use]
    pub fn best() -> Self {
        Simd::ALL.into_iter().rev().find_map(Simd::available).unwrap_or(Self(Simd::Portable))
    }

    /// The level.
    #[must_use]
    pub fn simd(self) -> Simd {
        self.0
    }

    /// Runs a loop compiled for this level.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            Simd::Portable => kernel.run(),
            // SAFETY: an `Available` of this level exists, so the machine has its instructions.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            Simd::Avx2 | Simd::Avx512 => unreachable!("no such level on this architecture"),
        }
    }
}

/// A loop in plain Rust that the compiler vectorises for the level at which it runs: `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    fn run(self);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt,f16c")]
fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2")]
fn run_avx512<K: Kernel>(kernel: K) {
    kernel.run();
}
