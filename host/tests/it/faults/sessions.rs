//! Database sessions with locks, when the server stalls or becomes unusable: nobody else gets a lock of which its
//! holder is certain.

use std::sync::Arc;

use lockkeeper::lock::LeaseRef;
use lockkeeper::lock::record::Release;
use lockkeeper::store::{Reply, StoreError};
use mysql_async::prelude::Queryable;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

const PRIMITIVES: [&str; 2] = ["advisory", "row"];

/// A proxy that keeps each resource in the primitive that its name begins with.
async fn proxy_of_both(url: &str) -> Proxy {
    let mut sections = "[policies.default]\npath = \"builtin:default\"\n".to_owned();
    for primitive in PRIMITIVES {
        sections.push_str(&format!(
            "[policies.{primitive}]\npath = \"builtin:default\"\nsettings = {{ primitive = \"{primitive}\" }}\n\
             [[routes]]\nresource = \"{primitive}/*\"\npolicy = \"{primitive}\"\n"
        ));
    }
    let proxy = Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await;
    proxy.until_ready().await;
    proxy
}

/// A lease, and until when its client is certain of it.
struct Held {
    lease: Value,
    certain: Instant,
}

async fn held(client: &Client, primitive: &str, ttl_ms: u32) -> Held {
    let asked = Instant::now();
    let lease = client.lease(&format!("{primitive}/held"), ttl_ms).await;
    let told = lease["waited_ms"].as_u64().zip(lease["expires_in_ms"].as_u64());
    let (waited, left) = told.expect("it is told until when");
    Held { certain: asked + Duration::from_millis(waited + left), lease }
}

