//! The store on a server that is there already: `LOCKKEEPER_TEST_URL`, e.g.
//! `mysql://root@localhost/?socket=/tmp/mysql.sock`. Run with `--ignored`.

use std::sync::Arc;
use std::time::Duration;

use super::MysqlStore;
use crate::clock;
use crate::config::StoreConfig;
use crate::lock::record::{Claim, Op, Outcome};
use crate::lock::{Instant, LeaseRef};
use crate::store::{Health, Reply, Store, StoreError, contract};
use crate::telemetry::Metrics;

fn url(database: &str) -> String {
    let url = std::env::var("LOCKKEEPER_TEST_URL").expect("LOCKKEEPER_TEST_URL names a server");
    url.replace("/?", &format!("/{database}?"))
}

async fn open(database: &str, config: &StoreConfig) -> MysqlStore {
    let store =
        MysqlStore::open(config, &url(database), 60_000, Metrics::default()).expect("the URL is valid");
    let health = store.ready(Duration::from_secs(10)).await;
    assert!(matches!(health, Health::Ready { .. }), "{health:?}");
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server"]
async fn it_keeps_the_contract() {
    contract::run_all(|kind| async move {
        let (database, clean_after) = match kind {
            contract::Kind::Lasting => ("lk_contract", Duration::from_secs(3600)),
            contract::Kind::Forgetful => ("lk_forgetful", contract::FORGETS_AFTER),
        };
        let config = StoreConfig { clean_after, ..StoreConfig::default() };
        Arc::new(open(database, &config).await) as Arc<dyn Store>
    })
    .await;
}

/// Cycles of acquire and release, each task on a key of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server; prints figures"]
async fn figures() {
    let config = StoreConfig::default();
    let store = Arc::new(open("lk_figures", &config).await);
    for tasks in [1, 8, 64, 256] {
        let cpu = cpu_ms();
        let began = std::time::Instant::now();
        let workers =
            (0..tasks).map(|n| tokio::spawn(cycles(store.clone(), n, began + Duration::from_secs(4))));
        let mut total = 0;
        for worker in workers.collect::<Vec<_>>() {
            total += worker.await.expect("it ran");
        }
        let rate = total as f64 / began.elapsed().as_secs_f64();
        let used = cpu_ms();
        println!(
            "{tasks} tasks: {rate:.0} cycles/s, {:.0} us/cycle; CPU a cycle: proxy {:.1} us, server {:.1} us",
            1e6 * tasks as f64 / rate,
            (used.0 - cpu.0) * 1e3 / total as f64,
            (used.1 - cpu.1) * 1e3 / total as f64,
        );
    }
    let mut link = super::link::Link::open(&store.shared).await.expect("it opens");
    link.exchange("CREATE TABLE IF NOT EXISTS direct (id INT PRIMARY KEY, n BIGINT) ENGINE=InnoDB")
        .await
        .expect("it is made");
    link.exchange("REPLACE INTO direct VALUES (1,0)").await.expect("it is written");
    let began = std::time::Instant::now();
    for _ in 0..2000 {
        link.exchange("UPDATE direct SET n=n+1 WHERE id=1").await.expect("it is written");
    }
    println!("direct update: {:.0} us", began.elapsed().as_secs_f64() * 1e6 / 2000.0);
    let key = format!("one-{}", contract::fresh());
    acquire(&*store, &key, "me", 60_000).await.expect("it is granted");
    let began = std::time::Instant::now();
    for n in 0..2000 {
        let state = format!("{{\"holders\":[{{\"owner\":\"me{:0300}\"}}]}}", n);
        let sql = format!(
            "UPDATE lockkeeper_lease SET token=token+1,until_us=until_us+1,revision=revision+1,state='{state}' \
             WHERE k='{key}'"
        );
        link.exchange(sql).await.expect("it is written");
    }
    println!("direct update of such a row: {:.0} us", began.elapsed().as_secs_f64() * 1e6 / 2000.0);
    let key = format!("one-{}", contract::fresh());
    let (mut acquiring, mut releasing) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..2000 {
        let began = std::time::Instant::now();
        let lease = acquire(&*store, &key, "me", 10_000).await.expect("it is granted").0;
        acquiring += began.elapsed();
        let began = std::time::Instant::now();
        release(&*store, lease).await.expect("it is released");
        releasing += began.elapsed();
    }
    println!(
        "single acquire: {} us, release: {} us",
        acquiring.as_micros() / 2000,
        releasing.as_micros() / 2000
    );
    store.close().await;
}

/// What this process and the server (`LOCKKEEPER_TEST_PID`) have used so far.
fn cpu_ms() -> (f64, f64) {
    let of = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |n: usize| fields.get(n).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) * 10.0
    };
    (of("self"), of(&std::env::var("LOCKKEEPER_TEST_PID").unwrap_or_default()))
}

