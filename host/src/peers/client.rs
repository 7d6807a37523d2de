//! The sending side: a task and a connection for each peer that is notified.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::Receiver;

use super::known::{Gone, KnownPeers, Notification, place};
use super::wire::{self, CONNECT_LIMIT, IDLE};
use crate::lock::Key;
use crate::random;
use crate::service::Peers;
use crate::vital;

const MAX_NAME: usize = 128;

/// The sending side.
pub struct PeerClient {
    name: String,
    peers: Arc<KnownPeers>,
}

impl PeerClient {
    /// `address`: where other proxies reach [`serve`](super::serve).
    pub fn new(address: SocketAddr) -> PeerClient {
        let (place, run) = (place(), random::number::<u64>());
        let name = format!("{address}/{place}{run:016x}");
        PeerClient { name, peers: Arc::new(KnownPeers::new(place)) }
    }
}

impl Peers for PeerClient {
    fn name(&self) -> &str {
        &self.name
    }

    fn notify(&self, peer: &str, key: &Key, gone: Gone) {
        let notification = Notification { key: key.clone(), gone };
        if let Some(notifications) = self.peers.queue(peer, notification) {
            vital::detach(call(peer.to_owned(), notifications, self.peers.clone()));
        }
    }
}

/// Sends notifications to one peer until it cannot be reached or none has come for [`IDLE`].
async fn call(peer: String, mut notifications: Receiver<Notification>, peers: Arc<KnownPeers>) {
    let mut connection = None;
    loop {
        let notification = match tokio::time::timeout(IDLE, notifications.recv()).await {
            Ok(notification) => notification,
            Err(_) => {
                peers.task_ends(&peer);
                notifications.close();
                // A notification may have come just now.
                notifications.recv().await
            }
        };
        let Some(Notification { key, gone }) = notification else { return };
        let Err(error) = send(&mut connection, &peer, &key, &peers).await else { continue };
        let has_ended = peers.has_ended(&peer, &error);
        peers.task_ends(&peer);
        notifications.close();
        if has_ended {
            gone();
            std::iter::from_fn(|| notifications.try_recv().ok()).for_each(|other| (other.gone)());
        }
        return;
    }
}

async fn send(
    connection: &mut Option<TcpStream>,
    peer: &str,
    key: &Key,
    peers: &KnownPeers,
) -> io::Result<()> {
    let stream = match connection.take().filter(is_open) {
        Some(stream) => stream,
        None => {
            let connected = tokio::time::timeout(CONNECT_LIMIT, connect(peer)).await;
            let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
            peers.reached(peer);
            stream
        }
    };
    connection.insert(stream).write_all(&wire::frame(key)).await
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::super::known::is_here;
    use super::*;

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
    async fn a_peer_that_has_gone_is_noticed() {
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
    async fn a_peer_that_was_never_reached_may_be_alive() {
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
