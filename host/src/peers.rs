//! Notifications between proxies: one TCP connection to each peer that has been notified.
//!
//! A notification says that a key is free and that a waiter of the peer is next. No lock depends on it: the
//! peer then asks the store. So notifications need no authentication, and a false one costs one poll.
//!
//! The waiters of a peer that has ended are passed over at once. A refused or reset connection proves that the
//! peer has ended only if its address is known to lead to it: the peer was reached there before, or the address
//! is this machine's own. Otherwise the peer may be running at an address that this machine cannot reach, and
//! its waiters poll.
//!
//! The called proxy first sends its name, as one line, so that another proxy with the same address is not taken
//! for it. The caller then sends frames: two bytes of length, one byte of key space, and the key.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use crate::lock::maps::HashMap;
use crate::lock::{Key, Space};
use crate::random;
use crate::service::{Peers, Service};
use crate::vital;

/// How many notifications wait for one peer. The rest is dropped, and the peer's waiters poll.
const QUEUED: usize = 1_024;
/// How many incoming connections are served at a time.
const CALLERS: usize = 256;
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// How long a connection stays open without a notification.
const IDLE: Duration = Duration::from_secs(60);
const MAX_NAME: usize = 128;

/// How many peers are remembered.
const MAX_PEERS: usize = 1_024;

type Gone = Box<dyn FnOnce() + Send>;

/// The sending side.
pub struct PeerClient {
    name: String,
    peers: Arc<KnownPeers>,
}

struct KnownPeers {
    /// Identifies this machine and its network; empty if the system does not tell.
    place: String,
    known: Mutex<HashMap<Box<str>, Peer>>,
}

#[derive(Default)]
struct Peer {
    /// The channel to the task that calls the peer, if there is one.
    notifications: Option<Sender<Notification>>,
    /// Whether the peer was reached at its address.
    reached: bool,
    /// Whether a warning about the peer was logged.
    told: bool,
}

struct Notification {
    key: Key,
    gone: Gone,
}

impl PeerClient {
    /// `address`: where other proxies reach [`serve`].
    pub fn new(address: SocketAddr) -> PeerClient {
        let (place, run) = (place(), random::number::<u64>());
        let name = format!("{address}/{place}{run:016x}");
        PeerClient { name, peers: Arc::new(KnownPeers { place, known: Mutex::default() }) }
    }
}

impl Peers for PeerClient {
    fn name(&self) -> &str {
        &self.name
    }

    fn notify(&self, peer: &str, key: &Key, gone: Gone) {
        let notification = Notification { key: key.clone(), gone };
        let mut known = self.peers.lock();
        if known.len() >= MAX_PEERS && !known.contains_key(peer) {
            known.retain(|_, peer| peer.notifications.is_some());
        }
        let state = known.entry(peer.into()).or_default();
        if let Some(notifications) = &state.notifications {
            let _ = notifications.try_send(notification);
            return;
        }
        let (sender, notifications) = channel(QUEUED);
        let _ = sender.try_send(notification);
        state.notifications = Some(sender);
        vital::detach(call(peer.to_owned(), notifications, self.peers.clone()));
    }
}

impl KnownPeers {
    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Peer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Later notifications open a new connection.
    fn hang_up(&self, peer: &str) {
        if let Some(peer) = self.lock().get_mut(peer) {
            peer.notifications = None;
        }
    }

    fn is_reached(&self, peer: &str) {
        if let Some(peer) = self.lock().get_mut(peer) {
            (peer.reached, peer.told) = (true, false);
        }
    }

    /// Whether a peer that could not be notified is known to have ended.
    fn is_gone(&self, name: &str, error: &io::Error) -> bool {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof,
        };
        let mut known = self.lock();
        let Some(peer) = known.get_mut(name) else { return false };
        let refused = matches!(
            error.kind(),
            ConnectionRefused | ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof
        );
        if refused && (peer.reached || is_here(name, &self.place)) {
            tracing::debug!(peer = name, "the proxy of the next waiter has ended");
            known.remove(name);
            return true;
        }
        if !std::mem::replace(&mut peer.told, true) {
            tracing::warn!(
                peer = name,
                %error,
                "a proxy cannot be told that its waiter is next, so the waiter polls: check that this machine \
                 reaches the proxy at its fleet.listen and fleet.advertise addresses"
            );
        }
        false
    }
}

