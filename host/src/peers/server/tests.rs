use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::task::AbortOnDropHandle;

use super::super::PeerClient;
use super::*;
use crate::service::Peers;

const NAME: &str = "127.0.0.1:7/elsewhere/proven";

/// A proxy that is called.
struct Called {
    address: SocketAddr,
    secret: latest::Sender<Option<PeerSecret>>,
    metrics: Metrics,
    woken: UnboundedReceiver<Key>,
    _serving: AbortOnDropHandle<()>,
}

/// Calls it without being a [`PeerClient`].
struct Caller {
    stream: TcpStream,
    name: String,
    conversation: Conversation,
}

fn listening() -> (Listener, SocketAddr) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("a port");
    let address = listener.address().expect("bound").to_string().parse().expect("TCP");
    (listener, address)
}

impl Called {
    async fn start() -> Called {
        let (listener, address) = listening();
        Called::with(listener, address, NAME.to_owned())
    }

    fn with(listener: Listener, address: SocketAddr, name: String) -> Called {
        let (secret, metrics) = (latest::Sender::new(Some(PeerSecret::random())), Metrics::default());
        let (wakes, woken) = unbounded_channel();
        let wake = move |key| wakes.send(key).expect("the test goes on");
        let notified = Notifications::new(name, secret.subscribe(), metrics.clone(), wake);
        let serving = tokio::spawn(net::serve(listener, notified, CancellationToken::new()));
        Called { address, secret, metrics, woken, _serving: AbortOnDropHandle::new(serving) }
    }

    fn secret(&self) -> PeerSecret {
        self.secret.borrow().clone().expect("there is one")
    }

    async fn caller(&self) -> Caller {
        let mut stream = TcpStream::connect(self.address).await.expect("it accepts");
        let mut name = Vec::new();
        loop {
            match stream.read_u8().await.expect("its name") {
                b'\n' => break,
                byte => name.push(byte),
            }
        }
        let mut nonce = [0; NONCE];
        stream.read_exact(&mut nonce).await.expect("its nonce");
        let name = String::from_utf8(name).expect("a name");
        let conversation = Conversation::new(&name, nonce);
        Caller { stream, name, conversation }
    }

    async fn next(&mut self) -> String {
        let woken = timeout(Duration::from_secs(5), self.woken.recv()).await;
        woken.expect("in time").expect("it serves").as_str().to_owned()
    }

    fn has_woken_nobody(&mut self) -> bool {
        self.woken.try_recv().is_err()
    }

    fn refused(&self) -> usize {
        let text = self.metrics.encode();
        let line = text
            .lines()
            .find(|line| line.starts_with("lockkeeper_fleet_notifications_total{outcome=\"refused"));
        line.map_or(0, |line| line.rsplit(' ').next().expect("a number").parse().expect("a number"))
    }
}

impl Caller {
    fn frame(&mut self, key: &str, secret: &PeerSecret) -> Vec<u8> {
        let frame = wire::frame(&Key::new(key).expect("it is a key"));
        let proof = self.conversation.prove(secret, &frame[2..]);
        [&frame[..], &proof].concat()
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("it is sent");
    }

    /// Waits until the called proxy has closed the connection, and returns how long that took.
    async fn closed(mut self) -> Duration {
        let begun = Instant::now();
        let end = timeout(Duration::from_secs(30), self.stream.read_u8()).await.expect("it ends");
        assert!(end.is_err(), "it says nothing more");
        begun.elapsed()
    }
}

#[tokio::test]
async fn a_proxy_of_the_same_store_wakes_waiters() {
    let mut called = Called::start().await;
    let secret = called.secret();
    let mut caller = called.caller().await;
    assert_eq!(caller.name, NAME);
    for key in ["a", "b", "c"] {
        let frame = caller.frame(key, &secret);
        caller.send(&frame).await;
        assert_eq!(called.next().await, key);
    }
    assert_eq!(called.refused(), 0);
}

