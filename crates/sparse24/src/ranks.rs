//! Joins this process with the other ranks of a run, where a launcher or the flags make it one of
//! several.

use std::{env, fs, sync::Arc, time::Duration};

use signal_hook::low_level::exit;
use sparse24_run::{
    Error, ErrorKind,
    ranks::{Environment, Facts, Joining, Placement, Secret, Tcp, agree, placement, several},
    run::{Asked, Followed, Follower, Observer},
};
use sparse24_train::group::{Group, Solo};

use crate::{
    failure::{Exit, Failure, Result},
    output::note,
    signals::Signals,
    threads::on_threads,
};

/// The place of this process among several; usually a launcher gives it: torchrun, srun, mpirun or
/// `sparse24 launch`.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Ranks {
    /// Number of this rank, from 0, if no launcher sets it
    #[arg(long, value_name = "NUMBER", requires = "world")]
    rank: Option<String>,
    /// Number of ranks
    #[arg(long, value_name = "NUMBER", requires = "rendezvous")]
    world: Option<String>,
    /// Address at which rank 0 listens for the others
    #[arg(long, value_name = "HOST:PORT", requires = "rank")]
    rendezvous: Option<String>,
    /// Seconds without a heartbeat after which a rank counts as gone
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    peer_timeout: u16,
    /// Seconds that the others wait for a rank that sends heartbeats but makes no progress
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    stall_timeout: u16,
}

/// The variables that hold the secret of a run, or name its file.
pub(crate) const SECRET: [&str; 2] = ["SPARSE24_SECRET", "SPARSE24_SECRET_FILE"];

/// The variable that holds the process of `sparse24 launch` for the ranks that it starts.
pub(crate) const LAUNCHER: &str = "SPARSE24_LAUNCHER";

/// How long ranks wait for each other at the start.
const WAIT: Duration = Duration::from_secs(600);

/// This process among the ranks of a run.
pub(crate) struct Member {
    pub(crate) group: Box<dyn Group>,
    placement: Option<Placement>,
}

impl Ranks {
    /// Does `work` as one of the ranks, which must have the same `facts`.
    pub(crate) fn join(&self, facts: &Facts, work: impl FnOnce(Member) -> Result) -> Result {
        let mut environment = environment();
        let launcher = environment.get(LAUNCHER).cloned();
        if let Some(launcher) = &launcher {
            end_with(launcher)?;
        }
        let given = [
            ("SPARSE24_RANK", "--rank", &self.rank),
            ("SPARSE24_WORLD", "--world", &self.world),
            ("SPARSE24_RENDEZVOUS", "--rendezvous", &self.rendezvous),
        ];
        // A message names what the user has set.
        let named = |error| match error {
            Error::Setting { key, problem } => {
                let flag = given.iter().find(|(name, flag, value)| {
                    // `launch` has the flag of this one.
                    let is_passed_on = launcher.is_some() && *flag == "--rendezvous";
                    *name == key && (value.is_some() || is_passed_on)
                });
                Error::setting(flag.map_or(&*key, |(_, flag, _)| flag), problem)
            }
            other => other,
        };
        for (name, _, value) in given {
            if let Some(value) = value {
                environment.insert(name.to_owned(), value.clone());
                environment.entry("SPARSE24_LOCAL_RANK".to_owned()).or_insert("0".to_owned());
            }
        }
        let Some(placement) = placement(&environment).map_err(named)? else {
            return work(Member { group: Box::new(Solo), placement: None });
        };
        let secret = secret(&environment)?;
        let Placement { launcher, rank, world, .. } = placement;
        if rank == 0 {
            note(format_args!("rank 0 of {world} ({launcher}), at {}", placement.address()));
        }
        let joining = Joining {
            secret,
            peer_timeout: Duration::from_secs(self.peer_timeout.max(2).into()),
            stall_timeout: Duration::from_secs(self.stall_timeout.max(2).into()),
            wait: WAIT,
            note: Arc::new(|line| note(line)),
            lost: Arc::new(|line, code| {
                let failure = Failure::new(Exit::Peer, line).with_code(code.unwrap_or_default());
                note(format_args!("error: {line}"));
                // Without exit handlers, of which CUDA's may wait for the lost rank.
                exit(failure.exit() as i32)
            }),
        };
        let mut group = Tcp::join(&placement, joining).map_err(named)?;
        let farewell = group.farewell();
        let done = agree(&mut group, facts)
            .map_err(Failure::from)
            .and_then(|()| work(Member { group: Box::new(group), placement: Some(placement) }));
        let sentence = done.as_ref().err().map(|failure| failure.for_others(rank));
        let done = done.map_err(|failure| match (failure.exit(), farewell.code()) {
            (Exit::Peer, Some(code)) => failure.with_code(code),
            _ => failure,
        });
        let code = done.as_ref().err().map(|failure| failure.exit() as u8);
        farewell.say(sentence.as_deref().zip(code));
        done
    }
}

