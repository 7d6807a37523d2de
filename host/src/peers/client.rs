//! The sending side: a task and a connection for each peer that is notified.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use super::known::{Gone, KnownPeers, Notification, place};
use super::wire::{self, CONNECT_LIMIT, Conversation, IDLE, NONCE};
use crate::latest;
use crate::lock::Key;
use crate::random;
use crate::service::Peers;
use crate::store::registry::PeerSecret;
use crate::vital;

const MAX_NAME: usize = 128;

/// The sending side.
pub struct PeerClient {
    name: String,
    secret: latest::Receiver<Option<PeerSecret>>,
    peers: Arc<KnownPeers>,
}

impl PeerClient {
    /// `address`: where other proxies reach [`serve`](super::serve). `secret`: what the store has, once it is known.
    pub fn new(address: SocketAddr, secret: latest::Receiver<Option<PeerSecret>>) -> PeerClient {
        let place = place();
        let name = wire::name(address, &place, random::number());
        PeerClient { name, secret, peers: Arc::new(KnownPeers::new(place)) }
    }
}

impl Peers for PeerClient {
    fn name(&self) -> &str {
        &self.name
    }

    fn notify(&self, peer: &str, key: &Key, gone: Gone) {
        let notification = Notification { key: key.clone(), gone };
        if let Some(notifications) = self.peers.queue(peer, notification) {
            let (peer, peers, secret) = (peer.to_owned(), self.peers.clone(), self.secret.clone());
            vital::detach(call(peer, notifications, peers, secret));
        }
    }
}

/// Sends notifications to one peer until it cannot be reached or none has come for [`IDLE`].
async fn call(
    peer: String,
    mut notifications: Receiver<Notification>,
    peers: Arc<KnownPeers>,
    secret: latest::Receiver<Option<PeerSecret>>,
) {
    let mut line = None;
    loop {
        let notification = match timeout(IDLE, notifications.recv()).await {
            Ok(notification) => notification,
            Err(_) => {
                peers.task_ends(&peer);
                notifications.close();
                // A notification may have come just now.
                notifications.recv().await
            }
        };
        let Some(Notification { key, gone }) = notification else { return };
        let Err(unsent) = send(&mut line, &peer, &key, &peers, &secret).await else { continue };
        let has_ended = match unsent {
            Unsent::Unreached(error) => peers.has_ended(&peer, &error),
            Unsent::Unheard(error) => {
                tracing::debug!(peer, %error, "a proxy was not told that its waiter is next, so the waiter polls");
                false
            }
        };
        peers.task_ends(&peer);
        notifications.close();
        if has_ended {
            gone();
            std::iter::from_fn(|| notifications.try_recv().ok()).for_each(|other| (other.gone)());
        }
        return;
    }
}

/// Why a notification was not sent.
enum Unsent {
    /// The peer did not say its name.
    Unreached(io::Error),
    /// The peer said its name, so it runs.
    Unheard(io::Error),
}