/// Asks for the lock until it is granted. Returns the time of the grant.
fn taken_by(client: Client, primitive: &'static str) -> JoinHandle<Instant> {
    tokio::spawn(async move {
        let body = json!({"resource": format!("{primitive}/held"), "ttl_ms": 1_000});
        let began = Instant::now();
        while client.acquire(body.clone()).await.status != 200 {
            assert!(began.elapsed() < Duration::from_secs(30), "{primitive}: it is never granted");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Instant::now()
    })
}

/// Sends a group to the store, and returns the answer.
fn submitted(
    store: &impl Store,
    group: Vec<Op>,
    within_ms: u32,
) -> oneshot::Receiver<Result<Reply, StoreError>> {
    let (tell, told) = oneshot::channel();
    let deadline = lockkeeper::clock::now().plus_ms(within_ms);
    store.submit(group, deadline, Box::new(move |result| drop(tell.send(result))));
    told
}

fn claim_of(name: &str, space: Space) -> Claim {
    let mut claim = contract::claim(&[name], name);
    claim.keys = claim.keys.iter().map(|key| key.clone().within(space)).collect();
    Claim { ttl_ms: 20_000, ..claim }
}

async fn granted(store: &impl Store, claim: &Claim) -> LeaseRef {
    let reply = submitted(store, vec![Op::Acquire(claim.clone())], 10_000).await.expect("an answer");
    let reply = reply.expect("the server is there");
    let [Outcome::Granted(grant)] = &reply.outcomes[..] else { panic!("{reply:?}") };
    LeaseRef { keys: claim.keys.clone(), nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None }
}

fn renewal(lease: &LeaseRef) -> Op {
    Op::Renew { lease: lease.clone(), ttl_ms: None }
}

on_both! {
    /// A stall that is longer than the time-out of other connections loses no lock.
    async fn a_stalled_server_frees_no_session_lock(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let (one, other) = tokio::join!(proxy_of_both(server.url()), proxy_of_both(server.url()));
        let (client, mut leases) = (one.client(), Vec::new());
        for primitive in PRIMITIVES {
            leases.push(held(&client, primitive, 20_000).await.lease);
            let taken = other.client().acquire(json!({"resource": format!("{primitive}/held")})).await;
            assert_eq!(taken.slug(), "contended", "{}", taken.text);
        }
        signal(&server, Signal::STOP);
        tokio::time::sleep(Duration::from_millis(4_500)).await;
        signal(&server, Signal::CONT);
        for (primitive, lease) in PRIMITIVES.into_iter().zip(&leases) {
            eventually("it is renewed", async || client.renew(lease).await.status == 200).await;
            let body = json!({"resource": format!("{primitive}/held"), "wait_ms": 1_000});
            let mut taken = other.client().acquire(body.clone()).await;
            eventually("the server answers", async || {
                if taken.status == 503 {
                    taken = other.client().acquire(body.clone()).await;
                }
                taken.status != 503
            })
            .await;
            assert_eq!((taken.status, taken.slug()), (409, "contended"), "{primitive}: {}", taken.text);
            assert_eq!(client.renew(lease).await.status, 200, "{primitive}");
        }
        server.stop().await;
    }

    /// With several servers, a server that is unreachable for some seconds is abandoned with its sessions. The
    /// holders are told at once, and the keys are free for others when no holder is certain any more.
    async fn the_keys_of_an_abandoned_session_stay_locked_while_a_holder_is_certain(kind: Kind) {
        let url = harness::database(kind).await;
        let several = format!("{url},{}", harness::database(kind).await);
        // The other proxy has only one server, so it sees the state of the server.
        let (one, other) = tokio::join!(proxy_of_both(&several), proxy_of_both(&url));
        let client = one.client();
        let mut conn = mysql_async::Conn::from_url(&url).await.expect("a connection");
        let mut leases = Vec::new();
        for primitive in PRIMITIVES {
            leases.push(held(&client, primitive, 9_000).await);
        }
        // Nobody can read the in-use heartbeat of the server.
        conn.query_drop("LOCK TABLES lockkeeper_mark WRITE").await.expect("a lock of the table");
        eventually("both sessions are given up", async || {
            let log = one.log();
            log.contains("lost the session of the advisory") && log.contains("lost the session of a row")
        })
        .await;
        let certain = leases.iter().filter(|held| Instant::now() < held.certain).count();
        assert_eq!(certain, 2, "they are given up long before the leases end");
        let takers = PRIMITIVES.map(|primitive| taken_by(other.client(), primitive));
        // The proxy's own clients are also kept out when the proxy reaches the server again.
        conn.query_drop("UNLOCK TABLES").await.expect("it is unlocked");
        let again = PRIMITIVES.map(|primitive| taken_by(client.clone(), primitive));
        for (primitive, held) in PRIMITIVES.into_iter().zip(&leases) {
            eventually(primitive, async || client.renew(&held.lease).await.slug() == "lost").await;
        }
        for (held, taker) in leases.iter().chain(&leases).zip(takers.into_iter().chain(again)) {
            let taken = taker.await.expect("it is granted in the end");
            assert!(taken >= held.certain, "granted {:?} too early", held.certain - taken);
        }
        conn.disconnect().await.expect("a goodbye");
    }

    /// A request that arrives too late is answered, and costs nobody else a lock.
    async fn a_request_past_its_deadline_does_not_end_the_session(kind: Kind) {
        let url = harness::database(kind).await;
        let store = open(&url).await;
        let advisory = Advisory::new(&store, &StoreConfig::default());
        let (lost, mut losses) = tokio::sync::mpsc::unbounded_channel();
        advisory.on_loss(Arc::new(move |nonces| drop(lost.send(nonces))));
        let lease = granted(&advisory, &claim_of("held", Space::Advisory)).await;
        for _ in 0..3 {
            let late = submitted(&advisory, vec![renewal(&lease)], 0).await.expect("an answer");
            assert!(late.is_err(), "{late:?}");
        }
        let renewed = submitted(&advisory, vec![renewal(&lease)], 10_000).await.expect("an answer");
        let renewed = renewed.expect("the session is there");
        assert!(matches!(renewed.outcomes[..], [Outcome::Renewed { .. }]), "{renewed:?}");
        assert!(losses.try_recv().is_err());
    }

    /// A request that is abandoned while the server is asked is answered in time, and costs nobody else a lock.
    async fn a_request_that_times_out_does_not_end_the_session(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let store = open(server.url()).await;
        let (advisory, row) = (Advisory::new(&store, &StoreConfig::default()), Row::new(&store, &StoreConfig::default()));
        async fn given_up(server: &ManagedServer, store: &impl Store, space: Space) {
            let (lost, mut losses) = tokio::sync::mpsc::unbounded_channel();
            store.on_loss(Arc::new(move |nonces| drop(lost.send(nonces))));
            let lease = granted(store, &claim_of("held", space)).await;
            signal(server, Signal::STOP);
            let more = || Op::Acquire(claim_of("more", space));
            let given_up = submitted(store, vec![renewal(&lease), more()], 500).await.expect("an answer");
            assert!(given_up.is_err(), "{space:?}: {given_up:?}");
            let claim = submitted(store, vec![more()], 500).await.expect("an answer");
            let error = claim.expect_err("the server is stopped");
            assert!(!error.was_sent(), "{space:?}: nothing was granted that would have to be undone: {error:?}");
            signal(server, Signal::CONT);
            let renewed = submitted(store, vec![renewal(&lease)], 10_000).await.expect("an answer");
            let renewed = renewed.expect("the server goes on");
            assert!(matches!(renewed.outcomes[..], [Outcome::Renewed { .. }]), "{space:?}: {renewed:?}");
            assert!(losses.try_recv().is_err(), "{space:?}");
        }
        given_up(&server, &advisory, Space::Advisory).await;
        given_up(&server, &row, Space::Row).await;
        server.stop().await;
    }

    /// Times that are decided before the server is asked and told after its answer count from before.
    async fn times_count_from_before_the_server_was_asked(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let store = open(server.url()).await;
        let (advisory, row) = (Advisory::new(&store, &StoreConfig::default()), Row::new(&store, &StoreConfig::default()));
        async fn asked_at(server: &ManagedServer, store: &impl Store, space: Space) {
            let lease = granted(store, &claim_of("held", space)).await;
            signal(server, Signal::STOP);
            let more = Op::Acquire(claim_of("more", space));
            let told = submitted(store, vec![renewal(&lease), more], 10_000);
            tokio::time::sleep(Duration::from_millis(500)).await;
            let before = lockkeeper::clock::now();
            signal(server, Signal::CONT);
            let reply = told.await.expect("an answer").expect("the server goes on");
            assert!(matches!(reply.outcomes[..], [Outcome::Renewed { .. }, Outcome::Granted(_)]), "{reply:?}");
            assert!(reply.asked_at < before, "{space:?}: {:?} too late", reply.asked_at.us_since(before));
        }
        asked_at(&server, &advisory, Space::Advisory).await;
        asked_at(&server, &row, Space::Row).await;
        server.stop().await;
    }

    /// The session is probed when the row is released, and the next holder comes before the answer. The release is
    /// still answered.
    async fn a_release_is_answered_although_the_row_went_to_the_next_holder(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let store = open(server.url()).await;
        let row = Row::new(&store, &StoreConfig::default());
        let lease = granted(&row, &claim_of("k", Space::Row)).await;
        signal(&server, Signal::STOP);
        // Longer than a session may be silent.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        let release = Release { lease, attempt: contract::fresh(), outcome: None };
        let released = submitted(&row, vec![Op::Release(release)], 20_000);
        let next = submitted(&row, vec![Op::Acquire(claim_of("k", Space::Row))], 20_000);
        signal(&server, Signal::CONT);
        let next = next.await.expect("an answer").expect("the server goes on");
        assert!(matches!(next.outcomes[..], [Outcome::Granted(_)]), "{next:?}");
        let released = tokio::time::timeout(Duration::from_secs(10), released).await;
        let released = released.expect("the next holder has not released").expect("an answer");
        assert!(matches!(released.expect("it is released").outcomes[..], [Outcome::Released { .. }]));
        server.stop().await;
    }
}
