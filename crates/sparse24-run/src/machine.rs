//! The memory of this machine, and how much of it this process may use: cgroups, Slurm and
//! `ulimit -v` may allow less.

use std::{
    env, fmt, fs,
    path::{Component, Path},
};

use serde::Serialize;

/// Main memory, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Installed memory.
    pub total: u64,
    /// Memory available without swapping and within all limits.
    pub available: u64,
    /// The lowest limit below the installed memory.
    pub limit: Option<Limit>,
}

/// The most memory that this process may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// Its source: the path of a cgroup, a variable of Slurm, or `ulimit -v`.
    pub by: String,
}

impl Memory {
    /// Why a run that needs so many bytes cannot have them.
    #[must_use]
    pub fn refuses(&self, needed: u64) -> Option<String> {
        let usable = self.limit.as_ref().map_or(self.total, |limit| limit.bytes);
        (needed > usable).then(|| format!("needs {} MiB of memory, {self}", needed >> 20))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total >> 20;
        match &self.limit {
            Some(Limit { bytes, by }) => {
                write!(f, "{by} allows {} MiB of this machine's {total} MiB", bytes >> 20)
            }
            None => write!(f, "this machine has {total} MiB"),
        }
    }
}

/// Address space of the program and its libraries.
#[cfg(unix)]
const PROGRAM_BYTES: u64 = 40 << 20;
/// Address space of a thread: an arena of the allocator, and the packing buffer of its dense
/// products, twice the last-level cache. Little of it is ever memory, but `ulimit -v` counts it.
#[cfg(unix)]
fn thread_bytes(root: &Path) -> u64 {
    let size = fs::read_to_string(root.join("sys/devices/system/cpu/cpu0/cache/index3/size"));
    let kib = size.ok().and_then(|size| size.trim().strip_suffix('K')?.parse::<u64>().ok());
    (64 << 20) + 2 * kib.map_or(32 << 20, |kib| kib.saturating_mul(1024))
}

/// Reads the memory of this machine and the limits of this process; `None` on systems without
/// `/proc/meminfo`.
#[must_use]
pub fn memory() -> Option<Memory> {
    #[cfg(unix)]
    let address_space = rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(unix)]
    let address_space = address_space.map(|bytes| {
        bytes.saturating_sub(
            PROGRAM_BYTES + thread_bytes(Path::new("/")) * sparse24_cpu::threads() as u64,
        )
    });
    #[cfg(not(unix))]
    let address_space = None;
    read(Path::new("/"), |name| env::var(name).ok(), address_space)
}

/// Like [`memory`], with the files below `root`, these variables, and this limit of the address
/// space.
fn read(
    root: &Path,
    variable: impl Fn(&str) -> Option<String>,
    address_space: Option<u64>,
) -> Option<Memory> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let bytes = |key: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, available) = (bytes("MemTotal")?, bytes("MemAvailable")?);
    let mut bounds = cgroups(root);
    bounds.extend(slurm(variable).map(|limit| (limit, 0)));
    bounds.extend(address_space.map(|bytes| (Limit { bytes, by: ADDRESS_SPACE.to_owned() }, 0)));
    bounds.retain(|(limit, _)| limit.bytes < total);
    let free = bounds.iter().map(|(limit, used)| limit.bytes.saturating_sub(*used));
    let available = free.fold(available, u64::min);
    let limit = bounds.into_iter().map(|(limit, _)| limit).min_by_key(|limit| limit.bytes);
    Some(Memory { total, available, limit })
}

/// The source of a limit of the address space.
const ADDRESS_SPACE: &str = "`ulimit -v`, without what the program and its threads reserve,";

/// The names of a version of cgroups.
struct Version {
    /// The controller in `/proc/self/cgroup`.
    controller: &'static str,
    limits: &'static [&'static str],
    used: &'static str,
    /// Counters of the page cache, which is given up before memory is refused.
    cache: [&'static str; 2],
}

