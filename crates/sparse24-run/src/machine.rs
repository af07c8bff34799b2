//! The memory of this machine.

/// Main memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Installed memory.
    pub total: u64,
    /// Memory available without swapping.
    pub available: u64,
}

/// Reads `/proc/meminfo`; `None` on systems without it.
#[must_use]
pub fn memory() -> Option<Memory> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<Memory> {
    let bytes = |key: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: bytes("MemTotal")?, available: bytes("MemAvailable")? })
}

#[cfg(test)]
mod tests {
    use super::{Memory, parse};

    #[test]
    fn both_amounts_are_read_in_bytes() {
        let text = "MemTotal:       16 kB\nMemFree:         1 kB\nMemAvailable:    4 kB\n";
        assert_eq!(parse(text), Some(Memory { total: 16_384, available: 4096 }));
        for damaged in [
            "",
            "MemTotal: 16 kB\n",
            "MemTotal: 16\nMemAvailable: 4\n",
            "MemTotal: x kB\nMemAvailable: 4 kB\n",
        ] {
            assert_eq!(parse(damaged), None, "{damaged}");
        }
    }
}