fn environment() -> Environment {
    env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Refuses to be one of several ranks: all would do the same in the same folder.
pub(crate) fn check_alone(command: &str) -> Result {
    several(&environment()).map_or(Ok(()), |(name, value)| {
        let problem = format!(
            "{name}: expected 1 or none, found {value}, as for ranks of a launcher, which only \
             `train` and `resume` join; start `{command}` once, without it"
        );
        Err(Failure::new(Exit::Usage, problem))
    })
}

/// Lets this process receive SIGTERM when its launcher dies; it is refused if that has happened.
#[cfg(target_os = "linux")]
fn end_with(launcher: &str) -> Result {
    let signal = Some(rustix::process::Signal::TERM);
    rustix::process::set_parent_process_death_signal(signal)
        .map_err(|error| Failure::new(Exit::Io, format!("cannot follow `launch`: {error}")))?;
    if std::os::unix::process::parent_id().to_string() == launcher {
        return Ok(());
    }
    Err(Failure::new(Exit::Peer, "`sparse24 launch`, which started this rank, is gone"))
}

/// Other systems have no such signal.
#[cfg(not(target_os = "linux"))]
fn end_with(_: &str) -> Result {
    Ok(())
}

impl Member {
    /// The number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.group.world()
    }

    /// Whether this rank has the run.
    pub(crate) fn leads(&self) -> bool {
        self.group.rank() == 0
    }

    /// The threads for a rank: a configured number, or its part of the cores.
    pub(crate) fn threads(&self, configured: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match &self.placement {
            Some(placement) if configured == 0 => (cores / placement.local_world).max(1),
            _ => configured,
        }
    }

    /// Follows rank 0 to the end of the run, on so many threads.
    pub(crate) fn follow(self, threads: usize) -> Result {
        let signals = Signals::take()?;
        let placement = self.placement.clone();
        let gpu = |backend: &str| placement.as_ref().and_then(|placement| gpu(placement, backend));
        on_threads(self.threads(threads), || {
            let mut asking = Asking(signals);
            let shares = placement.as_ref().is_some_and(|placement| placement.local_world > 1);
            let joined = Follower::join(self.group, gpu).map_err(|error| match error.kind() {
                ErrorKind::Device if shares => {
                    let advice = "each rank of a machine needs a GPU of its own; start fewer ranks";
                    Failure::new(Exit::Device, format!("{error}; {advice}"))
                }
                _ => error.into(),
            });
            match joined?.follow(&mut asking)? {
                Followed::Finished => Ok(()),
                Followed::Stopped(step) => {
                    // Another rank was asked to stop.
                    let exit = asking.0.received().unwrap_or(Exit::Terminated);
                    Err(Failure::new(exit, format!("interrupted after step {step}")))
                }
            }
        })
    }
}

/// Only asks to stop.
struct Asking(Signals);

impl Observer for Asking {
    fn asked(&mut self) -> Asked {
        self.0.asked()
    }
}

/// The GPU of a rank on a backend: that of its number on this machine, unless CUDA shows it one.
fn gpu(placement: &Placement, backend: &str) -> Option<usize> {
    let sees_one =
        backend == "cuda" && env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|list| !list.contains(','));
    (placement.local_world > 1).then_some(if sees_one { 0 } else { placement.local_rank })
}

/// The secret of the run.
fn secret(environment: &Environment) -> Result<Secret, Error> {
    let [secret, file] = SECRET;
    if let Some(secret) = environment.get(secret).filter(|secret| !secret.is_empty()) {
        return Ok(Secret::new(secret));
    }
    let Some(path) = environment.get(file) else {
        let problem = format!(
            "is not set, and ranks accept only those that know the secret of the run; give all \
             ranks the same random text in it, or the name of a file that holds it in {file}"
        );
        return Err(Error::setting(secret, problem));
    };
    let text = fs::read_to_string(path).map_err(|error| Error::io("read", path, error))?;
    match text.trim() {
        "" => Err(Error::file(path, "is empty, expected the secret of the run")),
        text => Ok(Secret::new(text)),
    }
}
