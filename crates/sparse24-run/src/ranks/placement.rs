//! Which rank a process is, from the environment that its launcher gives it.
//!
//! The first launcher of [`LAUNCHERS`] whose variables are set counts. Rank 0 is at `MASTER_ADDR`
//! and `MASTER_PORT`, and without them at `SPARSE24_RENDEZVOUS` for our own launcher, on the first
//! machine of a Slurm step, and on this machine if it has all ranks. An Indexed Job of Kubernetes
//! numbers machines, not ranks: each runs `sparse24 launch`.

use std::{collections::BTreeMap, ops::RangeInclusive};

use crate::{Error, Result};

/// The place of a process among the ranks of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The program that started it.
    pub launcher: &'static str,
    /// The number of this rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// The number of this rank among those of this machine.
    pub local_rank: usize,
    /// The number of ranks on this machine.
    pub local_world: usize,
    /// Where rank 0 is, by name or address.
    pub host: String,
    /// The variable that says so.
    pub source: &'static str,
    /// The ports of which rank 0 takes the first that is free.
    pub ports: RangeInclusive<u16>,
    /// A name that this start of the ranks has and others have not; may be empty.
    pub run: String,
}

/// The environment of a process.
pub type Environment = BTreeMap<String, String>;

/// The names of a launcher's variables.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
    /// They name a start, as far as they are set.
    run: &'static [&'static str],
}

const OURS: Launcher = Launcher {
    name: "sparse24",
    rank: "SPARSE24_RANK",
    world: "SPARSE24_WORLD",
    local_rank: "SPARSE24_LOCAL_RANK",
    local_world: "SPARSE24_LOCAL_WORLD",
    run: &[],
};

const SLURM: Launcher = Launcher {
    name: "srun",
    rank: "SLURM_PROCID",
    world: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world: "",
    run: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
};

const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_world: "LOCAL_WORLD_SIZE",
    run: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
};

const LAUNCHERS: [&Launcher; 5] = [
    &OURS,
    &TORCHRUN,
    &Launcher {
        name: "mpirun (Open MPI)",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
        run: &["PMIX_NAMESPACE"],
    },
    &Launcher {
        name: "mpirun (MPICH)",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
        run: &[],
    },
    &SLURM,
];

const RENDEZVOUS: &str = "SPARSE24_RENDEZVOUS";

/// Ports that are tried, where the launcher names one that may be taken.
const TRIED: u16 = 16;

/// Where rank 0 listens if nothing says so.
const PORT: u16 = 29500;

/// Most ranks: each is connected to every other.
const MOST: usize = 1 << 16;

impl Placement {
    /// Where rank 0 is, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        let Self { host, ports, .. } = self;
        match (ports.start(), ports.end()) {
            (first, last) if first < last => format!("{host}, ports {first} to {last}"),
            (port, _) if host.contains(':') => format!("[{host}]:{port}"),
            (port, _) => format!("{host}:{port}"),
        }
    }
}

/// The first launcher whose variables are set.
fn launcher(environment: &Environment) -> Option<&'static Launcher> {
    let is_complete = |launcher: &&&Launcher| {
        let Launcher { rank, world, local_rank, .. } = launcher;
        [rank, world, local_rank].iter().all(|&&name| environment.contains_key(name))
    };
    LAUNCHERS.iter().find(is_complete).copied()
}

/// The variable by which a process is one of several ranks, with its value, if there is one.
#[must_use]
pub fn several(environment: &Environment) -> Option<(&'static str, &str)> {
    let counted = environment.contains_key(TORCHRUN.rank).then_some(TORCHRUN.world);
    let world = launcher(environment).map(|launcher| launcher.world).or(counted)?;
    let value = environment.get(world).filter(|value| *value != "1")?;
    Some((world, value))
}