async fn cycles(store: Arc<MysqlStore>, n: usize, until: std::time::Instant) -> usize {
    let key = format!("bench-{n}");
    let mut count = 0;
    while std::time::Instant::now() < until {
        if let Ok((lease, _)) = acquire(&*store, &key, "me", 10_000).await {
            release(&*store, lease).await.expect("it is released");
            count += 1;
        }
    }
    count
}

/// Many owners on few keys, for `LOCKKEEPER_TEST_SECONDS`, while somebody else does harm to the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server, and somebody who does it harm"]
async fn load_under_harm() {
    let seconds = std::env::var("LOCKKEEPER_TEST_SECONDS").map_or(10, |text| text.parse().expect("a number"));
    let config = StoreConfig { timeout: Duration::from_secs(3), ..StoreConfig::default() };
    let stores = [Arc::new(open("lk_harm", &config).await), Arc::new(open("lk_harm", &config).await)];
    let keys: Arc<Vec<Watched>> = Arc::new((0..4).map(|n| Watched::new(&format!("harm-{n}"))).collect());
    let until = std::time::Instant::now() + Duration::from_secs(seconds);
    let workers = (0..24).map(|n| {
        let (store, keys) = (stores[n % 2].clone(), keys.clone());
        tokio::spawn(async move {
            let mut counts = [0; 4];
            while std::time::Instant::now() < until {
                counts[keys[(n + counts[0]) % 4].visit(&*store, n).await] += 1;
            }
            counts
        })
    });
    let mut sum = [0; 4];
    for worker in workers.collect::<Vec<_>>() {
        let counts = worker.await.expect("nothing was found wrong");
        sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [whole, held, unavailable, lost] = sum;
    println!("{whole} whole, {held} held, {unavailable} unavailable, {lost} lost on release");
    println!("{:?}", stores[0].health());
    assert!(whole > 0);
}

struct Watched {
    key: String,
    state: std::sync::Mutex<(u64, Option<Instant>)>,
}

impl Watched {
    fn new(key: &str) -> Watched {
        Watched { key: key.to_owned(), state: std::sync::Mutex::default() }
    }

    async fn visit(&self, store: &dyn Store, n: usize) -> usize {
        let before = self.state.lock().expect("nobody panicked").0;
        let (lease, certain_until) = match acquire(store, &self.key, &n.to_string(), 2_000).await {
            Ok(granted) => granted,
            Err(Some(_)) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                return 1;
            }
            Err(None) => return 2,
        };
        {
            let mut state = self.state.lock().expect("nobody panicked");
            assert!(lease.token.0 > before, "token {} after {before}", lease.token);
            let now = clock::now();
            assert!(state.1.is_none_or(|other| other <= now), "two hold {}", self.key);
            state.0 = state.0.max(lease.token.0);
            state.1 = Some(certain_until);
        }
        tokio::task::yield_now().await;
        if clock::now() < certain_until {
            self.state.lock().expect("nobody panicked").1 = None;
        }
        match release(store, lease).await {
            Ok(Outcome::Released { .. }) => 0,
            Ok(_) => 3,
            Err(_) => 2,
        }
    }
}

