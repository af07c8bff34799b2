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
    /// The lowest limit below the installed memory, of all ranks on this machine together.
    pub limit: Option<Limit>,
    /// The limit of this process's address space, if it is below the installed memory.
    pub address_space: Option<Limit>,
}

/// The most memory that may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// Its source: the path of a cgroup, a variable of Slurm, or `ulimit -v`.
    pub by: String,
}

impl Memory {
    /// Why a process that needs this many bytes cannot have them, as one of `ranks` on this
    /// machine, and the remedy.
    #[must_use]
    pub fn refuses(&self, needed: u64, ranks: usize) -> Option<String> {
        let limits = [(self.address_space.as_ref(), 1), (self.limit.as_ref(), ranks)];
        let (limit, ranks) = limits.into_iter().find(|&(limit, ranks)| {
            let usable = limit.map_or(self.total, |limit| limit.bytes);
            needed.saturating_mul(ranks as u64) > usable
        })?;
        let each = match ranks {
            1 => String::new(),
            _ => format!(" for each of this machine's {ranks} ranks"),
        };
        let remedy = match limit {
            Some(Limit { by, .. }) if by == ADDRESS_SPACE => SPACE_REMEDY,
            _ => REMEDY,
        };
        let bound = self.bounded(limit);
        Some(format!("needs {} MiB of memory{each}, {bound}; {remedy}", needed >> 20))
    }

    fn bounded(&self, limit: Option<&Limit>) -> String {
        let total = self.total >> 20;
        match limit {
            Some(Limit { bytes, by }) => {
                format!("{by} allows {} MiB of this machine's {total} MiB", bytes >> 20)
            }
            None => format!("this machine has {total} MiB"),
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = [&self.limit, &self.address_space].into_iter().flatten();
        f.write_str(&self.bounded(limits.min_by_key(|limit| limit.bytes)))
    }
}

/// Address space of a thread besides its buffers: its stack, and an arena of the allocator. Little
/// of it is ever memory, but `ulimit -v` counts it.
#[cfg(unix)]
const THREAD_BYTES: u64 = 66 << 20;

/// Address space of the program and its libraries, and of the threads beside the pool's: one each
/// for signals, batches and checkpoints.
#[cfg(unix)]
const PROGRAM_BYTES: u64 = (40 << 20) + 3 * THREAD_BYTES;

/// The packing buffer of a thread's dense products: twice the last-level cache.
#[cfg(unix)]
fn packing_bytes(root: &Path) -> u64 {
    let size = fs::read_to_string(root.join("sys/devices/system/cpu/cpu0/cache/index3/size"));
    let kib = size.ok().and_then(|size| size.trim().strip_suffix('K')?.parse::<u64>().ok());
    2 * kib.map_or(32 << 20, |kib| kib.saturating_mul(1024))
}

/// Why this process cannot have this many bytes, besides what its threads will still reserve, under
/// a limit on its address space. Asks the system for all of it and gives it back, because a rank
/// has threads that [`memory`] does not know of.
#[cfg(unix)]
pub(crate) fn lacks_address_space(needed: u64) -> Option<String> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let granted = |bytes: u64| {
        let mut space = Vec::<u8>::new();
        let granted = space.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX));
        granted.is_ok().then(|| std::hint::black_box(space))
    };
    let packing = packing_bytes(Path::new("/"));
    // Batches and checkpoints have no threads yet.
    let own = granted(needed.saturating_add(2 * THREAD_BYTES));
    let all = rayon::broadcast(|_| granted(packing));
    if own.is_some() && all.iter().all(Option::is_some) {
        return None;
    }
    let (needed, packing, limit) = (needed >> 20, packing >> 20, limit >> 20);
    Some(format!(
        "needs {needed} MiB of memory, and {packing} MiB for each of its {} threads, more than \
         `ulimit -v` leaves of {limit} MiB; {SPACE_REMEDY}",
        all.len()
    ))
}

#[cfg(not(unix))]
pub(crate) fn lacks_address_space(_: u64) -> Option<String> {
    None
}

/// Reads the memory of this machine and the limits of this process; `None` on systems without
/// `/proc/meminfo`.
#[must_use]
pub fn memory() -> Option<Memory> {
    #[cfg(unix)]
    let address_space = rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(unix)]
    let address_space = address_space.map(|bytes| {
        let thread = THREAD_BYTES + packing_bytes(Path::new("/"));
        bytes.saturating_sub(PROGRAM_BYTES + thread * sparse24_cpu::threads() as u64)
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
    bounds.retain(|(limit, _)| limit.bytes < total);
    let address_space = address_space.filter(|&bytes| bytes < total);
    let address_space = address_space.map(|bytes| Limit { bytes, by: ADDRESS_SPACE.to_owned() });
    let free = bounds.iter().map(|(limit, used)| limit.bytes.saturating_sub(*used));
    let free = free.chain(address_space.as_ref().map(|limit| limit.bytes));
    let available = free.fold(available, u64::min);
    let limit = bounds.into_iter().map(|(limit, _)| limit).min_by_key(|limit| limit.bytes);
    Some(Memory { total, available, limit, address_space })
}

const REMEDY: &str = "choose a smaller model or batch.size";

const SPACE_REMEDY: &str =
    "raise that limit, lower backend.threads, or choose a smaller model or batch.size";

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
        for (files, mib) in [(&[(cache, "491520K\n")][..], 960), (&[], 64)] {
            assert_eq!(packing_bytes(machine(files).path()), mib * MIB);
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
        let Memory { total, available, limit, .. } =
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

    type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

    /// Each rank has an address space of its own; all share the memory.
    #[test]
    fn the_limit_that_refuses_is_named() {
        let each = " for each of this machine's 4 ranks";
        let in_space = format!("{ADDRESS_SPACE} allows 100 MiB of this machine's 1000 MiB");
        let in_job = "SLURM_MEM_PER_NODE allows 200 MiB of this machine's 1000 MiB";
        let slurm = |name: &str| (name == "SLURM_MEM_PER_NODE").then(|| "200".to_owned());
        let none = |_: &str| None;
        let variables: [Variables<'_>; 2] = [&none, &slurm];
        for (job, space, most, ranks, expected) in [
            (0, Some(100), 100, 1, format!(", {in_space}")),
            (0, Some(100), 100, 4, format!(", {in_space}")),
            (1, Some(100), 100, 1, format!(", {in_space}")),
            (1, Some(100), 50, 4, format!("{each}, {in_job}")),
            (1, None, 200, 1, format!(", {in_job}")),
            (0, None, 250, 4, format!("{each}, this machine has 1000 MiB")),
        ] {
            let space = space.map(|mib: u64| mib * MIB);
            let memory = read(machine(&[]).path(), variables[job], space).unwrap();
            assert_eq!(memory.refuses(most * MIB, ranks), None, "{expected}");
            let refused = memory.refuses((most + 1) * MIB, ranks);
            let remedy = if expected.contains("ulimit") { SPACE_REMEDY } else { REMEDY };
            let expected = format!("needs {} MiB of memory{expected}; {remedy}", most + 1);
            assert_eq!(refused.as_deref(), Some(&*expected));
        }
    }
}
