//! `sparse24 watch`: what it serves, to whom, and how it ends.
#![cfg(unix)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Stdio},
};

use crate::{running::send, support::Place};

/// A watch, ended when it is dropped.
pub(crate) struct Watch {
    child: Child,
    port: u16,
    token: String,
}

impl Watch {
    pub(crate) fn start(place: &Place, runs: &str) -> Self {
        let mut command = place.command(&format!("watch {runs}"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://127.0.0.1:").unwrap();
        let (port, token) = address.trim_end_matches('/').split_once('/').unwrap();
        Self { child, port: port.parse().unwrap(), token: token.to_owned() }
    }

    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.port, self.token)
    }

    fn ask(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        // Whether it has closed the connection meanwhile shows in its answer.
        let _ = stream.write_all(request.replace("TOKEN", &self.token).as_bytes());
        stream
    }

    /// The headers and the body of an answer.
    fn answer(&self, request: &str) -> (String, String) {
        let mut answer = Vec::new();
        let _ = self.ask(request).read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        (head.to_owned(), body.to_owned())
    }

    /// The contents of each event.
    fn events(&self) -> impl Iterator<Item = String> + use<> {
        let stream = self.ask("GET /TOKEN/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let lines = BufReader::new(stream).lines().map(Result::unwrap);
        let parse =
            |line: String| Some(serde_json::from_str(line.strip_prefix("data: ")?).unwrap());
        lines.filter_map(parse)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const PAGE: &str = "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n";

#[test]
fn a_page_follows_its_runs_through_what_happens_to_them() {
    let place = Place::trained("--set run.eval_every=4");
    let whole = place.read("run/metrics.jsonl");
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    place.write("run/metrics.jsonl", lines[..5].concat());
    let mut watch = Watch::start(&place, "run later");
    let (head, page) = watch.answer(PAGE);
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("script-src 'nonce-"), "{head}");
    assert!(page.contains("5 of 12, unfinished") && page.contains("no such directory"), "{page}");
    let mut events = watch.events();
    let mut until = |part: &str| events.find(|event| event.contains(part)).unwrap();
    until("5 of 12, unfinished");
    // Grown, with a line that is being written.
    place.write("run/metrics.jsonl", lines[..9].concat() + &lines[9][..7]);
    until("9 of 12, unfinished");
    // Rewritten by a resume from an earlier step.
    place.write("run/metrics.jsonl", lines[..6].concat());
    until("6 of 12, unfinished");
    place.write("run/metrics.jsonl", "what?");
    until("metrics.jsonl has no step");
    // A link is not followed.
    place.remove("run/metrics.jsonl");
    place.write("elsewhere", &whole);
    std::os::unix::fs::symlink(place.path("elsewhere"), place.path("run/metrics.jsonl")).unwrap();
    until("symbolic link");
    place.rename("run", "later");
    let moved = until("run: run: is not a run directory");
    assert!(!moved.contains("later: later: is not"), "{moved}");
    place.train("run", "");
    until("12, finished");
    send("-INT", &watch.child);
    assert_eq!(watch.child.wait().unwrap().code(), Some(130));
}

#[test]
fn clients_that_are_wrong_slow_or_many_get_nothing_and_stop_nothing() {
    let place = Place::trained("");
    let watch = Watch::start(&place, "run");
    let headers = "Cookie: a\r\n".repeat(2000);
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "404"),
        ("GET /TOKEN/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403"),
        ("GET /TOKEN/events HTTP/1.1\r\nHost: localhost\r\nOrigin: http://a\r\n\r\n", "403"),
        ("\u{16}\u{3}\u{1}", "400"),
        (&format!("GET /TOKEN/ HTTP/1.1\r\n{headers}"), "431"),
    ] {
        let (head, body) = watch.answer(request);
        // The rest of a long request can make the system drop the answer.
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")) || status == "431", "{head}");
        assert!(body.is_empty() && !head.contains(&watch.token), "{request:?}: {head}{body}");
    }
    // Requests that are never finished, and events that are never read.
    let slow = ["GET /TOKEN/", "GET /TOKEN/events HTTP/1.1\r\nHost: localhost\r\n\r\n"];
    let mut held: Vec<_> = (0..12).map(|at| watch.ask(slow[at % 2])).collect();
    assert!(watch.answer(PAGE).1.contains("12, finished"));
    held.extend((0..60).map(|_| watch.ask(slow[0])));
    drop(held);
    let served = (0..1000).any(|_| watch.answer(PAGE).1.contains("12, finished"));
    assert!(served, "connections that are gone are counted");
    place.refuses(&format!("watch run --port {}", watch.port), 4, "127.0.0.1:*--port");
    place.refuses(&format!("watch {}", "run ".repeat(17)), 2, "at most 16 runs*");
    place.refuses("watch run text", 3, "text: is a file*run directory");
}