/// A server that is stopped while it is asked does nothing once nobody waits any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a server that it may stop: LOCKKEEPER_TEST_PID"]
async fn a_stopped_server_applies_nothing_late() {
    let pid = std::env::var("LOCKKEEPER_TEST_PID").expect("LOCKKEEPER_TEST_PID is the server's");
    let signal = |name: &str| {
        let done = std::process::Command::new("kill").args([name, &pid]).status();
        assert!(done.expect("kill runs").success());
    };
    let store = Arc::new(open("lk_stopped", &StoreConfig::default()).await);
    let key = |n: usize| format!("late-{n}-{:x}", contract::fresh());
    let keys: Vec<String> = (0..12).map(key).collect();
    for key in &keys[..6] {
        let (lease, _) = acquire(&*store, key, "me", 10_000).await.expect("it is granted");
        release(&*store, lease).await.expect("it is released");
    }
    for round in 0..10 {
        // Stopped before it is asked, and stopped anywhere while it works.
        let beforehand = round % 2 == 0;
        if beforehand {
            signal("-STOP");
        }
        let waiting = keys.iter().map(|key| {
            let (store, key) = (store.clone(), key.clone());
            tokio::spawn(async move { acquire_within(&*store, &key, "late", 60_000, 1_500).await })
        });
        let waiting = waiting.collect::<Vec<_>>();
        tokio::time::sleep(Duration::from_micros(round * 100)).await;
        signal("-STOP");
        let mut told = Vec::new();
        for answer in waiting {
            told.push(answer.await.expect("it ran"));
        }
        signal("-CONT");
        tokio::time::sleep(Duration::from_millis(500)).await;
        store.ready(Duration::from_secs(10)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let mut applied = 0;
        for (key, told) in keys.iter().zip(&told) {
            let key = crate::lock::Key::new(key).expect("it is a key");
            let stored = store.read(key.clone()).await.expect("it reads");
            let late = stored.as_ref().and_then(|stored| stored.record.holders.first());
            if let (Some(holder), Err(_)) = (late, told) {
                applied += 1;
                let _ = holder;
            }
            let (tell, answer) = tokio::sync::oneshot::channel();
            let done = Box::new(move |result| drop(tell.send(result)));
            store.submit(vec![Op::Force { key }], clock::now().plus_ms(5_000), done);
            let _ = answer.await;
        }
        let granted = told.iter().filter(|told| told.is_ok()).count();
        println!("round {round}: {granted} granted, {applied} applied without an answer");
        assert!(!beforehand || (granted, applied) == (0, 0), "it was applied late");
    }
}

async fn acquire(
    store: &dyn Store,
    key: &str,
    owner: &str,
    ttl_ms: u32,
) -> Result<(LeaseRef, Instant), Option<Outcome>> {
    acquire_within(store, key, owner, ttl_ms, 3_000).await
}

async fn acquire_within(
    store: &dyn Store,
    key: &str,
    owner: &str,
    ttl_ms: u32,
    within_ms: u32,
) -> Result<(LeaseRef, Instant), Option<Outcome>> {
    let claim = Claim { ttl_ms, ..contract::claim(&[key], owner) };
    let keys = claim.keys.clone();
    let (tell, told) = tokio::sync::oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    store.submit(vec![Op::Acquire(claim)], clock::now().plus_ms(within_ms), done);
    let reply: Result<Reply, StoreError> = told.await.expect("it is answered");
    let Ok(mut reply) = reply else { return Err(None) };
    match reply.outcomes.pop() {
        Some(Outcome::Granted(grant)) => {
            let lease = LeaseRef { keys, nonce: grant.nonce, token: grant.tokens[0] };
            Ok((lease, reply.asked_at.plus_us(grant.left_us)))
        }
        other => Err(other),
    }
}

async fn release(store: &dyn Store, lease: LeaseRef) -> Result<Outcome, StoreError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let done = Box::new(move |result| drop(tell.send(result)));
    let op = Op::Release { lease, attempt: contract::fresh() };
    store.submit(vec![op], clock::now().plus_ms(3_000), done);
    let mut reply: Reply = told.await.expect("it is answered")?;
    Ok(reply.outcomes.pop().expect("it has an outcome"))
}
