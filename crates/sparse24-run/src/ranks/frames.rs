//! The frames of a connection: a kind, a length in four bytes, and that many bytes.

use std::{
    io::{self, BufReader, Read, Write},
    mem,
    net::{Shutdown, TcpStream},
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

/// The time between heartbeats.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// The longest frame in bytes.
const FRAME: usize = 1 << 20;

/// The longest message in bytes.
const MESSAGE: usize = 1 << 30;

/// Kinds of frames.
const ALIVE: u8 = 0;
/// A piece of a message that goes on.
const PIECE: u8 = 1;
/// The last piece of a message.
const LAST: u8 = 2;
/// The end of the connection; if the sender failed, its exit code and the reason.
const GOODBYE: u8 = 3;

pub(super) enum Outgoing {
    Message(Vec<u8>),
    Goodbye(Option<(String, u8)>),
}

/// Sends what comes, or a heartbeat if nothing does, until a goodbye.
pub(super) fn write(mut stream: TcpStream, outgoing: &Receiver<Outgoing>) {
    let mut send = |kind, bytes: &[u8]| {
        let length = (bytes.len() as u32).to_le_bytes();
        stream.write_all(&[&[kind], &length[..], bytes].concat())
    };
    let done = loop {
        let sent = match outgoing.recv_timeout(HEARTBEAT) {
            Ok(Outgoing::Message(message)) => {
                let whole = message.len().saturating_sub(1) / FRAME * FRAME;
                let (pieces, last) = message.split_at(whole);
                pieces
                    .chunks(FRAME)
                    .try_for_each(|piece| send(PIECE, piece))
                    .and_then(|()| send(LAST, last))
            }
            Ok(Outgoing::Goodbye(None)) => break send(GOODBYE, &[]),
            Ok(Outgoing::Goodbye(Some((text, code)))) => {
                break send(GOODBYE, &[&[code], text.as_bytes()].concat());
            }
            Err(RecvTimeoutError::Timeout) => send(ALIVE, &[]),
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
        };
        if sent.is_err() {
            break sent;
        }
    };
    // The readers of this connection, on both sides, report what became of it.
    drop(done);
    let _ = stream.shutdown(Shutdown::Write);
}

/// Passes on messages until the other rank says goodbye; returns its failure and exit code, if it
/// had one.
pub(super) fn read(
    stream: TcpStream,
    mut each: impl FnMut(Vec<u8>),
) -> io::Result<Option<(String, u8)>> {
    let mut stream = BufReader::with_capacity(1 << 16, stream);
    let mut message = Vec::new();
    let invalid = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    loop {
        let mut header = [0; 5];
        stream.read_exact(&mut header)?;
        let [kind, length @ ..] = header;
        let length = u32::from_le_bytes(length) as usize;
        if length > FRAME || message.len() + length > MESSAGE {
            return invalid("a message is too long");
        }
        let start = message.len();
        message.resize(start + length, 0);
        stream.read_exact(&mut message[start..])?;
        match (kind, length) {
            (ALIVE, 0) | (PIECE, _) => {}
            (LAST, _) => each(mem::take(&mut message)),
            (GOODBYE, 0) => return Ok(None),
            (GOODBYE, _) => {
                let text = String::from_utf8_lossy(&message[start + 1..]).into_owned();
                return Ok(Some((text, message[start])));
            }
            _ => return invalid("a frame is of an unknown kind"),
        }
    }
}
