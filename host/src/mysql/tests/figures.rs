//! How fast the store is; see the parent module for how to run this.

use super::*;

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
    let mut link = Link::open(&store.shared).await.expect("it opens");
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
        let state = format!("{{\"holders\":[{{\"owner\":\"me{n:0300}\"}}]}}");
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
