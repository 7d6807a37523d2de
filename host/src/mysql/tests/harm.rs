//! Servers that die, stop and cut connections.

use super::*;

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
            // Its threads stop one by one.
            tokio::time::sleep(Duration::from_millis(100)).await;
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
