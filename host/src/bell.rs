//! Proxies that wake each other's waiters: a TCP connection to each peer that has been rung.
//!
//! A ring says that a key is free and that a waiter of the peer is next; it carries nothing that a lock
//! depends on, and who hears it asks the store. So it needs no authentication: whoever rings without cause
//! costs a poll. A connection that is refused or reset says at once that the peer is gone, and its
//! waiters are passed over.
//!
//! Who is called says its name first, a line; so nobody is taken for another that had its address
//! before. A frame of the caller is two bytes of length, one of the space, and the key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use crate::lock::{Key, Space};
use crate::service::{Bell, Service};

/// Rings that wait for one peer. With more, the rest is lost: its waiters poll.
const QUEUED: usize = 1_024;
/// Connections that are taken in.
const CALLERS: usize = 256;
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// A connection that nobody has rung on for so long is closed.
const IDLE: Duration = Duration::from_secs(60);
const MAX_NAME: usize = 128;

type Gone = Box<dyn FnOnce() + Send>;
type Peers = Arc<Mutex<HashMap<Box<str>, Sender<Ring>>>>;

/// The ringing side.
pub struct Bells {
    name: String,
    peers: Peers,
}

struct Ring {
    key: Key,
    gone: Gone,
}

impl Bells {
    /// `address`: where the others reach [`answer`].
    pub fn new(address: SocketAddr) -> Bells {
        let run: u64 = rand::random();
        Bells { name: format!("{address}/{run:016x}"), peers: Arc::default() }
    }
}

impl Bell for Bells {
    fn name(&self) -> &str {
        &self.name
    }

    fn ring(&self, peer: &str, key: &Key, gone: Gone) {
        let mut ring = Ring { key: key.clone(), gone };
        let mut peers = lock(&self.peers);
        if let Entry::Occupied(caller) = peers.entry(peer.into()) {
            match caller.get().try_send(ring) {
                Ok(()) | Err(TrySendError::Full(_)) => return,
                Err(TrySendError::Closed(back)) => ring = back,
            }
            caller.remove();
        }
        let (sender, rings) = channel(QUEUED);
        let _ = sender.try_send(ring);
        peers.insert(peer.into(), sender);
        tokio::spawn(call(peer.to_owned(), rings, self.peers.clone()));
    }
}

/// Carries rings to one peer until it is gone, or nobody has rung for a while.
async fn call(peer: String, mut rings: Receiver<Ring>, peers: Peers) {
    let mut line = None;
    while let Ok(Some(Ring { key, gone })) = tokio::time::timeout(IDLE, rings.recv()).await {
        if send(&mut line, &peer, &key).await.is_err() {
            tracing::debug!(peer, "a proxy whose waiter is next is not there");
            gone();
            break;
        }
    }
    // Whoever rings from now on makes a new connection; what is in the queue is told that this one failed.
    lock(&peers).remove(peer.as_str());
    rings.close();
    while let Ok(Ring { gone, .. }) = rings.try_recv() {
        gone();
    }
}

async fn send(line: &mut Option<TcpStream>, peer: &str, key: &Key) -> io::Result<()> {
    let stream = match line.take().filter(is_open) {
        Some(stream) => stream,
        None => {
            let connected = tokio::time::timeout(CONNECT_LIMIT, connect(peer)).await;
            connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?
        }
    };
    line.insert(stream).write_all(&frame(key)).await
}

/// The peer says nothing after its name: what can be read is the end.
fn is_open(stream: &TcpStream) -> bool {
    let read = stream.try_read(&mut [0; 1]);
    read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Connects, and makes sure that it is the one that was meant.
async fn connect(peer: &str) -> io::Result<TcpStream> {
    let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
    let (address, _) = peer.split_once('/').ok_or_else(refused)?;
    let address: SocketAddr = address.parse().map_err(|_| refused())?;
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut name = Vec::new();
    while name.len() <= MAX_NAME {
        match stream.read_u8().await? {
            b'\n' => break,
            byte => name.push(byte),
        }
    }
    if name == peer.as_bytes() { Ok(stream) } else { Err(refused()) }
}

fn frame(key: &Key) -> Vec<u8> {
    let text = key.as_str().as_bytes();
    let mut frame = ((text.len() + 1) as u16).to_be_bytes().to_vec();
    frame.push(Space::ALL.iter().position(|space| *space == key.space()).unwrap_or_default() as u8);
    frame.extend_from_slice(text);
    frame
}

/// The side that is rung: wakes waiters until `stop`.
pub async fn answer(listener: TcpListener, name: String, service: Service, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CALLERS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a proxy could not be taken in");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (name, service, stop) = (name.clone(), service.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                _ = hear(stream, &name, &service) => {}
            }
            drop(place);
        });
    }
}

async fn hear(mut stream: TcpStream, name: &str, service: &Service) -> io::Result<()> {
    stream.write_all(format!("{name}\n").as_bytes()).await?;
    let mut frame = vec![0; Key::MAX_BYTES + 1];
    loop {
        let length = tokio::time::timeout(2 * IDLE, stream.read_u16()).await??;
        let frame = frame.get_mut(..usize::from(length)).ok_or(io::ErrorKind::InvalidData)?;
        stream.read_exact(frame).await?;
        let key = read(frame).ok_or(io::ErrorKind::InvalidData)?;
        service.wake(key);
    }
}

fn read(frame: &[u8]) -> Option<Key> {
    let (space, text) = frame.split_first()?;
    let space = Space::ALL.get(usize::from(*space))?;
    Some(Key::new(std::str::from_utf8(text).ok()?)?.within(*space))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_say_what_was_put_in() {
        for space in Space::ALL {
            let key = Key::new("orders/\u{e9}").expect("it is a key").within(space);
            assert_eq!(read(&frame(&key)[2..]), Some(key));
        }
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[9, b'a']), None);
        assert_eq!(read(&[0]), None);
        assert_eq!(read(&[0, 0xff]), None);
    }

    async fn rings(bells: &Bells, peer: &str) -> bool {
        let (tell, told) = tokio::sync::oneshot::channel();
        let key = Key::new("k").expect("it is a key");
        bells.ring(peer, &key, Box::new(move || tell.send(()).unwrap_or_default()));
        let gone = tokio::time::timeout(2 * CONNECT_LIMIT, told).await;
        !matches!(gone, Ok(Ok(())))
    }

    /// A listener that answers as a proxy of this name, once for each caller.
    async fn peer(name: &str, listener: &TcpListener) -> TcpStream {
        let (mut stream, _) = listener.accept().await.expect("a caller");
        stream.write_all(format!("{name}\n").as_bytes()).await.expect("it hears the name");
        stream
    }

    #[tokio::test]
    async fn whoever_is_gone_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let bells = Bells::new(address);
        let name = format!("{address}/1");
        let (first, mut stream) = tokio::join!(rings(&bells, &name), peer(&name, &listener));
        assert!(first, "it is there");
        let mut heard = [0; 4];
        stream.read_exact(&mut heard).await.expect("it was rung");
        assert_eq!(heard, [0, 2, 0, b'k']);
        drop(stream);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!rings(&bells, &name).await, "its connection has ended");
        let (other, _stream) = tokio::join!(rings(&bells, &name), peer("another", &listener));
        assert!(!other, "somebody else is there");
        drop(listener);
        assert!(!rings(&bells, &name).await, "nobody is there");
        assert!(!rings(&bells, "nonsense").await);
    }
}