async fn send(
    line: &mut Option<Line>,
    peer: &str,
    key: &Key,
    peers: &KnownPeers,
    secret: &latest::Receiver<Option<PeerSecret>>,
) -> Result<(), Unsent> {
    let secret = secret.borrow().clone();
    if let Some(mut open) = line.take().filter(Line::is_open)
        && open.send(key, secret.as_ref()).await.is_ok()
    {
        *line = Some(open);
        return Ok(());
    }
    // A connection that has just ended may have been closed for another caller: only a new one tells.
    let stream = within(CONNECT_LIMIT, connect(peer)).await.map_err(Unsent::Unreached)?;
    peers.reached(peer);
    let begun = async {
        let mut line = Line::begin(stream, peer).await?;
        line.send(key, secret.as_ref()).await?;
        Ok(line)
    };
    *line = Some(within(CONNECT_LIMIT, begun).await.map_err(Unsent::Unheard)?);
    Ok(())
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// A connection to a peer that has said its name.
struct Line {
    stream: TcpStream,
    /// `None`: the peer asks for no proofs.
    conversation: Option<Conversation>,
}

impl Line {
    async fn begin(mut stream: TcpStream, peer: &str) -> io::Result<Line> {
        let conversation = match wire::asks_for_proofs(peer) {
            true => {
                let mut nonce = [0; NONCE];
                stream.read_exact(&mut nonce).await?;
                Some(Conversation::new(peer, nonce))
            }
            false => None,
        };
        Ok(Line { stream, conversation })
    }

    /// Whether the connection is open. The peer sends nothing more, so readable data means the end.
    fn is_open(&self) -> bool {
        let read = self.stream.try_read(&mut [0; 1]);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    async fn send(&mut self, key: &Key, secret: Option<&PeerSecret>) -> io::Result<()> {
        let mut frame = wire::frame(key);
        if let Some(conversation) = &mut self.conversation {
            let secret =
                secret.ok_or_else(|| io::Error::other("the secret of the store is not known yet"))?;
            let proof = conversation.prove(secret, &frame[2..]);
            frame.extend_from_slice(&proof);
        }
        within(CONNECT_LIMIT, self.stream.write_all(&frame)).await
    }
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
        let gone = timeout(4 * CONNECT_LIMIT, told).await;
        !matches!(gone, Ok(Ok(())))
    }

    fn client(address: SocketAddr, secret: Option<PeerSecret>) -> PeerClient {
        PeerClient::new(address, latest::Sender::new(secret).subscribe())
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        (listener, address)
    }

    /// Accepts one caller and answers with this name, and with a nonce if the name asks for proofs.
    async fn peer(name: &str, listener: &TcpListener) -> TcpStream {
        let (mut stream, _) = listener.accept().await.expect("a caller");
        let nonce = [7; NONCE];
        let nonce = if wire::asks_for_proofs(name) { &nonce[..] } else { &[] };
        let greeting = [name.as_bytes(), b"\n", nonce].concat();
        stream.write_all(&greeting).await.expect("it hears the name");
        stream
    }

    async fn heard<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
        let mut heard = [0; N];
        stream.read_exact(&mut heard).await.expect("it was rung");
        heard
    }

    #[tokio::test]
    async fn a_peer_that_has_gone_is_noticed() {
        let (listener, address) = listener().await;
        let peers = client(address, None);
        let name = format!("{address}/elsewhere");
        let (first, mut stream) = tokio::join!(notifications(&peers, &name), peer(&name, &listener));
        assert!(first, "it is there");
        assert_eq!(heard(&mut stream).await, [0, 2, 0, b'k']);
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

    #[tokio::test]
    async fn each_frame_for_a_peer_that_asks_for_it_has_a_proof() {
        let (listener, address) = listener().await;
        let secret = PeerSecret::random();
        let peers = client(address, Some(secret.clone()));
        let name = wire::name(address, "elsewhere", 1);
        let (first, mut stream) = tokio::join!(notifications(&peers, &name), peer(&name, &listener));
        assert!(first && notifications(&peers, &name).await);
        let mut conversation = Conversation::new(&name, [7; NONCE]);
        for _ in 0..2 {
            let frame: [u8; 4 + wire::PROOF] = heard(&mut stream).await;
            assert_eq!(frame[..4], [0, 2, 0, b'k']);
            assert!(conversation.is_proven(&secret, &frame[2..4], &frame[4..]));
        }
    }

    /// It closes the connection before or after the notification, or sends no nonce.
    #[tokio::test]
    async fn a_peer_that_refuses_a_notification_has_not_ended() {
        let (listener, address) = listener().await;
        let name = wire::name(address, "elsewhere", 1);
        for secret in [None, Some(PeerSecret::random())] {
            let peers = client(address, secret);
            for says in [format!("{name}\n"), format!("{name}\n{}", "7".repeat(NONCE))] {
                let refuses = async {
                    let (mut stream, _) = listener.accept().await.expect("a caller");
                    stream.write_all(says.as_bytes()).await.expect("it hears the name");
                    // Unread bytes make the kernel reset the connection.
                    drop(stream);
                };
                let (is_there, ()) = tokio::join!(notifications(&peers, &name), refuses);
                assert!(is_there, "it said its name");
            }
        }
        drop(listener);
        let peers = client(address, None);
        peers.peers.queue(&name, Notification { key: Key::new("k").expect("a key"), gone: Box::new(|| ()) });
        peers.peers.reached(&name);
        peers.peers.task_ends(&name);
        assert!(!notifications(&peers, &name).await, "nobody is there");
    }

    /// A peer closes the connections that have been open for longest when it has too many.
    #[tokio::test]
    async fn a_connection_that_ended_is_tried_again() {
        let (listener, address) = listener().await;
        let secret = PeerSecret::random();
        let peers = client(address, Some(secret));
        let name = wire::name(address, "elsewhere", 1);
        for _ in 0..20 {
            let (is_there, stream) = tokio::join!(notifications(&peers, &name), peer(&name, &listener));
            assert!(is_there);
            // With unread bytes, so that the connection is reset.
            drop(stream);
        }
    }

    /// The address may be right on the peer's own machine.
    #[tokio::test]
    async fn a_peer_that_was_never_reached_may_be_alive() {
        let (listener, address) = listener().await;
        drop(listener);
        let peers = client(address, None);
        for peer in [&format!("{address}/elsewhere"), "192.0.2.1:7072/elsewhere", "nonsense"] {
            assert!(notifications(&peers, peer).await, "{peer}");
            assert!(notifications(&peers, peer).await, "{peer}, which is known");
        }
        let killed = client(address, None);
        assert!(!notifications(&peers, killed.name()).await, "it ran on this machine");
        let elsewhere = killed.name().replace("127.0.0.1", "192.0.2.1");
        assert!(!is_here(&elsewhere, &place()) && is_here(killed.name(), &place()));
    }
}
