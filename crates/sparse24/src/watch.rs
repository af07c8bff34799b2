//! `sparse24 watch`: the report as a page of this machine that follows runs under way.
//!
//! Invariant: the socket is bound to 127.0.0.1. A request gets an answer with contents only if its
//! path has the token of this process, its Host is a name of this machine and its Origin, if any,
//! is that host, so other users, and pages of other sites, read nothing. Requests cause no reading
//! of files; their size, number and duration are limited.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use sparse24_lab::report::View;

use crate::{
    failure::{Exit, Failure, Result},
    output::{counted, note, say, word},
    signals::Signals,
};

/// Serve the report of one or several runs on 127.0.0.1, and update it while they train; Ctrl-C
/// ends it
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directories, which need not exist yet, or folders of lambda-search or study
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Port on 127.0.0.1, for a tunnel from another machine; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
}

/// Most bytes of a request up to its body, which none has.
const LONGEST_HEAD: usize = 8 << 10;
/// Longest time to send a request.
const TO_ASK: Duration = Duration::from_secs(5);
/// Longest time to take an answer, or an event.
const TO_TAKE: Duration = Duration::from_secs(30);
/// Most connections at a time; more are closed at once.
const CONNECTIONS: usize = 32;
/// The time between heartbeats on a stream of events, which find out that a browser is gone.
const SILENCE: Duration = Duration::from_secs(15);
/// Shortest time between two readings of the runs. They take at most a twentieth of a core.
const INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Args) -> Result {
    let signals = Signals::listen_for_stop()?;
    if let Some(file) = args.runs.iter().find(|path| path.is_file()) {
        let problem = format!("{}: is a file, expected a run directory", word(file));
        return Err(Failure::new(Exit::Input, problem));
    }
    let view = View::read(&args.runs)?;
    let failure = |error: &dyn std::fmt::Display| {
        let sentence = format!("cannot listen on 127.0.0.1:{}: {error}", args.port);
        Failure::new(Exit::Io, sentence + "; name another port with --port")
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).map_err(|e| failure(&e))?;
    let port = listener.local_addr().map_err(|e| failure(&e))?.port();
    let token = random().map_err(|e| failure(&e))?;
    let shown = Shown { number: 1, view: Arc::new(view) };
    let server =
        Server { token, shown: shown.into(), changed: Condvar::new(), readers: Arc::default() };
    let server = Arc::new(server);
    say!("http://127.0.0.1:{port}/{}/", server.token);
    note(format_args!(
        "watching {}; this address shows them, so keep it secret; Ctrl-C ends it",
        counted(args.runs.len(), "path")
    ));
    let listening = Arc::clone(&server);
    thread::spawn(move || listening.listen(&listener));
    let (mut next, mut said) = (Instant::now(), String::new());
    loop {
        if let Some(exit) = signals.received() {
            return Err(Failure::new(exit, "no longer watching; the runs are not affected"));
        }
        thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        // Nothing is read while nobody looks.
        if started < next || Arc::strong_count(&server.readers) == 1 {
            continue;
        }
        match View::read(&args.runs) {
            Ok(view) => server.show(view),
            Err(error) => {
                let problem = format!("the page is not updated: {error}");
                if problem != said {
                    note(&problem);
                    said = problem;
                }
            }
        }
        next = Instant::now() + INTERVAL.max(19 * started.elapsed());
    }
}

/// 128 bits that nobody can guess, as hexadecimal digits.
pub(crate) fn random() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Server {
    token: String,
    shown: Mutex<Shown>,
    changed: Condvar,
    /// Has a clone for each stream of events.
    readers: Arc<()>,
}

struct Shown {
    /// Grows with each change.
    number: u64,
    view: Arc<View>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Page,
    Events,
    Refused(&'static str),
}

impl Server {
    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, view: View) {
        let mut shown = self.shown();
        if *shown.view != view {
            *shown = Shown { number: shown.number + 1, view: Arc::new(view) };
            self.changed.notify_all();
        }
    }

