//! How two ranks prove to each other that they know the secret of the run.
//!
//! ```text
//! accepting   MAGIC, nonce a
//! connecting  nonce c, hello,  mac("hello",  a, c, hello)
//! accepting            answer, mac("answer", a, c, answer)
//! ```
//!
//! A mac is BLAKE3 under a key derived from the secret, which is never sent. Nonces are 32 random
//! bytes, so nothing can be replayed; hello and answer are JSON after their length in two bytes.
//! What follows is neither encrypted nor authenticated.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Names the protocol and its version.
const MAGIC: [u8; 16] = *b"sparse24 ranks 1";

/// The longest hello or answer in bytes.
const LONGEST: usize = 4096;

/// The time that a handshake may take.
const PATIENCE: Duration = Duration::from_secs(5);

type Key = [u8; blake3::KEY_LEN];
type Nonce = [u8; 32];

/// The secret that all ranks of a run share.
#[derive(Clone, Copy)]
pub struct Secret(Key);

impl Secret {
    /// Derives the key from any text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(blake3::derive_key("sparse24 2026-11 ranks of a run", text.as_bytes()))
    }

    fn mac(&self, what: &str, nonces: &[Nonce; 2], message: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(what.as_bytes()).update(nonces.as_flattened()).update(message);
        hasher.finalize()
    }
}

/// The rank that connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// The start of the run.
    pub(super) run: String,
    /// The machine, for messages.
    pub(super) host: String,
    /// Where this rank accepts others.
    pub(super) port: u16,
}

/// The reply of the rank that accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) host: String,
    /// Why the other rank does not belong here.
    pub(super) refused: Option<String>,
}

/// A connection that is given up at a time, however slowly bytes come.
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(plain(io::ErrorKind::TimedOut.into())) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        (&mut &*self.stream).read(to).map_err(plain)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        (&mut &*self.stream).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Timed<'_> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes).map_err(plain).map(|()| bytes)
    }

    fn send(
        &mut self,
        what: &str,
        secret: &Secret,
        nonces: &[Nonce; 2],
        message: &impl Serialize,
    ) -> io::Result<()> {
        let message = serde_json::to_vec(message)?;
        let length = u16::try_from(message.len()).map_err(io::Error::other)?;
        let mac = secret.mac(what, nonces, &message);
        self.write_all(&[&length.to_le_bytes()[..], &message, mac.as_bytes()].concat())
    }

    fn receive<T: DeserializeOwned>(
        &mut self,
        what: &str,
        secret: &Secret,
        nonces: &[Nonce; 2],
    ) -> io::Result<T> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if length > LONGEST {
            return Err(io::Error::other("the message is too long"));
        }
        let mut message = vec![0; length];
        self.read_exact(&mut message).map_err(plain)?;
        // The comparison takes the same time for any difference.
        if blake3::Hash::from_bytes(self.array()?) != secret.mac(what, nonces, &message) {
            return Err(io::Error::other("it does not know the secret of this run"));
        }
        Ok(serde_json::from_slice(&message)?)
    }
}

/// The error in words of a connection, where the system's are others.
fn plain(error: io::Error) -> io::Error {
    let kind = error.kind();
    match kind {
        // The timeout of a socket is either, by the system.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(kind, format!("no answer came for {} s", PATIENCE.as_secs()))
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::new(kind, "it closed the connection")
        }
        _ => error,
    }
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn timed(stream: &TcpStream) -> Timed<'_> {
    Timed { stream, until: Instant::now() + PATIENCE }
}

/// Greets a rank that connects; `answer` judges it.
pub(super) fn accept(
    stream: &TcpStream,
    secret: &Secret,
    answer: impl FnOnce(&Hello) -> Answer,
) -> io::Result<(Hello, Answer)> {
    let mut timed = timed(stream);
    let here = nonce()?;
    timed.write_all(&[&MAGIC[..], &here].concat())?;
    let nonces = [here, timed.array()?];
    let hello = timed.receive("hello", secret, &nonces)?;
    let answer = answer(&hello);
    timed.send("answer", secret, &nonces, &answer)?;
    Ok((hello, answer))
}

/// Connects as `hello`.
pub(super) fn connect(stream: &TcpStream, secret: &Secret, hello: &Hello) -> io::Result<Answer> {
    let mut timed = timed(stream);
    if timed.array()? != MAGIC {
        return Err(io::Error::other("it is not a rank of this version of sparse24"));
    }
    let nonces = [timed.array()?, nonce()?];
    timed.write_all(&nonces[1])?;
    timed.send("hello", secret, &nonces, hello)?;
    timed.receive("answer", secret, &nonces).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::other("it closed the connection, probably because its secret differs")
        }
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_connection_is_plain() {
        for (kind, expected) in [
            (io::ErrorKind::WouldBlock, "no answer came for 5 s"),
            (io::ErrorKind::TimedOut, "no answer came for 5 s"),
            (io::ErrorKind::UnexpectedEof, "it closed the connection"),
            (io::ErrorKind::ConnectionReset, "it closed the connection"),
        ] {
            let error = plain(kind.into());
            assert_eq!((error.kind(), error.to_string().as_str()), (kind, expected));
        }
    }
}
