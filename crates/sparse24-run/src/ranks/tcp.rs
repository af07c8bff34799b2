//! Ranks that are connected by TCP, each to each.
//!
//! Rank 0 listens; the others connect to it, prove that they know the secret, and learn each
//! other's addresses. One thread per connection writes frames, another reads them. A rank that
//! closes its connection without a goodbye, or sends nothing for the peer timeout, is gone, and so
//! is the run.

use std::{
    collections::{BTreeMap, VecDeque},
    io, mem,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

use sparse24_train::{Error as TrainError, group::Group};

use super::{
    Placement, Secret,
    farewell::{Farewell, Links, Lost, locked},
    frames::{HEARTBEAT, Outgoing, read, write},
    handshake::{self, Answer, Hello},
};
use crate::{Error, Result, ranks::ranks_of};

/// How a rank joins the others.
#[derive(Clone)]
pub struct Joining {
    /// The secret that all ranks know.
    pub secret: Secret,
    /// The longest silence of a rank before it counts as gone.
    pub peer_timeout: Duration,
    /// The longest time that another rank may keep this one waiting; rank 0, which alone prepares
    /// the run and saves, may take longer.
    pub stall_timeout: Duration,
    /// How long to wait for ranks that have not come.
    pub wait: Duration,
    /// Called with messages for the user.
    pub note: Arc<dyn Fn(&str) + Send + Sync>,
    /// Called once, with the reason and [`Farewell::code`], if a rank is gone and this process is
    /// still running [`super::GRACE`] later; it must end the process.
    pub lost: Arc<Lost>,
}

/// The time between lists of missing ranks.
const REMINDER: Duration = Duration::from_secs(30);

/// How often a rank that waits looks again.
const POLL: Duration = Duration::from_millis(20);

/// Handshakes at a time.
const HANDSHAKES: usize = 256;

enum Event {
    Message(Vec<u8>),
    Left,
    Gone(String),
}

/// A rank that is connected with all others.
pub struct Tcp {
    rank: usize,
    world: usize,
    local_world: usize,
    joining: Joining,
    links: Arc<Links>,
    /// Number and host of each connected rank.
    names: BTreeMap<usize, String>,
    inbox: Receiver<(usize, Event)>,
    post: Sender<(usize, Event)>,
    /// Messages that arrived before they were asked for.
    early: Vec<VecDeque<Vec<u8>>>,
    /// Why there will be no more from a rank.
    ended: Vec<Option<String>>,
}

fn gone(text: impl Into<String>) -> TrainError {
    TrainError::Peer(text.into())
}

fn network(text: &str, source: io::Error) -> TrainError {
    gone(format!("{text}: {source}"))
}

impl Tcp {
    /// Joins the other ranks of a placement and waits for all of them.
    ///
    /// # Errors
    /// [`Error::Setting`] if rank 0 refuses this rank, or its host has no address or one of another
    /// machine; [`Error::Io`] if this rank cannot listen or start threads; an error of the kind
    /// [`Peer`](crate::ErrorKind::Peer) if a rank does not come or is gone.
    pub fn join(placement: &Placement, joining: Joining) -> Result<Self> {
        let Placement { rank, world, local_world, .. } = *placement;
        let (post, inbox) = channel();
        let mut tcp = Self {
            rank,
            world,
            local_world,
            joining,
            links: Arc::default(),
            names: BTreeMap::new(),
            inbox,
            post,
            early: vec![VecDeque::new(); world],
            ended: vec![None; world],
        };
        match tcp.meet(placement) {
            Ok(()) => Ok(tcp),
            Err(error) => {
                tcp.farewell().say(Some((&error.to_string(), 0)));
                Err(error)
            }
        }
    }

    /// Connects this rank with all others.
    fn meet(&mut self, placement: &Placement) -> Result {
        let Placement { rank, world, .. } = *placement;
        let until = Instant::now() + self.joining.wait;
        let mut hello = Hello { rank, world, run: placement.run.clone(), host: host(), port: 0 };
        let addresses = self.resolve(placement, until)?;
        if rank == 0 {
            let listener = listen(placement, &addresses)?;
            let mut table: Vec<Option<SocketAddr>> = vec![None; world];
            self.accept(listener, hello, until, |rank, address| table[rank] = Some(address))?;
            let table = serde_json::to_vec(&table).expect("plain values");
            (1..world).for_each(|rank| self.send(rank, &table));
            return Ok(());
        }
        let (stream, listener) = self.connect_to_first(placement, &addresses, &mut hello, until)?;
        let acceptor = Acceptor::start(listener, self.joining.clone(), hello.clone())?;
        self.add(0, &placement.host, stream)?;
        let table: Vec<Option<SocketAddr>> = serde_json::from_slice(&self.receive(0)?)
            .map_err(|error| gone(format!("rank 0 sent a bad table of addresses: {error}")))?;
        for peer in 1..rank {
            let address = table.get(peer).copied().flatten();
            let address = address.ok_or_else(|| gone(format!("rank 0 knows no rank {peer}")))?;
            let (answer, stream) = loop {
                let met = TcpStream::connect_timeout(&address, self.joining.peer_timeout);
                let met = met.and_then(|stream| {
                    Ok((handshake::connect(&stream, &self.joining.secret, &hello)?, stream))
                });
                let error = match met {
                    Ok(met) => break met,
                    Err(error) => error,
                };
                self.check_ended()?;
                // Strangers may keep it busy.
                if Instant::now() >= until {
                    let text = format!("cannot connect to rank {peer} ({address})");
                    return Err(network(&text, error).into());
                }
            };
            self.add(peer, &answer.host, stream)?;
        }
        self.gather(&acceptor, until, |_, _| {})
    }

    /// The error that another rank reports now: one that cannot be reached may have ended with it.
    fn check_ended(&mut self) -> Result<(), TrainError> {
        while let Ok((rank, event)) = self.inbox.recv_timeout(HEARTBEAT) {
            self.take(rank, event);
            if let Some(text) = self.ended.iter().flatten().next() {
                return Err(gone(text));
            }
        }
        Ok(())
    }

    /// A handle that says goodbye.
    #[must_use]
    pub fn farewell(&self) -> Farewell {
        Farewell(Arc::clone(&self.links))
    }

    /// The addresses of rank 0, whose name may become known only when it starts.
    fn resolve(&self, placement: &Placement, until: Instant) -> Result<Vec<IpAddr>> {
        let Placement { host, source, .. } = placement;
        let mut reminded: Option<Instant> = None;
        loop {
            let error = match (&**host, 0).to_socket_addrs() {
                Ok(found) => return Ok(found.map(|address| address.ip()).collect()),
                Err(error) => error,
            };
            let problem = format!("rank 0's host {host:?} cannot be resolved: {error}");
            if Instant::now() >= until {
                return Err(Error::setting(*source, problem));
            }
            if reminded.is_none_or(|reminded| reminded.elapsed() >= REMINDER) {
                (self.joining.note)(&format!("waiting: {problem}"));
                reminded = Some(Instant::now());
            }
            thread::sleep(HEARTBEAT);
        }
    }

    /// Connects to rank 0 once it listens; returns the connection and where this rank listens.
    fn connect_to_first(
        &self,
        placement: &Placement,
        addresses: &[IpAddr],
        hello: &mut Hello,
        until: Instant,
    ) -> Result<(TcpStream, TcpListener)> {
        let mut reminded = Instant::now();
        let (began, mut last) = (Instant::now(), "nothing listens there".to_owned());
        loop {
            for (port, &address) in placement
                .ports
                .clone()
                .flat_map(|port| addresses.iter().map(move |address| (port, address)))
            {
                let address = SocketAddr::new(address, port);
                let stream = match TcpStream::connect_timeout(&address, HEARTBEAT) {
                    Ok(stream) => stream,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                    Err(error) => {
                        last = format!("port {port}: {error}");
                        continue;
                    }
                };
                let here = stream.local_addr().map_err(|_| gone("rank 0 is gone"))?.ip();
                let listener = TcpListener::bind((here, 0)).and_then(|listener| {
                    hello.port = listener.local_addr()?.port();
                    Ok(listener)
                });
                let listener = listener.map_err(|e| Error::io("listen at", here.to_string(), e))?;
                match handshake::connect(&stream, &self.joining.secret, hello) {
                    Ok(Answer { refused: None, .. }) => return Ok((stream, listener)),
                    Ok(Answer { refused: Some(problem), .. }) => {
                        return Err(Error::setting(format!("rank {}", self.rank), problem));
                    }
                    Err(error) => last = format!("port {port}: {error}"),
                }
            }
            let missing = format!("for rank 0 at {}: {last}", placement.address());
            if Instant::now() >= until {
                let waited = began.elapsed().as_secs();
                return Err(gone(format!("waited {waited} s {missing}")).into());
            }
            if reminded.elapsed() >= REMINDER {
                (self.joining.note)(&format!("waiting {missing}"));
                reminded = Instant::now();
            }
            thread::sleep(10 * POLL);
        }
    }

    fn accept(
        &mut self,
        listener: TcpListener,
        hello: Hello,
        until: Instant,
        each: impl FnMut(usize, SocketAddr),
    ) -> Result {
        let acceptor = Acceptor::start(listener, self.joining.clone(), hello)?;
        self.gather(&acceptor, until, each)
    }

    /// Waits for all ranks after this one.
    fn gather(
        &mut self,
        acceptor: &Acceptor,
        until: Instant,
        mut each: impl FnMut(usize, SocketAddr),
    ) -> Result {
        let (began, mut reminded) = (Instant::now(), Instant::now());
        loop {
            let missing: Vec<_> = {
                let peers = locked(&self.links.peers);
                (self.rank + 1..self.world).filter(|rank| !peers.contains_key(rank)).collect()
            };
            if missing.is_empty() {
                return Ok(());
            }
            while let Ok((rank, event)) = self.inbox.try_recv() {
                self.take(rank, event);
            }
            if let Some(text) = self.ended.iter().flatten().next() {
                return Err(gone(text).into());
            }
            let came = acceptor.arrived.recv_timeout(POLL);
            if let Ok((hello, address, stream)) = came {
                each(hello.rank, SocketAddr::new(address.ip(), hello.port));
                self.add(hello.rank, &hello.host, stream)?;
                continue;
            }
            let missing = format!("for {} of {}", ranks_of(missing.into_iter()), self.world);
            if Instant::now() >= until {
                let waited = began.elapsed().as_secs();
                return Err(gone(format!("waited {waited} s {missing}")).into());
            }
            if reminded.elapsed() >= REMINDER {
                (self.joining.note)(&format!("waiting {missing}"));
                reminded = Instant::now();
            }
        }
    }

    /// Starts the threads of a connection.
    fn add(&mut self, rank: usize, host: &str, stream: TcpStream) -> Result {
        let name = format!("rank {rank} ({host})");
        self.names.insert(rank, name.clone());
        let silence = self.joining.peer_timeout;
        let set = || {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(silence))?;
            stream.set_write_timeout(Some(silence))?;
            stream.try_clone()
        };
        let reading = set().map_err(|error| network(&name, error))?;
        let (to, outgoing) = channel();
        let writer = start(move || write(stream, &outgoing))?;
        locked(&self.links.peers).insert(rank, (to, writer));
        let (post, ending) = (self.post.clone(), Arc::clone(&self.links.ending));
        let joining = self.joining.clone();
        start(move || {
            let text = match read(reading, |message| {
                drop(post.send((rank, Event::Message(message))));
            }) {
                Ok(None) => return drop(post.send((rank, Event::Left))),
                Ok(Some((failure, code))) => {
                    let _ = ending.code.set(code);
                    failure
                }
                Err(error) if is_silence(&error) => {
                    format!("{name} has sent nothing for {} s", silence.as_secs())
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    format!("{name} violates the protocol: {error}")
                }
                Err(_) => format!("{name} is gone"),
            };
            if ending.closed.load(Ordering::SeqCst) {
                return;
            }
            drop(post.send((rank, Event::Gone(text.clone()))));
            ending.force(&*joining.lost, &text);
        })
        .map(drop)
    }

    fn send(&self, rank: usize, message: &[u8]) {
        if let Some((to, _)) = locked(&self.links.peers).get(&rank) {
            // Without its thread, the rank is gone, as the reader says.
            let _ = to.send(Outgoing::Message(message.to_vec()));
        }
    }

    fn take(&mut self, rank: usize, event: Event) {
        match event {
            Event::Message(message) => self.early[rank].push_back(message),
            Event::Left => {
                self.ended[rank] = Some(format!("rank {rank} has ended before the others"));
            }
            Event::Gone(text) => self.ended[rank] = Some(text),
        }
    }

    /// The next message of a rank.
    fn receive(&mut self, rank: usize) -> Result<Vec<u8>, TrainError> {
        let (began, stall) = (Instant::now(), self.joining.stall_timeout);
        loop {
            if let Some(message) = self.early[rank].pop_front() {
                return Ok(message);
            }
            if let Some(text) = &self.ended[rank] {
                return Err(gone(text));
            }
            let left = match rank {
                0 => Duration::MAX,
                _ => stall.saturating_sub(began.elapsed()),
            };
            let Ok((from, event)) = self.inbox.recv_timeout(left) else {
                let (name, seconds) = (&self.names[&rank], stall.as_secs());
                let text = format!(
                    "{name} sends heartbeats, but has made no progress for {seconds} s \
                     (--stall-timeout)"
                );
                let (ending, joining) = (Arc::clone(&self.links.ending), self.joining.clone());
                let why = text.clone();
                thread::spawn(move || ending.force(&*joining.lost, &why));
                return Err(gone(text));
            };
            let text = if let Event::Gone(text) = &event { Some(text.clone()) } else { None };
            self.take(from, event);
            if let Some(text) = text {
                return Err(gone(text));
            }
        }
    }
}