    fn listen(self: Arc<Self>, listener: &TcpListener) {
        let connections = Arc::new(());
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Too many files are open, for example.
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            let held = Arc::clone(&connections);
            if Arc::strong_count(&held) <= CONNECTIONS + 1 {
                let server = Arc::clone(&self);
                // A client that is gone needs no message, and without a thread, none is served.
                let serve = move || drop((server.serve(&stream), held));
                let _ = thread::Builder::new().spawn(serve);
            }
        }
    }

    fn serve(&self, mut stream: &TcpStream) -> io::Result<()> {
        let deadline = Instant::now() + TO_ASK;
        let (mut head, mut piece) = (Vec::new(), [0; 1024]);
        let asked = loop {
            stream.set_read_timeout(Some(until(deadline)?))?;
            let length = stream.read(&mut piece)?;
            head.extend_from_slice(&piece[..length]);
            match asked(&head, &self.token) {
                Some(asked) => break asked,
                None if length == 0 => return Ok(()),
                None => {}
            }
        };
        match asked {
            Asked::Refused(status) => {
                send(stream, &format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n{HEADERS}\r\n"))
            }
            Asked::Page => {
                let nonce = random().map_err(io::Error::other)?;
                let view = Arc::clone(&self.shown().view);
                let page = view.page(&nonce);
                let length = page.len();
                send(
                    stream,
                    &format!(
                        "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\
                         Content-Length: {length}\r\nContent-Security-Policy: default-src 'none'; \
                         style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src \
                         'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
                         {HEADERS}\r\n{page}"
                    ),
                )
            }
            Asked::Events => self.send_events(stream),
        }
    }

    fn send_events(&self, stream: &TcpStream) -> io::Result<()> {
        let _reader = Arc::clone(&self.readers);
        send(
            stream,
            &format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{HEADERS}\r\n"),
        )?;
        let mut sent = 0;
        loop {
            let is_same = |shown: &mut Shown| shown.number == sent;
            let waited = self.changed.wait_timeout_while(self.shown(), SILENCE, is_same);
            let shown = waited.unwrap_or_else(PoisonError::into_inner).0;
            let (number, view) = (shown.number, Arc::clone(&shown.view));
            drop(shown);
            if number == sent {
                send(stream, ":\n\n")?;
            } else {
                let contents = serde_json::to_string(view.contents()).expect("a string");
                send(stream, &format!("data: {contents}\n\n"))?;
                sent = number;
            }
        }
    }
}

/// Headers of every answer. A connection serves one.
const HEADERS: &str = "Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: \
                       no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
                       Cross-Origin-Resource-Policy: same-origin\r\n";

/// Parses a request; `None` if there is more of it to come.
fn asked(head: &[u8], token: &str) -> Option<Asked> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Complete(length)) if length <= LONGEST_HEAD => {}
        Ok(httparse::Status::Partial) if head.len() < LONGEST_HEAD => return None,
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Some(Asked::Refused("431 Request Header Fields Too Large"));
        }
        Err(_) => return Some(Asked::Refused("400 Bad Request")),
    }
    let values = |name: &str| {
        let named = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| header.value).collect::<Vec<_>>()
    };
    // A page of another site may have a name that leads here (DNS rebinding), but it sends that.
    let hosts = values("host");
    let is_here = |host: &[u8]| {
        let (name, port) =
            host.split_at(host.iter().position(|&b| b == b':').unwrap_or(host.len()));
        [&b"127.0.0.1"[..], b"localhost"].contains(&name)
            && port.iter().skip(1).all(u8::is_ascii_digit)
    };
    let origin = |host: &[u8]| [b"http://", host].concat();
    let is_ours = matches!(hosts[..], [host] if is_here(host)
        && values("origin").iter().all(|found| *found == origin(host)));
    let path = request.path.unwrap_or_default().strip_prefix('/').unwrap_or_default();
    let (found, rest) = path.split_once('/').unwrap_or((path, "none"));
    // In a time that does not depend on where they differ.
    let differing = found.bytes().zip(token.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    Some(match (request.method, rest) {
        _ if !is_ours => Asked::Refused("403 Forbidden"),
        _ if found.len() != token.len() || differing != 0 => Asked::Refused("404 Not Found"),
        (Some("GET"), "") => Asked::Page,
        (Some("GET"), "events") => Asked::Events,
        (Some("GET"), _) => Asked::Refused("404 Not Found"),
        _ => Asked::Refused("405 Method Not Allowed"),
    })
}

