//! A COMMIT whose answer is lost, with an event before the store asks again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::clock;
use lockkeeper::config::StoreConfig;
use lockkeeper::lock::record::{Claim, Commit, Op, Outcome, Release};
use lockkeeper::lock::{Key, LeaseRef, Mode, Token};
use lockkeeper::mysql::MysqlStore;
use lockkeeper::store::{Reply, Store, contract};
use lockkeeper::telemetry::Metrics;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

use crate::harness::{database, eventually, folder};

/// The wire passes everything on.
const OPEN: usize = 0;
/// The next answer to a COMMIT is lost, with its connection.
const ARMED: usize = 1;
/// The answer was lost, and nothing passes.
const SHUT: usize = 2;

/// The wire between a store and its server.
struct Wire {
    state: Arc<AtomicUsize>,
    url: String,
}

impl Wire {
    /// A wire to the server behind `url`, with a socket in `dir`.
    fn new(url: &str, dir: &Path) -> Wire {
        let (front, server) = url.split_once("socket=").expect("the servers of the tests have sockets");
        let path: PathBuf = dir.join("wire");
        let listener = UnixListener::bind(&path).expect("the folder is new");
        let (state, server) = (Arc::new(AtomicUsize::new(OPEN)), server.to_owned());
        let wire = Wire { state: state.clone(), url: format!("{front}socket={}", path.display()) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if state.load(Ordering::SeqCst) != SHUT
                    && let Ok(upstream) = UnixStream::connect(&server).await
                {
                    tokio::spawn(pass_on(client, upstream, state.clone()));
                }
            }
        });
        wire
    }

    async fn lost(&self) {
        eventually("the answer is lost", async || self.state.load(Ordering::SeqCst) == SHUT).await;
    }
}

async fn pass_on(client: UnixStream, server: UnixStream, state: Arc<AtomicUsize>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let (mut asked, mut answer) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut commits = false;
    loop {
        tokio::select! {
            biased;
            read = from_server.read(&mut answer) => {
                let Ok(n @ 1..) = read else { return };
                if commits && state.compare_exchange(ARMED, SHUT, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    return;
                }
                if to_client.write_all(&answer[..n]).await.is_err() {
                    return;
                }
            }
            read = from_client.read(&mut asked) => {
                let Ok(n @ 1..) = read else { return };
                // COM_STMT_EXECUTE writes as well, in its own transaction.
                commits = asked[..n].windows(6).any(|text| text == b"COMMIT") || asked.get(4) == Some(&0x17);
                if to_server.write_all(&asked[..n]).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn open(url: &str) -> MysqlStore {
    let config = StoreConfig { lanes: 1, timeout: Duration::from_secs(20), ..StoreConfig::default() };
    let store = MysqlStore::open(&config, url, 3_600_000, Metrics::default()).expect("the URL is good");
    store.ready(Duration::from_secs(30)).await;
    store
}

fn ask(store: &MysqlStore, group: Vec<Op>) -> oneshot::Receiver<Vec<Outcome>> {
    let (tell, told) = oneshot::channel();
    let done = |result: Result<Reply, _>| drop(tell.send(result.expect("it is answered").outcomes));
    store.submit(group, clock::now().plus_ms(20_000), Box::new(done));
    told
}

async fn granted(store: &MysqlStore, claim: &Claim) -> LeaseRef {
    match &ask(store, vec![Op::Acquire(claim.clone())]).await.unwrap()[..] {
        [Outcome::Granted(grant)] => LeaseRef {
            keys: claim.keys.clone(),
            nonce: grant.nonce,
            token: Some(grant.tokens[0]),
            principal: None,
        },
        other => panic!("{other:?}"),
    }
}

fn release(lease: &LeaseRef) -> Op {
    Op::Release(Release { lease: lease.clone(), attempt: contract::fresh(), outcome: None })
}

fn commit(version: Token) -> Op {
    let key = Key::new("counter").expect("it is a key");
    let (value, request) = (None, None);
    Op::Commit(Commit { key, version, value, attempt: contract::fresh(), request, fingerprint: 0 })
}

fn committed(outcomes: &[Outcome]) -> Token {
    match outcomes {
        [Outcome::Committed { version }] => *version,
        other => panic!("{other:?}"),
    }
}

on_both! {
    async fn an_operation_whose_answer_was_lost_is_confirmed_and_not_applied_again(kind: Kind) {
        let (url, dir) = (database(kind).await, folder());
        let wire = Wire::new(&url, dir.path());
        let (store, other) = (open(&wire.url).await, open(&url).await);

        let permit = |owner| Claim { mode: Mode::Permits { count: 1, limit: 99 }, ..contract::claim(&["p"], owner) };
        let enter = || Claim { reentrant: true, ..contract::claim(&["r"], "me") };
        let first = enter();
        let entered = granted(&store, &first).await;
        for _ in 0..9 {
            granted(&store, &enter()).await;
        }
        let mut group: Vec<Op> = (0..6).map(|_| release(&entered)).collect();
        for _ in 0..10 {
            group.push(release(&granted(&store, &permit("p")).await));
        }
        wire.state.store(ARMED, Ordering::SeqCst);
        let told = ask(&store, group);
        wire.lost().await;
        for _ in 0..3 {
            let lease = granted(&other, &permit("q")).await;
            ask(&other, vec![release(&lease)]).await.unwrap();
            granted(&other, &enter()).await;
        }
        wire.state.store(OPEN, Ordering::SeqCst);
        let outcomes = told.await.expect("it is answered");
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Released { .. })), "{outcomes:?}");
        let stored = other.read(first.keys[0].clone()).await.expect("it reads").expect("it is held");
        assert_eq!(stored.record.holders[0].levels.len(), 10 - 6 + 3);

        let made = committed(&ask(&store, vec![commit(Token(0))]).await.unwrap());
        wire.state.store(ARMED, Ordering::SeqCst);
        let told = ask(&store, vec![commit(made)]);
        wire.lost().await;
        let mut version = made.next();
        for _ in 0..5 {
            version = committed(&ask(&other, vec![commit(version)]).await.unwrap());
        }
        wire.state.store(OPEN, Ordering::SeqCst);
        assert_eq!(committed(&told.await.expect("it is answered")), made.next());
    }
}