impl Group for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn on_this_machine(&self) -> usize {
        self.local_world
    }

    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>, TrainError> {
        assert_eq!(parts.len(), self.world, "one part per rank");
        for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            self.send(rank, part);
        }
        let own = self.rank;
        let receive =
            |rank: usize| if rank == own { Ok(parts[rank].to_vec()) } else { self.receive(rank) };
        (0..parts.len()).map(receive).collect()
    }

    fn close(&mut self) {
        self.farewell().say(None);
    }
}

/// Accepts ranks until it is dropped. Each handshake has its own thread, so that none can hold up
/// another.
struct Acceptor {
    arrived: Receiver<(Hello, SocketAddr, TcpStream)>,
    stop: Arc<AtomicBool>,
}

impl Acceptor {
    /// For the ranks after that of `own`.
    fn start(listener: TcpListener, joining: Joining, own: Hello) -> Result<Self> {
        let (sender, arrived) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        start(move || {
            let (busy, refusals) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let seen = Arc::new(Mutex::new(vec![false; own.world]));
            // Only a listener that does not wait can be stopped.
            let _ = listener.set_nonblocking(true);
            while !stopped.load(Ordering::SeqCst) {
                let Ok((stream, address)) = listener.accept() else {
                    thread::sleep(POLL);
                    continue;
                };
                if busy.fetch_add(1, Ordering::SeqCst) >= HANDSHAKES
                    || stream.set_nonblocking(false).is_err()
                {
                    busy.fetch_sub(1, Ordering::SeqCst);
                    continue;
                }
                let (done, refusals, seen) = (busy.clone(), refusals.clone(), seen.clone());
                let (joining, own, sender) = (joining.clone(), own.clone(), sender.clone());
                let greeting = start(move || {
                    let greeted = handshake::accept(&stream, &joining.secret, |hello| {
                        judge(hello, &own, &mut locked(&seen))
                    });
                    done.fetch_sub(1, Ordering::SeqCst);
                    match greeted {
                        Ok((hello, Answer { refused: None, .. })) => {
                            drop(sender.send((hello, address, stream)));
                        }
                        Ok((hello, Answer { refused: Some(problem), .. })) => {
                            let Hello { rank, host, .. } = hello;
                            (joining.note)(&format!("rank {rank} ({host}) is refused: {problem}"));
                        }
                        // One line, however often somebody tries.
                        Err(error) if refusals.fetch_add(1, Ordering::SeqCst) == 0 => {
                            (joining.note)(&format!("{} is refused: {error}", address.ip()));
                        }
                        Err(_) => {}
                    }
                });
                // Without a thread, the other rank sees that the connection is closed.
                if greeting.is_err() {
                    busy.fetch_sub(1, Ordering::SeqCst);
                }
            }
        })?;
        Ok(Self { arrived, stop })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// Whether a rank that knows the secret belongs here.
fn judge(hello: &Hello, own: &Hello, seen: &mut [bool]) -> Answer {
    let refused = if hello.run != own.run {
        Some(format!("it belongs to another start of the run: {:?}, not {:?}", hello.run, own.run))
    } else if hello.world != own.world {
        Some(format!(
            "expected {} ranks as rank {} does, found {}",
            own.world, own.rank, hello.world
        ))
    } else if hello.rank <= own.rank || hello.rank >= own.world {
        Some(format!("expected a rank of {} to {}", own.rank + 1, own.world - 1))
    } else if mem::replace(&mut seen[hello.rank], true) {
        Some(format!("another process is rank {} already", hello.rank))
    } else {
        None
    };
    Answer { host: own.host.clone(), refused }
}

/// The first of the ports that is free.
fn listen(placement: &Placement, addresses: &[IpAddr]) -> Result<TcpListener> {
    let bind = |port| {
        let all: Vec<_> = addresses.iter().map(|&address| SocketAddr::new(address, port)).collect();
        TcpListener::bind(&all[..])
    };
    let (first, mut others) = (*placement.ports.start(), placement.ports.clone().skip(1));
    let found = bind(first).or_else(|error| others.find_map(|port| bind(port).ok()).ok_or(error));
    found.map_err(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            let problem =
                format!("expected an address of rank 0's machine, found {:?}", placement.host);
            Error::setting(placement.source, problem)
        }
        _ => Error::io("listen at", placement.address(), error),
    })
}

/// Starts a thread.
fn start<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    Builder::new().spawn(work).map_err(|error| Error::io("start", "a thread for ranks", error))
}

fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The name of this machine, for messages.
fn host() -> String {
    #[cfg(unix)]
    return rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this machine".to_owned())
}
