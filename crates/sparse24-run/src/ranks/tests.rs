//! Ranks as threads that are connected by TCP, and what others send to their ports.

use std::{
    io::Write,
    net::TcpStream,
    sync::{Arc, Mutex, mpsc::channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{handshake::Hello, *};

/// A group of this test.
struct Place {
    port: u16,
    notes: Arc<Mutex<Vec<String>>>,
}

impl Place {
    fn new() -> Self {
        Self { port: free_port().unwrap(), notes: Arc::default() }
    }

    fn placement(&self, rank: usize, world: usize) -> Placement {
        Placement {
            launcher: "a test",
            rank,
            world,
            local_rank: rank,
            local_world: world,
            host: "127.0.0.1".to_owned(),
            source: "MASTER_ADDR",
            ports: self.port..=self.port,
            run: "first".to_owned(),
        }
    }

    fn joining(&self, secret: &str) -> Joining {
        let notes = Arc::clone(&self.notes);
        Joining {
            secret: Secret::new(secret),
            peer_timeout: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(20),
            wait: Duration::from_secs(20),
            note: Arc::new(move |line| notes.lock().unwrap().push(line.to_owned())),
            lost: Arc::new(|_, _| {}),
        }
    }

    /// Starts a rank of a placement that `change` changes.
    fn start<T: Send + 'static>(
        &self,
        [rank, world]: [usize; 2],
        change: impl FnOnce(&mut Placement, &mut Joining),
        work: impl FnOnce(Tcp) -> Result<T, Error> + Send + 'static,
    ) -> JoinHandle<Result<T, Error>> {
        let (mut placement, mut joining) = (self.placement(rank, world), self.joining("secret"));
        change(&mut placement, &mut joining);
        thread::spawn(move || work(Tcp::join(&placement, joining)?))
    }

    /// A connection to rank 0, once it listens.
    fn connect(&self) -> TcpStream {
        loop {
            match TcpStream::connect(("127.0.0.1", self.port)) {
                Ok(stream) => return stream,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Connects as rank 1 of two with the secret, by hand.
    fn enter(&self) -> TcpStream {
        let hello =
            Hello { rank: 1, world: 2, run: "first".to_owned(), host: "b".to_owned(), port: 1 };
        let stream = self.connect();
        let answer = handshake::connect(&stream, &Secret::new("secret"), &hello).unwrap();
        assert_eq!(answer.refused, None);
        stream
    }
}

fn all<T>(ranks: Vec<JoinHandle<Result<T, Error>>>) -> Vec<Result<T, Error>> {
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn message<T>(result: Result<T, Error>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn every_part_reaches_its_rank() {
    const WORLD: usize = 4;
    let place = Place::new();
    // Of no byte, of some, and of several whole frames.
    let part = |from: usize, to: usize, round: usize| {
        vec![(16 * from + to) as u8; [0, 5 * from + to, 3 << 20][round]]
    };
    let work = move |mut tcp: Tcp| {
        let rank = tcp.rank();
        for round in 0..3 {
            let parts: Vec<_> = (0..WORLD).map(|to| part(rank, to, round)).collect();
            let got = tcp.exchange(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
            let expected: Vec<_> = (0..WORLD).map(|from| part(from, rank, round)).collect();
            assert!(got == expected, "round {round} on rank {rank}");
        }
        let facts = |seed: usize| vec![("seed".to_owned(), seed.to_string())];
        agree(&mut tcp, &facts(1))?;
        let differs = message(agree(&mut tcp, &facts(rank / 3)));
        tcp.close();
        Ok(differs)
    };
    let ranks = (0..WORLD).map(|rank| place.start([rank, WORLD], |_, _| {}, work)).collect();
    for differs in all(ranks) {
        let expected = "seed: differs between ranks: ranks 0, 1, 2 found 0, rank 3 found 1";
        assert_eq!(differs.unwrap(), expected);
    }
}

/// A process that does not belong to the run is refused, and holds up no rank.
#[test]
fn a_port_that_is_attacked_serves_the_ranks() {
    let place = Place::new();
    let work = |mut tcp: Tcp| {
        let own = [tcp.rank() as u8];
        let got = <dyn Group>::all_gather(&mut tcp, &own)?;
        tcp.close();
        Ok(got)
    };
    let first = place.start([0, 2], |_, _| {}, work);
    let half_open: Vec<_> = (0..40).map(|_| place.connect()).collect();
    let mut slow = place.connect();
    for garbage in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 1 << 16], &[0; 34]] {
        let mut stream = place.connect();
        // It may be closed before it is done.
        let _ = stream.write_all(garbage);
        slow.write_all(&[1]).unwrap();
    }
    let refused = |rank, change: fn(&mut Placement, &mut Joining)| {
        let rank = place.start([rank, 2], change, |_| Ok(()));
        message(rank.join().unwrap())
    };
    let error = refused(1, |_, joining| {
        joining.secret = Secret::new("another");
        joining.wait = Duration::from_secs(1);
    });
    let at = format!("waited 1 s for rank 0 at 127.0.0.1:{}: port ", place.port);
    assert!(error.starts_with(&at) && error.contains("its secret differs"), "{error}");
    let error = refused(1, |placement, _| placement.run = "second".to_owned());
    assert!(error.contains("another start of the run: \"second\", not \"first\""), "{error}");
    let error = refused(1, |placement, _| placement.world = 3);
    assert!(error.contains("expected 2 ranks as rank 0 does, found 3"), "{error}");
    let error = refused(2, |placement, _| placement.world = 2);
    assert!(error.contains("expected a rank of 1 to 1"), "{error}");
    let second = place.start([1, 2], |_, _| {}, work);
    for rank in all(vec![first, second]) {
        assert_eq!(rank.unwrap(), [[0], [1]]);
    }
    let notes = place.notes.lock().unwrap();
    assert!(notes.iter().any(|line| line.contains("127.0.0.1 is refused")), "{notes:?}");
    drop(half_open);
}

#[test]
fn a_rank_that_fails_is_named() {
    let frame = |kind: u8, length: u32| [&[kind][..], &length.to_le_bytes()].concat();
    for (sent, closes, expected) in [
        (vec![], true, "rank 1 (b) is gone"),
        (vec![], false, "rank 1 (b) has sent nothing for 3 s"),
        (frame(2, 1 << 30), false, "rank 1 (b) violates the protocol: a message is too long"),
        (frame(9, 0), false, "rank 1 (b) violates the protocol: a frame is of an unknown kind"),
        ([frame(3, 6), b"\x03cause".to_vec()].concat(), true, "cause"),
        (frame(3, 0), true, "rank 1 has ended before the others"),
    ] {
        let place = Place::new();
        let first = place.start(
            [0, 2],
            |_, _| {},
            |mut tcp| {
                let farewell = tcp.farewell();
                let error = <dyn Group>::all_gather(&mut tcp, &[]).unwrap_err();
                Ok((error, farewell.code()))
            },
        );
        let mut stream = place.enter();
        stream.write_all(&sent).unwrap();
        let open = (!closes).then_some(stream);
        let (error, code) = first.join().unwrap().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::Peer);
        assert_eq!(error.to_string(), expected);
        assert_eq!(code, (expected == "cause").then_some(3));
        drop(open);
    }
}

/// A rank whose main thread hangs; for rank 0, which may work alone, the others wait.
#[test]
fn a_rank_that_makes_no_progress_is_named() {
    let short = |_: &mut Placement, joining: &mut Joining| {
        joining.stall_timeout = Duration::from_millis(100);
    };
    let gather = |mut tcp: Tcp| Ok(<dyn Group>::all_gather(&mut tcp, &[])?);
    let place = Place::new();
    let (done, hangs) = channel::<()>();
    let first = place.start([0, 2], short, move |tcp| {
        let _ = &done;
        gather(tcp)
    });
    let second = place.start([1, 2], short, move |tcp| {
        // Until rank 0 has ended.
        let _ = hangs.recv();
        gather(tcp)
    });
    let error = message(first.join().unwrap());
    let expected = "sends heartbeats, but has made no progress";
    assert!(error.starts_with("rank 1 (") && error.contains(expected), "{error}");
    drop(second.join().unwrap());
    let place = Place::new();
    let late = move |tcp| {
        thread::sleep(Duration::from_millis(500));
        gather(tcp)
    };
    let (first, second) =
        (place.start([0, 2], |_, _| {}, late), place.start([1, 2], short, gather));
    all(vec![first, second]).into_iter().for_each(|rank| drop(rank.unwrap()));
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let place = Place::new();
    // The one that has come waits for rank 0 to say why.
    let ranks = [0, 2].map(|rank| {
        let wait = move |_: &mut Placement, joining: &mut Joining| {
            joining.wait = Duration::from_secs(if rank == 0 { 1 } else { 60 });
        };
        place.start([rank, 4], wait, |_| Ok(()))
    });
    for rank in all(ranks.into()) {
        assert_eq!(message(rank), "waited 1 s for ranks 1, 3 of 4");
    }
}

/// The name may become known later, so it is tried until the end, but not in silence.
#[test]
fn a_host_without_an_address_is_named_at_once() {
    let place = Place::new();
    let change = |placement: &mut Placement, joining: &mut Joining| {
        // No resolver is asked for it.
        placement.host = "head\0".to_owned();
        joining.wait = Duration::from_millis(100);
    };
    let error = message(place.start([1, 2], change, |_| Ok(())).join().unwrap());
    let expected = "rank 0's host \"head\\0\" cannot be resolved: ";
    assert!(error.starts_with(&format!("MASTER_ADDR: {expected}")), "{error}");
    let notes = place.notes.lock().unwrap();
    assert!(notes.len() == 1 && notes[0].starts_with(&format!("waiting: {expected}")), "{notes:?}");
}
