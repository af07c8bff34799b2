//! `sparse24 launch`: starts the ranks of this machine.

use std::{
    env,
    fmt::Display,
    io,
    process::{self, Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[cfg(unix)]
use rustix::process::Signal;
use sparse24_run::ranks::free_port;

use crate::{
    failure::{Exit, Failure, Result},
    output::note,
    ranks::{LAUNCHER, SECRET},
    signals::{self, listen, stopping},
    watch::random,
};

/// Start several processes that train one model, on this machine or on each of several
///
/// On one machine: `sparse24 launch -n 4 -- train --preset gpt2-124m ...`. On several, run the same
/// command on each, with its number, the address of the first, and the same secret in the
/// environment variable SPARSE24_SECRET.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Processes on this machine: one for each GPU
    #[arg(short, value_name = "RANKS")]
    n: u16,
    /// Number of machines, each with -n processes
    #[arg(long, default_value_t = 1)]
    nodes: u16,
    /// Index of this machine, from 0 [default: the index in a Kubernetes Indexed Job]
    #[arg(long)]
    node: Option<u16>,
    /// Where rank 0, on machine 0, listens for the others [default: a free port of this machine]
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// train or resume with its arguments
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The time that the other ranks have to end after one has failed.
const PATIENCE: Duration = Duration::from_secs(10);

const POLL: Duration = Duration::from_millis(50);

pub(crate) fn run(args: &Args) -> Result {
    let refuse = |problem: &str| Err(Failure::new(Exit::Usage, problem));
    let Args { n, nodes, .. } = *args;
    if n == 0 || nodes == 0 {
        return refuse("-n, --nodes: expected at least 1");
    }
    if !matches!(args.command.first().map(String::as_str), Some("train" | "resume")) {
        return refuse(
            "launch: expected `train` or `resume` with its arguments, as in `launch -n 2 -- train`",
        );
    }
    let index = || env::var("JOB_COMPLETION_INDEX").ok()?.parse().ok();
    let Some(node) = args.node.or_else(index).or((nodes == 1).then_some(0)) else {
        return refuse("--node: required with --nodes: the index of this machine, from 0");
    };
    if node >= nodes {
        return refuse("--node: expected a number below --nodes");
    }
    let has_secret = SECRET.iter().any(|name| env::var_os(name).is_some());
    let rendezvous = match &args.rendezvous {
        Some(_) if nodes > 1 && !has_secret => {
            return refuse("SPARSE24_SECRET: set it to the same random text on all machines");
        }
        Some(address) => address.clone(),
        None if nodes > 1 => return refuse("--rendezvous: required with --nodes"),
        None => {
            let port = free_port().map_err(|error| failed("find a free port", &error))?;
            format!("127.0.0.1:{port}")
        }
    };
    let secret = random().map_err(|error| failed("draw a secret", &error))?;
    // Before the first child, so that no signal is lost.
    let asked = Requests::listen().map_err(signals::failure)?;
    let program = env::current_exe().map_err(|error| failed("find this program", &error))?;
    let mut ranks = Ranks(Vec::new());
    for local in 0..n {
        let mut command = Command::new(&program);
        command.args(&args.command).stdin(Stdio::null());
        command.env("SPARSE24_RENDEZVOUS", &rendezvous);
        command.env(LAUNCHER, process::id().to_string());
        let (rank, world) = (u32::from(node) * u32::from(n), u32::from(nodes) * u32::from(n));
        for (name, value) in [
            ("RANK", rank + u32::from(local)),
            ("WORLD", world),
            ("LOCAL_RANK", local.into()),
            ("LOCAL_WORLD", n.into()),
        ] {
            command.env(format!("SPARSE24_{name}"), value.to_string());
        }
        if !has_secret {
            command.env(SECRET[0], &secret);
        }
        let child = command.spawn().map_err(|error| failed("start a rank", &error))?;
        ranks.0.push((rank + u32::from(local), child, None));
    }
    let code = ranks.wait(&asked)?;
    if code != 0 {
        process::exit(code);
    }
    Ok(())
}

fn failed(what: &str, error: &dyn Display) -> Failure {
    Failure::new(Exit::Io, format!("cannot {what}: {error}"))
}

/// Flags that the signals to this process set.
struct Requests {
    stops: Vec<(Exit, Arc<AtomicBool>)>,
    #[cfg(unix)]
    save: Arc<AtomicBool>,
}

impl Requests {
    fn listen() -> io::Result<Self> {
        let flag = |signal| {
            let flag = Arc::default();
            listen(signal, [&flag]).map(|()| flag)
        };
        Ok(Self {
            stops: stopping()
                .map(|(signal, exit)| Ok((exit, flag(signal)?)))
                .collect::<io::Result<_>>()?,
            #[cfg(unix)]
            save: flag(signal_hook::consts::SIGUSR1)?,
        })
    }

    /// A request to stop, if there is a new one.
    fn stop(&self) -> Option<Exit> {
        let mut stops = self.stops.iter();
        stops.find(|(_, asked)| asked.swap(false, Ordering::SeqCst)).map(|&(exit, _)| exit)
    }
}

/// The processes, each with its rank and exit status. Dropping this kills running ones.
struct Ranks(Vec<(u32, Child, Option<ExitStatus>)>);

impl Ranks {
    /// Waits for all ranks and passes on requests. Returns the exit code of the rank that failed,
    /// not of its peers, or of the signal that stopped the run.
    fn wait(&mut self, asked: &Requests) -> Result<i32> {
        let (mut code, mut failed_at, mut stopped, mut killed) = (0, None, None, false);
        while self.0.iter().any(|(_, _, ended)| ended.is_none()) {
            if let Some(exit) = asked.stop() {
                stopped.get_or_insert(exit);
                self.running().for_each(terminate);
            }
            #[cfg(unix)]
            if asked.save.swap(false, Ordering::SeqCst) {
                self.running().for_each(|child| send(child, Signal::USR1));
            }
            for (rank, child, ended) in &mut self.0 {
                if ended.is_some() {
                    continue;
                }
                *ended = child.try_wait().map_err(|error| failed("wait for a rank", &error))?;
                let Some(status) = ended.filter(|status| !status.success()) else { continue };
                failed_at.get_or_insert_with(Instant::now);
                if status.code().is_none() {
                    note(format_args!("rank {rank}: {status}"));
                }
                if !killed && (code == 0 || code == Exit::Peer as i32) {
                    code = exit_code(status);
                }
            }
            if !killed && failed_at.is_some_and(|at: Instant| at.elapsed() > PATIENCE) {
                note("killing the ranks that did not end after another failed");
                self.kill();
                killed = true;
            }
            thread::sleep(POLL);
        }
        let is_stop = |code| stopping().any(|(_, exit)| exit as i32 == code);
        Ok(stopped.filter(|_| is_stop(code)).map_or(code, |exit| exit as i32))
    }

    fn running(&mut self) -> impl Iterator<Item = &mut Child> {
        self.0.iter_mut().filter(|(_, _, ended)| ended.is_none()).map(|(_, child, _)| child)
    }

    fn kill(&mut self) {
        for child in self.running() {
            let _ = child.kill();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The exit code of a process, or 128 + the number of the signal that killed it, as in a shell.
fn exit_code(status: ExitStatus) -> i32 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return 128 + signal;
    }
    status.code().unwrap_or(Exit::Peer as i32)
}

#[cfg(unix)]
fn send(child: &Child, signal: Signal) {
    if let Some(id) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(id, signal);
    }
}

#[cfg(unix)]
fn terminate(child: &mut Child) {
    send(child, Signal::TERM);
}

/// Other systems have no SIGTERM; Ctrl-C in a terminal reaches the ranks itself.
#[cfg(not(unix))]
fn terminate(_: &mut Child) {}
