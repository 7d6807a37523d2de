//! The connection between a proxy and its server. It passes everything on, unless it is told otherwise.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

/// A relay to the server of a URL, with its own socket.
pub struct Way {
    pub url: String,
    state: watch::Sender<State>,
}

/// What happens to all connections of a [`Way`].
#[derive(Clone, Copy, Default)]
struct State {
    /// How many times they were cut.
    cuts: u64,
    /// How long the server keeps a connection that was cut.
    lingers: Duration,
    /// How many times the next answer to a write should be lost, with its connection.
    losses: u64,
    /// Nothing passes to the server until then.
    to_server: Option<Instant>,
    /// Nothing passes to the proxy until then.
    to_proxy: Option<Instant>,
}

impl State {
    fn stalled_until(&self, direction: Direction) -> Option<Instant> {
        match direction {
            Direction::ToServer => self.to_server,
            Direction::ToProxy => self.to_proxy,
        }
    }
}

/// A direction of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToProxy,
}

impl Way {
    /// Opens the relay, with its socket at `path`.
    pub fn new(url: &str, path: &Path) -> Way {
        let (front, server) = url.split_once("socket=").expect("the servers of the tests have sockets");
        let listener = UnixListener::bind(path).expect("the folder is new");
        let (state, watched) = watch::channel(State::default());
        let (url, server) = (format!("{front}socket={}", path.display()), PathBuf::from(server));
        tokio::spawn(async move {
            while let Ok((proxy, _)) = listener.accept().await {
                if let Ok(server) = UnixStream::connect(&server).await {
                    tokio::spawn(connection(proxy, server, watched.clone()));
                }
            }
        });
        Way { url, state }
    }

    /// Cuts every connection. The server notices this much later.
    pub fn cut(&self, lingers: Duration) {
        self.state.send_modify(|state| {
            state.cuts += 1;
            state.lingers = lingers;
        });
    }

    /// On each connection, the next answer to a write is lost, with the connection.
    pub fn lose_answers(&self) {
        self.state.send_modify(|state| state.losses += 1);
    }

    /// Lets nothing pass in this direction for this long.
    pub fn stall(&self, direction: Direction, length: Duration) {
        let until = Some(Instant::now() + length);
        self.state.send_modify(|state| match direction {
            Direction::ToServer => state.to_server = until,
            Direction::ToProxy => state.to_proxy = until,
        });
    }
}

async fn connection(proxy: UnixStream, server: UnixStream, mut state: watch::Receiver<State>) {
    let first = *state.borrow_and_update();
    let writes = AtomicBool::new(false);
    let (mut from_proxy, mut to_proxy) = proxy.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let asks = pump(&mut from_proxy, &mut to_server, Direction::ToServer, state.clone(), |packet, _| {
        // COM_STMT_EXECUTE writes as well, in its own transaction.
        let is_write = packet.windows(6).any(|text| text == b"COMMIT") || packet.get(4) == Some(&0x17);
        writes.store(is_write, Ordering::Relaxed);
        true
    });
    let answers = pump(&mut from_server, &mut to_proxy, Direction::ToProxy, state.clone(), |_, state| {
        state.losses == first.losses || !writes.load(Ordering::Relaxed)
    });
    let cut = async {
        let cut = state.wait_for(|state| state.cuts != first.cuts).await;
        cut.map_or(Duration::ZERO, |state| state.lingers)
    };
    tokio::select! {
        () = asks => {}
        () = answers => {}
        lingers = cut => {
            drop((from_proxy, to_proxy));
            tokio::time::sleep(lingers).await;
        }
    }
}

/// Passes data on for as long as `passes` allows it.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    direction: Direction,
    state: watch::Receiver<State>,
    passes: impl Fn(&[u8], State) -> bool,
) {
    let mut packet = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut packet).await {
        loop {
            let until = state.borrow().stalled_until(direction);
            let Some(until) = until.filter(|until| *until > Instant::now()) else { break };
            tokio::time::sleep_until(until.into()).await;
        }
        let now = *state.borrow();
        if !passes(&packet[..n], now) || to.write_all(&packet[..n]).await.is_err() {
            return;
        }
    }
}