/// The placement that an environment describes; none if it describes one rank alone.
///
/// # Errors
/// [`Error::Setting`] names the variable that is missing or wrong.
pub fn placement(environment: &Environment) -> Result<Option<Placement>> {
    let set = |name: &str| environment.get(name).map(String::as_str);
    let Some(launcher) = launcher(environment) else {
        return match several(environment) {
            None => Ok(None),
            // Kubeflow's PyTorchJob counts machines.
            Some(_) => Err(Error::setting(
                "LOCAL_RANK",
                "is not set, so RANK and WORLD_SIZE may count machines or processes; start each \
                 machine with `sparse24 launch --nodes M --node I -n RANKS --rendezvous HOST:PORT`",
            )),
        };
    };
    let number = |name: &str| {
        let text = set(name).unwrap_or_default();
        let expected = || Error::setting(name, format!("expected a number, found {text:?}"));
        text.parse::<usize>().map_err(|_| expected())
    };
    let [rank, world, local_rank] =
        [number(launcher.rank)?, number(launcher.world)?, number(launcher.local_rank)?];
    let local_world = match set(launcher.local_world) {
        Some(_) => number(launcher.local_world)?,
        None if launcher.name == SLURM.name => tasks_here(environment).unwrap_or(1),
        None => 1,
    };
    for (name, number) in [(launcher.world, world), (launcher.local_world, local_world)] {
        if !(1..=MOST).contains(&number) {
            bail!(setting = name, "expected a number from 1 to {MOST}, found {number}");
        }
    }
    for (name, number, of) in
        [(launcher.rank, rank, world), (launcher.local_rank, local_rank, local_world)]
    {
        if number >= of {
            bail!(setting = name, "expected a number below {of}, found {number}");
        }
    }
    if world == 1 {
        return Ok(None);
    }
    let (source, host, ports) = match (launcher.name, set("MASTER_ADDR")) {
        (name, _) if name == OURS.name => {
            let (host, port) = address(set(RENDEZVOUS).unwrap_or_default())?;
            (RENDEZVOUS, host, port..=port)
        }
        (name, None) if name == SLURM.name => {
            let nodes = set("SLURM_STEP_NODELIST").unwrap_or_default();
            // A port for each job of the last few thousand.
            let job = number("SLURM_JOB_ID")?;
            let port = 61_440 + TRIED * (job % (4096 / TRIED as usize)) as u16;
            ("SLURM_STEP_NODELIST", first_host(nodes), port..=port + TRIED - 1)
        }
        (_, host) => {
            let host = match host {
                Some(host) => host.to_owned(),
                None if local_world == world => "127.0.0.1".to_owned(),
                None => {
                    bail!(
                        setting = "MASTER_ADDR",
                        "is not set, and the ranks are on several machines; set it to \
                        the host name of rank 0's (mpirun -x MASTER_ADDR=...)"
                    );
                }
            };
            let port = set("MASTER_PORT").map_or(Ok(PORT.into()), |_| number("MASTER_PORT"))?;
            // The agent of torchrun has the port itself.
            let taken = u16::from(set("TORCHELASTIC_USE_AGENT_STORE") == Some("True"));
            let first = u16::try_from(port).ok().filter(|&port| port > 0);
            let first = first.and_then(|port| port.checked_add(taken));
            let last = first.and_then(|first| first.checked_add(TRIED - 1));
            let Some((first, last)) = first.zip(last) else {
                bail!(setting = "MASTER_PORT", "expected a port from 1 to 65500, found {port}");
            };
            ("MASTER_ADDR", host, first..=last)
        }
    };
    let run: Vec<_> = launcher.run.iter().filter_map(|name| set(name)).collect();
    let (launcher, run) = (launcher.name, run.join("."));
    Ok(Some(Placement { launcher, rank, world, local_rank, local_world, host, source, ports, run }))
}

/// Host and port of `HOST:PORT`, where an IPv6 address is in brackets.
fn address(text: &str) -> Result<(String, u16)> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && port > 0 => {
            Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
        }
        _ => {
            let problem = format!("expected HOST:PORT of rank 0, found {text:?}");
            Err(Error::setting(RENDEZVOUS, problem))
        }
    }
}

/// The first host of a list of Slurm, such as `rack[1-2]n[007,9],b`.
fn first_host(nodes: &str) -> String {
    let (mut host, mut is_skipped) = (String::new(), false);
    let mut is_range = false;
    for c in nodes.chars() {
        match c {
            '[' => is_range = true,
            ']' => (is_range, is_skipped) = (false, false),
            ',' | '-' if is_range => is_skipped = true,
            ',' => break,
            _ if is_skipped => {}
            c => host.push(c),
        }
    }
    host
}