const VERSION_1: Version = Version {
    controller: "memory",
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

/// A cgroup above `memory.high` is not killed, but slowed down until it is of no use.
const VERSION_2: Version = Version {
    controller: "",
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

/// The limits of the process's cgroup and of those around it, as far as they are mounted, each with
/// the bytes in use without page cache.
fn cgroups(root: &Path) -> Vec<(Limit, u64)> {
    let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let [own, mounts] =
        ["cgroup", "mountinfo"].map(|name| text(&root.join("proc/self").join(name)));
    let mut bounds = Vec::new();
    for (version, top, mounted) in mounts.lines().filter_map(mount) {
        let of_version = |line: &str| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let is_it = controllers.split(',').any(|name| name == version.controller);
            is_it.then(|| path.to_owned())
        };
        let Some(own) = own.lines().find_map(of_version) else { continue };
        // The mount may start at a cgroup further down, or the cgroup lie outside of it.
        let below = Path::new(&own).strip_prefix(top).unwrap_or(Path::new(""));
        let is_inside = below.components().all(|name| matches!(name, Component::Normal(_)));
        let mounted = root.join(mounted.trim_start_matches('/'));
        let own = if is_inside { mounted.join(below) } else { mounted.clone() };
        for cgroup in own.ancestors().take_while(|cgroup| cgroup.starts_with(&mounted)) {
            let number = |name: &str| text(&cgroup.join(name)).trim().parse::<u64>().ok();
            let Some(bytes) = version.limits.iter().filter_map(|name| number(name)).min() else {
                continue;
            };
            let counters = text(&cgroup.join("memory.stat"));
            let counter = |name: &str| {
                let line = counters.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|line| line.trim().parse::<u64>().ok()).unwrap_or(0)
            };
            let cache = version.cache.map(counter).into_iter().fold(0, u64::saturating_add);
            let used = number(version.used).unwrap_or(0).saturating_sub(cache);
            let name = cgroup.strip_prefix(&mounted).expect("it starts with it").display();
            bounds.push((Limit { bytes, by: format!("the cgroup /{name}") }, used));
        }
    }
    bounds
}

/// The version of a mount of cgroups with the controller of memory, the cgroup that is mounted, and
/// where: from a line of `/proc/self/mountinfo`.
fn mount(line: &str) -> Option<(Version, &str, &str)> {
    let (mount, system) = line.split_once(" - ")?;
    let (mut mount, mut system) = (mount.split(' ').skip(3), system.split(' '));
    let version = match system.next()? {
        "cgroup2" => VERSION_2,
        "cgroup" if system.nth(1)?.split(',').any(|option| option == "memory") => VERSION_1,
        _ => return None,
    };
    Some((version, mount.next()?, mount.next()?))
}