/// Identifies the machine and the network namespace, in 8 hex digits.
fn place() -> String {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = std::fs::read_link("/proc/self/ns/net");
    let (Ok(machine), Ok(network)) = (machine, network) else { return String::new() };
    let digest = Sha256::digest(format!("{machine}{}", network.display()));
    digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the peer's address is a loopback address of this machine.
fn is_here(name: &str, place: &str) -> bool {
    let address = |text: &str| text.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
    let here = |run: &str| !place.is_empty() && run.starts_with(place);
    name.split_once('/').is_some_and(|(text, run)| address(text) && here(run))
}

/// Sends notifications to one peer until it cannot be reached or none has come for [`IDLE`].
async fn call(peer: String, mut notifications: Receiver<Notification>, peers: Arc<KnownPeers>) {
    let mut line = None;
    loop {
        let notification = match tokio::time::timeout(IDLE, notifications.recv()).await {
            Ok(notification) => notification,
            Err(_) => {
                peers.hang_up(&peer);
                notifications.close();
                // A notification may have come just now.
                notifications.recv().await
            }
        };
        let Some(Notification { key, gone }) = notification else { return };
        let Err(error) = send(&mut line, &peer, &key, &peers).await else { continue };
        let is_gone = peers.is_gone(&peer, &error);
        peers.hang_up(&peer);
        notifications.close();
        let others = std::iter::from_fn(|| notifications.try_recv().ok());
        for gone in
            std::iter::once(gone).chain(others.map(|notification| notification.gone)).filter(|_| is_gone)
        {
            gone();
        }
        return;
    }
}

async fn send(line: &mut Option<TcpStream>, peer: &str, key: &Key, peers: &KnownPeers) -> io::Result<()> {
    let stream = match line.take().filter(is_open) {
        Some(stream) => stream,
        None => {
            let connected = tokio::time::timeout(CONNECT_LIMIT, connect(peer)).await;
            let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
            peers.is_reached(peer);
            stream
        }
    };
    line.insert(stream).write_all(&frame(key)).await
}

/// Whether the connection is open. The peer sends nothing after its name, so readable data means the end.
fn is_open(stream: &TcpStream) -> bool {
    let read = stream.try_read(&mut [0; 1]);
    read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Connects, and checks the name of the called proxy.
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

/// The receiving side: accepts notifications and wakes waiters until `stop`.
pub async fn serve(listener: TcpListener, name: String, service: Service, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CALLERS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection of another proxy could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (name, service, stop) = (name.clone(), service.clone(), stop.clone());
        vital::detach(async move {
            tokio::select! {
                biased;
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

    async fn notifications(peers: &PeerClient, peer: &str) -> bool {
        let (tell, told) = tokio::sync::oneshot::channel();
        let key = Key::new("k").expect("it is a key");
        peers.notify(peer, &key, Box::new(move || tell.send(()).unwrap_or_default()));
        let gone = tokio::time::timeout(2 * CONNECT_LIMIT, told).await;
        !matches!(gone, Ok(Ok(())))
    }

    /// Accepts one caller and answers with this name.
    async fn peer(name: &str, listener: &TcpListener) -> TcpStream {
        let (mut stream, _) = listener.accept().await.expect("a caller");
        stream.write_all(format!("{name}\n").as_bytes()).await.expect("it hears the name");
        stream
    }

    #[tokio::test]
    async fn whoever_is_gone_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let peers = PeerClient::new(address);
        let name = format!("{address}/elsewhere");
        let (first, mut stream) = tokio::join!(notifications(&peers, &name), peer(&name, &listener));
        assert!(first, "it is there");
        let mut heard = [0; 4];
        stream.read_exact(&mut heard).await.expect("it was rung");
        assert_eq!(heard, [0, 2, 0, b'k']);
        drop(stream);
        let (other, _stream) = tokio::join!(notifications(&peers, &name), peer("another", &listener));
        assert!(!other, "somebody else is there");
        let (again, stream) = tokio::join!(notifications(&peers, &name), peer(&name, &listener));
        assert!(again, "it is there");
        drop(stream);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(notifications(&peers, &name).await, "it says nothing, and may only be slow");
        drop(listener);
        assert!(!notifications(&peers, &name).await, "it was there, and is not");
    }

    /// The address may be right on the peer's own machine.
    #[tokio::test]
    async fn whoever_was_never_reached_may_live() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let peers = PeerClient::new(address);
        for peer in [&format!("{address}/elsewhere"), "192.0.2.1:7072/elsewhere", "nonsense"] {
            assert!(notifications(&peers, peer).await, "{peer}");
            assert!(notifications(&peers, peer).await, "{peer}, which is known");
        }
        let killed = PeerClient::new(address);
        assert!(!notifications(&peers, killed.name()).await, "it ran on this machine");
        let elsewhere = killed.name().replace("127.0.0.1", "192.0.2.1");
        assert!(!is_here(&elsewhere, &place()) && is_here(killed.name(), &place()));
    }
}