/// The number of a Slurm step's tasks on this machine, from a list such as `4(x2),3`.
fn tasks_here(environment: &Environment) -> Option<usize> {
    let mut node: usize = environment.get("SLURM_NODEID")?.parse().ok()?;
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE")?.split(',') {
        let (tasks, nodes) = part.split_once("(x").unwrap_or((part, "1)"));
        let nodes: usize = nodes.strip_suffix(')')?.parse().ok()?;
        if node < nodes {
            return tasks.parse().ok();
        }
        node -= nodes;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(text: &str) -> Environment {
        let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn of(text: &str) -> Result<Option<Placement>> {
        placement(&variables(text))
    }

    /// Environments without what is not read. Those of srun (Slurm 22.05.8; the number of the job
    /// is changed), srun in a batch script, Open MPI 4.1.4 and MPICH 4.0.2 (and a `MASTER_ADDR`)
    /// are recorded. torchrun's follows `torch/distributed/elastic/agent/server` of PyTorch.
    #[test]
    fn every_launcher_is_recognized() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 \
            MASTER_ADDR=head MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none \
            TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True";
        let srun = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 \
            SLURM_JOB_ID=70001 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=4,3 \
            SLURM_STEP_NODELIST=n[07-08]";
        let batch = "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 \
            SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2(x2) \
            SLURM_STEP_NODELIST=n[07-08] SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2";
        let ompi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
            OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1536294913";
        let mpich = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=::1 \
            MASTER_PORT=4000";
        let launch = "SPARSE24_RANK=1 SPARSE24_WORLD=8 SPARSE24_LOCAL_RANK=1 \
            SPARSE24_LOCAL_WORLD=8 SPARSE24_RENDEZVOUS=[::1]:80";
        for (environment, expected) in [
            (torchrun, ("torchrun", [3, 4, 1, 2], "head", 29401..=29416, "none.2")),
            (srun, ("srun", [5, 7, 1, 3], "n07", 63_248..=63_263, "70001.0")),
            (ompi, ("mpirun (Open MPI)", [1, 2, 1, 2], "127.0.0.1", 29500..=29515, "1536294913")),
            (batch, ("srun", [3, 4, 1, 2], "n07", 61_472..=61_487, "2.0")),
            (mpich, ("mpirun (MPICH)", [1, 2, 1, 2], "::1", 4000..=4015, "")),
            (launch, ("sparse24", [1, 8, 1, 8], "::1", 80..=80, "")),
            (
                &format!("{srun} {torchrun}"),
                ("torchrun", [3, 4, 1, 2], "head", 29401..=29416, "none.2"),
            ),
        ] {
            let (launcher, [rank, world, local_rank, local_world], host, ports, run) = expected;
            let source = match launcher {
                "sparse24" => RENDEZVOUS,
                "srun" => "SLURM_STEP_NODELIST",
                _ => "MASTER_ADDR",
            };
            let (host, run) = (host.to_owned(), run.to_owned());
            let expected = Placement {
                launcher,
                rank,
                world,
                local_rank,
                local_world,
                host,
                source,
                ports,
                run,
            };
            assert_eq!(of(environment).unwrap(), Some(expected), "{environment}");
        }
    }

    #[test]
    fn an_address_is_written_as_it_is_given() {
        for (host, last, expected) in
            [("a", 80, "a:80"), ("::1", 80, "[::1]:80"), ("::1", 95, "::1, ports 80 to 95")]
        {
            let ranks = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a";
            let placement = of(ranks).unwrap().unwrap();
            let placement = Placement { host: host.to_owned(), ports: 80..=last, ..placement };
            assert_eq!(placement.address(), expected);
        }
    }

    #[test]
    fn one_rank_alone_needs_no_group() {
        for environment in [
            "HOME=/",
            "WORLD_SIZE=2",
            "RANK=0 WORLD_SIZE=1",
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0",
            // A batch script of Slurm (recorded), and a pod of an Indexed Job (as Kubernetes
            // documents it), are one process.
            "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=2 \
             SLURM_TASKS_PER_NODE=2(x2) SLURM_NODELIST=n[07-08]",
            "JOB_COMPLETION_INDEX=1",
        ] {
            assert_eq!(of(environment).unwrap(), None, "{environment}");
            assert_eq!(several(&variables(environment)), None, "{environment}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let four = "WORLD_SIZE=4 LOCAL_RANK=0";
        for (environment, expected) in [
            ("RANK=1 WORLD_SIZE=4", "LOCAL_RANK: is not set"),
            (&format!("{four} RANK=x"), "RANK: expected a number, found \"x\""),
            (&format!("{four} RANK=4"), "RANK: expected a number below 4, found 4"),
            (&format!("{four} RANK=1"), "MASTER_ADDR: is not set"),
            (&format!("{four} RANK=1 MASTER_ADDR=a MASTER_PORT=65530"), "MASTER_PORT: expected"),
            (&format!("{four} RANK=1 MASTER_ADDR=a MASTER_PORT=0"), "MASTER_PORT: expected"),
            ("RANK=0 WORLD_SIZE=0 LOCAL_RANK=0", "WORLD_SIZE: expected a number from 1 to 65536"),
            ("RANK=0 WORLD_SIZE=99999 LOCAL_RANK=0", "WORLD_SIZE: expected a number from 1 to"),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=0",
                "LOCAL_WORLD_SIZE: expected a number from 1 to 65536, found 0",
            ),
            (
                "SPARSE24_RANK=0 SPARSE24_WORLD=2 SPARSE24_LOCAL_RANK=0 SPARSE24_RENDEZVOUS=a:0",
                "SPARSE24_RENDEZVOUS: expected HOST",
            ),
            (
                "SPARSE24_RANK=0 SPARSE24_WORLD=2 SPARSE24_LOCAL_RANK=0",
                "SPARSE24_RENDEZVOUS: expected HOST",
            ),
        ] {
            let error = of(environment).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{environment}: {error}");
        }
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (nodes, expected) in
            [("a", "a"), ("a-1,b", "a-1"), ("n[001-015],b", "n001"), ("r[1-2]n[7,9]-ib", "r1n7-ib")]
        {
            assert_eq!(first_host(nodes), expected);
        }
    }
}