/// The memory that a job of Slurm asked for on this node; 0 is all of it.
fn slurm(variable: impl Fn(&str) -> Option<String>) -> Option<Limit> {
    let number = |name: &str| variable(name)?.trim().parse::<u64>().ok();
    let limits = [
        ("SLURM_MEM_PER_NODE", None),
        ("SLURM_MEM_PER_CPU", Some("SLURM_CPUS_ON_NODE")),
        ("SLURM_MEM_PER_GPU", Some("SLURM_GPUS_ON_NODE")),
    ];
    limits.into_iter().find_map(|(name, times)| {
        let mebibytes = number(name)?.checked_mul(times.map_or(Some(1), number)?)?;
        let bytes = mebibytes.checked_mul(1 << 20).filter(|&bytes| bytes > 0)?;
        Some(Limit { bytes, by: name.to_owned() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[cfg(unix)]
    #[test]
    fn a_thread_reserves_twice_the_last_cache() {
        let cache = "sys/devices/system/cpu/cpu0/cache/index3/size";
        for (files, mib) in [(&[(cache, "491520K\n")][..], 1024), (&[], 128)] {
            assert_eq!(thread_bytes(machine(files).path()), mib * MIB);
        }
    }

    /// A machine of 1000 MiB, 900 of them available.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let meminfo = "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 921600 kB\n";
        for (name, text) in [("proc/meminfo", meminfo)].iter().chain(files) {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        root
    }

    fn found(files: &[(&str, &str)], variables: &[(&str, &str)]) -> (u64, Option<(u64, String)>) {
        let variable = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        let Memory { total, available, limit } =
            read(machine(files).path(), variable, None).unwrap();
        assert_eq!(total, 1000 * MIB);
        (available / MIB, limit.map(|limit| (limit.bytes / MIB, limit.by)))
    }

    #[test]
    fn a_damaged_list_of_memory_is_unknown() {
        for damaged in [
            "",
            "MemTotal: 16 kB\n",
            "MemTotal: 16\nMemAvailable: 4\n",
            "MemTotal: x kB\nMemAvailable: 4 kB\n",
        ] {
            let root = machine(&[("proc/meminfo", damaged)]);
            assert_eq!(read(root.path(), |_| None, None), None, "{damaged}");
        }
    }

    #[test]
    fn the_lowest_limit_on_the_way_up_counts() {
        const MOUNT: &str = "proc/self/mountinfo";
        const OWN: &str = "proc/self/cgroup";
        let second = [
            (OWN, "0::/job/step\n"),
            (MOUNT, "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.high", "524288000\n"),
            ("sys/fs/cgroup/job/memory.max", "314572800\n"),
            ("sys/fs/cgroup/job/memory.current", "209715200\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 104857600\n"),
        ];
        assert_eq!(found(&second, &[]), (200, Some((300, "the cgroup /job".to_owned()))));
        let higher = |at: &str| (300, Some((300, format!("the cgroup /{at}"))));
        // A container sees only its own cgroup, whose path may be that of the host.
        for (own, top) in [("0::/\n", "/"), ("0::/host/a\n", "/host/a"), ("0::/../b\n", "/")] {
            let mount = format!("41 31 0:38 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
            let files = [(OWN, own), (MOUNT, &mount), ("sys/fs/cgroup/memory.max", "314572800")];
            assert_eq!(found(&files, &[]), higher(""), "{own}");
        }
        let mounts = "36 31 0:33 / /cg/devices rw - cgroup cgroup rw,devices\n\
            35 31 0:32 / /cg/memory rw,relatime - cgroup cgroup rw,memory\n\
            41 31 0:38 / /cg/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let own = "5:devices:/\n4:memory:/a/b\n0::/\n";
        let unlimited = "9223372036854771712\n";
        let mut first = vec![
            (OWN, own),
            (MOUNT, mounts),
            ("cg/memory/a/b/memory.limit_in_bytes", "314572800\n"),
            ("cg/memory/a/memory.limit_in_bytes", unlimited),
            ("cg/memory/memory.limit_in_bytes", unlimited),
        ];
        assert_eq!(found(&first, &[]), higher("a/b"));
        first[2].1 = unlimited;
        assert_eq!(found(&first, &[]), (900, None));
    }

    #[test]
    fn the_memory_of_a_slurm_job_is_a_limit() {
        let limit = |by: &str| (200, Some((200, by.to_owned())));
        for (variables, expected) in [
            (vec![("SLURM_MEM_PER_NODE", "200")], limit("SLURM_MEM_PER_NODE")),
            (
                vec![("SLURM_MEM_PER_CPU", "100"), ("SLURM_CPUS_ON_NODE", "2")],
                limit("SLURM_MEM_PER_CPU"),
            ),
            (vec![("SLURM_MEM_PER_CPU", "100")], (900, None)),
            (vec![("SLURM_MEM_PER_NODE", "0")], (900, None)),
            (vec![("SLURM_MEM_PER_NODE", "99999999999999999999")], (900, None)),
        ] {
            assert_eq!(found(&[], &variables), expected, "{variables:?}");
        }
    }

    #[test]
    fn the_limit_of_the_address_space_is_named() {
        let memory = read(machine(&[]).path(), |_| None, Some(100 * MIB)).unwrap();
        let allows = "allows 100 MiB of this machine's 1000 MiB";
        let why = format!("needs 101 MiB of memory, {ADDRESS_SPACE} {allows}");
        assert_eq!(memory.refuses(101 * MIB).as_deref(), Some(&*why));
        assert_eq!(memory.refuses(100 * MIB), None);
    }
}