#[tokio::test]
async fn a_caller_with_a_wrong_proof_wakes_nobody() {
    let mut called = Called::start().await;
    let mut caller = called.caller().await;
    let frame = caller.frame("a", &PeerSecret::random());
    caller.send(&frame).await;
    assert!(caller.closed().await < FRAME_LIMIT, "at once");
    assert_eq!(called.refused(), 1);

    let secret = called.secret();
    let mut caller = called.caller().await;
    let frame = caller.frame("a", &secret);
    caller.send(&frame).await;
    assert_eq!(called.next().await, "a");
    caller.send(&frame).await;
    caller.closed().await;
    assert!(called.has_woken_nobody(), "the frame was sent before");

    let mut caller = called.caller().await;
    let mut frame = caller.frame("a", &secret);
    frame[3] = b'b';
    caller.send(&frame).await;
    caller.closed().await;
    assert!(called.has_woken_nobody(), "another key was proven");
}

/// A caller of an earlier version sends frames without proofs, and never finds that this proxy has ended: a write that
/// fails, or a connection that is refused or reset before the name, would mean that.
#[tokio::test]
async fn a_caller_of_an_earlier_version_wakes_nobody_and_finds_this_proxy_alive() {
    let mut called = Called::start().await;
    let frame = wire::frame(&Key::new("a").expect("it is a key"));
    for _ in 0..3 {
        let mut caller = called.caller().await;
        caller.send(&frame).await;
    }
    let mut caller = called.caller().await;
    caller.send(&frame).await;
    let lasted = caller.closed().await;
    assert!(lasted < 2 * FRAME_LIMIT, "no place for longer: {lasted:?}");
    assert!(called.has_woken_nobody());
    assert_eq!(called.refused(), 4);
}

#[tokio::test]
async fn a_slow_caller_does_not_keep_its_place() {
    let mut called = Called::start().await;
    let secret = called.secret();
    let silent = called.caller().await;
    let mut begins = called.caller().await;
    begins.send(&[0]).await;
    let mut stops = called.caller().await;
    let frame = stops.frame("a", &secret);
    stops.send(&frame).await;
    assert_eq!(called.next().await, "a");
    let frame = stops.frame("b", &secret);
    stops.send(&frame[..frame.len() - 1]).await;
    let lasted = tokio::join!(silent.closed(), begins.closed(), stops.closed());
    assert!(lasted.0.max(lasted.1).max(lasted.2) < 2 * FRAME_LIMIT, "{lasted:?}");
    assert!(called.has_woken_nobody());
}

/// Strangers open connections as fast as they can, and keep them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_keep_no_proxy_out() {
    let (listener, address) = listening();
    let name = wire::name(address, "elsewhere", 1);
    let mut called = Called::with(listener, address, name.clone());
    let peers = PeerClient::new(address, called.secret.subscribe());
    let connections = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = connections.clone();
    let _strangers = AbortOnDropHandle::new(tokio::spawn(async move {
        let mut open = std::collections::VecDeque::new();
        loop {
            if let Ok(stream) = TcpStream::connect(address).await {
                open.push_back(stream);
                count.fetch_add(1, Relaxed);
            }
            // As many as the strangers' own limit of open files allows.
            if open.len() > 2 * NEWCOMERS {
                open.pop_front();
            }
        }
    }));
    while connections.load(Relaxed) <= NEWCOMERS {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let key = |n: usize| Key::new(&format!("key-{n}")).expect("it is a key");
    for n in 0..20 {
        let begun = Instant::now();
        peers.notify(&name, &key(n), Box::new(|| panic!("it has not ended")));
        assert_eq!(called.next().await, format!("key-{n}"));
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }
    assert!(called.refused() > 0, "strangers lost their places");
}

/// The store may be another one after a fail-over.
#[tokio::test]
async fn the_secret_of_now_counts() {
    let mut called = Called::start().await;
    let before = called.secret();
    called.secret.send_replace(None);
    let mut caller = called.caller().await;
    let frame = caller.frame("a", &before);
    caller.send(&frame).await;
    caller.closed().await;
    assert!(called.has_woken_nobody(), "no secret is known");
    let now = PeerSecret::random();
    called.secret.send_replace(Some(now.clone()));
    for (secret, is_known) in [(before, false), (now, true)] {
        let mut caller = called.caller().await;
        let frame = caller.frame("a", &secret);
        caller.send(&frame).await;
        if is_known {
            assert_eq!(called.next().await, "a");
        } else {
            caller.closed().await;
            assert!(called.has_woken_nobody());
        }
    }
}