/// The time that is left.
fn until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn send(mut stream: &TcpStream, text: &str) -> io::Result<()> {
    let (deadline, mut bytes) = (Instant::now() + TO_TAKE, text.as_bytes());
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(until(deadline)?))?;
        match stream.write(bytes)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_with_token_host_and_origin_get_contents() {
        let refused = Asked::Refused;
        let (bad, forbidden, absent) =
            (refused("400 Bad Request"), refused("403 Forbidden"), refused("404 Not Found"));
        let here = "Host: 127.0.0.1:8080\r\n";
        for (line, headers, expected) in [
            ("GET /t0ken/ HTTP/1.1", here, Asked::Page),
            ("GET /t0ken/ HTTP/1.1", "host: localhost\r\nAccept: */*\r\n", Asked::Page),
            (
                "GET /t0ken/events HTTP/1.1",
                "Host: localhost:1\r\nOrigin: http://localhost:1\r\n",
                Asked::Events,
            ),
            ("GET / HTTP/1.1", here, absent),
            ("GET /t0ken HTTP/1.1", here, absent),
            ("GET /t0keN/ HTTP/1.1", here, absent),
            ("GET /t0ken0/events HTTP/1.1", here, absent),
            ("GET //t0ken/ HTTP/1.1", here, absent),
            ("GET /t0ken/../etc/passwd HTTP/1.1", here, absent),
            ("GET /t0ken/events?x HTTP/1.1", here, absent),
            ("GET http://127.0.0.1/t0ken/ HTTP/1.1", here, absent),
            ("POST /t0ken/ HTTP/1.1", here, refused("405 Method Not Allowed")),
            ("GET /t0ken/ HTTP/1.1", "", forbidden),
            ("GET /t0ken/ HTTP/1.1", "Host: evil.example:8080\r\n", forbidden),
            ("GET /t0ken/ HTTP/1.1", "Host: 127.0.0.1.evil.example\r\n", forbidden),
            ("GET /t0ken/ HTTP/1.1", "Host: localhost\r\nHost: evil.example\r\n", forbidden),
            (
                "GET /t0ken/events HTTP/1.1",
                "Host: localhost\r\nOrigin: http://evil.example\r\n",
                forbidden,
            ),
            ("GET /t0ken/events HTTP/1.1", "Host: localhost\r\nOrigin: null\r\n", forbidden),
            (
                "GET /t0ken/events HTTP/1.1",
                "Host: localhost:1\r\nOrigin: http://localhost:2\r\n",
                forbidden,
            ),
            ("GET /t0ken/", here, bad),
            ("GET /t0ken/ HTTP/9.1", here, bad),
            ("\0\u{1}\u{2}", here, bad),
            ("GET /t0ken/ HTTP/1.1", "Host : localhost\r\n", bad),
            (
                "GET /t0ken/ HTTP/1.1",
                &"A: b\r\n".repeat(65),
                refused("431 Request Header Fields Too Large"),
            ),
        ] {
            let request = format!("{line}\r\n{headers}\r\n");
            assert_eq!(asked(request.as_bytes(), "t0ken"), Some(expected), "{request:?}");
        }
        let long = [b"GET /".as_slice(), &[b'a'; LONGEST_HEAD]].concat();
        assert_eq!(asked(&long[..LONGEST_HEAD - 1], "t0ken"), None, "more may come");
        let too_long = Some(refused("431 Request Header Fields Too Large"));
        assert_eq!(asked(&long, "t0ken"), too_long);
    }

    #[test]
    fn tokens_are_long_and_differ() {
        let [one, other] = [random().unwrap(), random().unwrap()];
        assert!(one != other && one.len() == 32);
    }
}
