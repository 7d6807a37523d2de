//! Several servers: if one cannot serve a call or a lease, the next one does.

use super::*;

/// A script that ends when the test tells it to.
const UNTIL_GO: &str = "touch begun; while [ ! -e go ]; do sleep 0.02; done; exit 7";

fn of_both(first: &Fake, second: &Fake) -> String {
    format!("{},{}", first.url, second.url)
}

/// The address of a server that does not exist.
fn nobody() -> String {
    format!("http://127.0.0.1:{}", crate::harness::free_ports(1)[0])
}

#[test]
fn a_server_that_cannot_grant_is_passed_over() {
    crate::harness::run(async {
        let (stopping, works, dir) = (Fake::start(60_000), Fake::start(60_000), folder());
        stopping.answers("/v1/acquire", Answer::ShuttingDown);
        let servers = format!("{},{}", nobody(), of_both(&stopping, &works));
        let ended = ended(under_lock(&servers, "run", dir.path(), &["--wait", "1m"], "exit 7")).await;
        assert_eq!(ended.status.code(), Some(7), "{}", text(&ended.stderr));
        let (asked, granted) = (stopping.calls("/v1/acquire"), works.calls("/v1/acquire"));
        assert!(asked[0]["request_id"].is_string(), "{asked:?}");
        assert_eq!(
            (&asked[0]["request_id"], &asked[0]["owner"]),
            (&granted[0]["request_id"], &granted[0]["owner"])
        );
        let waits = [&asked, &granted].map(|calls| calls[0]["wait_ms"].as_u64().unwrap());
        assert!(waits[1] <= waits[0] && waits[0] <= 60_000, "the wait counts over all servers: {waits:?}");
        assert_eq!((stopping.count("/v1/release"), works.count("/v1/release")), (0, 1));
    });
}

/// While no server can be used, the wait continues with the same request id.
#[test]
fn a_wait_continues_while_servers_restart() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        fake.answers("/v1/acquire", Answer::Unavailable);
        let options = ["--wait", "1m", "--request-id", "mine"];
        let child = under_lock(&fake.url, "run", dir.path(), &options, "true").spawn().unwrap();
        fake.until_called("/v1/acquire", 3).await;
        fake.answers("/v1/acquire", Answer::Works);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        assert!(fake.calls("/v1/acquire").iter().all(|call| call["request_id"] == "mine"));
        // Without a wait, each server is asked once.
        fake.answers("/v1/acquire", Answer::Unavailable);
        let refused = under_lock(&fake.url, "run", dir.path(), &["--wait", "0"], "true");
        assert_eq!(self::ended(refused).await.status.code(), Some(115));
    });
}

/// A server stops, hangs or disappears while the command runs: another server renews and releases the lease.
#[test]
fn a_lease_is_renewed_through_another_server() {
    crate::harness::run(async {
        for answer in [Some(Answer::ShuttingDown), Some(Answer::Hangs), None] {
            let (first, second, dir) = (Fake::start(2_000), Fake::start(2_000), folder());
            let servers = of_both(&first, &second);
            let child = under_lock(&servers, "run", dir.path(), &[], UNTIL_GO).spawn().unwrap();
            until_file(&dir.path().join("begun")).await;
            let mut first = Some(first);
            match answer {
                Some(answer) => first.as_ref().unwrap().answers("/v1/renew", answer),
                None => drop(first.take()),
            }
            second.until_called("/v1/renew", 4).await;
            assert!(second.calls("/v1/renew").iter().all(|call| call["lease_id"] == "the-lease"));
            std::fs::write(dir.path().join("go"), "").unwrap();
            let ended = output(child).await;
            assert_eq!(ended.status.code(), Some(7), "{}", text(&ended.stderr));
            assert!(text(&ended.stderr).contains("is used now"), "{}", text(&ended.stderr));
            assert_eq!(second.count("/v1/release"), 1);
        }
    });
}

/// Only one proxy knows a lock on its session: another proxy would say that the lock is lost.
#[test]
fn a_session_lock_stays_with_its_server() {
    crate::harness::run(async {
        let (first, second, dir) = (Fake::of("advisory", 2_000), Fake::start(2_000), folder());
        second.answers("/v1/renew", Answer::Lost);
        first.answers("/v1/renew", Answer::Unavailable);
        let servers = of_both(&first, &second);
        let child = under_lock(&servers, "run", dir.path(), &[], UNTIL_GO).spawn().unwrap();
        first.until_called("/v1/renew", 1).await;
        first.answers("/v1/renew", Answer::Works);
        first.until_called("/v1/renew", 4).await;
        std::fs::write(dir.path().join("go"), "").unwrap();
        assert_eq!(output(child).await.status.code(), Some(7));
        assert_eq!((first.count("/v1/release"), second.count("/v1/renew")), (1, 0));
    });
}

/// Such a lock is free as soon as its proxy is gone, so the command is stopped at once, long before a renewal is due.
#[test]
fn a_session_lock_is_lost_with_its_server() {
    crate::harness::run(async {
        let (first, second, dir) = (Fake::of("advisory", 3_600_000), Fake::start(20_000), folder());
        let child = under_lock(&of_both(&first, &second), "run", dir.path(), &[], STUBBORN).spawn().unwrap();
        until_file(&dir.path().join("alive")).await;
        first.until_called("/v1/watch", 1).await;
        drop(first);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        assert!(text(&ended.stderr).contains("ends with its proxy"), "{}", text(&ended.stderr));
        assert_eq!(second.count("/v1/renew"), 0);
    });
}

/// The outcome of a `once` is stored by any server that can.
#[test]
fn an_outcome_is_stored_by_another_server() {
    crate::harness::run(async {
        let (first, second, dir) = (Fake::start(60_000), Fake::start(60_000), folder());
        first.answers("/v1/once/finish", Answer::Unavailable);
        let ended = ended(under_lock(&of_both(&first, &second), "once", dir.path(), &[], "echo done")).await;
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        assert_eq!(second.calls("/v1/once/finish")[0]["outcome"], json!({"code": 0, "stdout": "done\n"}));
    });
}

/// A release that may have arrived is not repeated: a lease that is held several times would be released twice.
#[test]
fn a_release_is_repeated_only_if_it_cannot_have_arrived() {
    crate::harness::run(async {
        let (first, second) = (Fake::start(60_000), Fake::start(60_000));
        for (answer, code, released) in [(Answer::Unavailable, 5, 0), (Answer::ShuttingDown, 0, 1)] {
            first.answers("/v1/release", answer);
            let ended = ended(program(&of_both(&first, &second), &["release", "the-lease"])).await;
            assert_eq!((ended.status.code(), second.count("/v1/release")), (Some(code), released));
        }
    });
}

/// `hold` resumes its lease on another server if its server stops, the connection ends, or the server is silent.
#[test]
fn a_hold_continues_through_another_server() {
    crate::harness::run(async {
        for (answer, ttl_ms, said) in [
            (Answer::Drains, 60_000, &["granted", "draining", "granted"][..]),
            (Answer::Ends, 60_000, &["granted", "granted"]),
            (Answer::Works, 2_000, &["granted", "granted"]),
        ] {
            let (first, second) = (Fake::start(ttl_ms), Fake::start(60_000));
            first.answers("/v1/hold", answer);
            let mut command = program(&of_both(&first, &second), &["hold", "job", "--json"]);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
            let count = said.len();
            let lines = tokio::task::spawn_blocking(move || {
                let lines = std::io::BufRead::lines(stdout).take(count);
                lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect::<Vec<Value>>()
            });
            let events: Vec<Value> =
                lines.await.unwrap().into_iter().map(|line| line["event"].clone()).collect();
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(events, said);
            assert_eq!(second.calls("/v1/hold"), [json!({"lease_id": "the-lease"})]);
            assert!(first.calls("/v1/hold")[0]["request_id"].is_string());
        }
    });
}

/// A held lock that ends with its server is lost as soon as the server is gone.
#[test]
fn a_held_session_lock_is_lost_with_its_server() {
    crate::harness::run(async {
        let fake = Fake::of("advisory", 3_600_000);
        fake.answers("/v1/hold", Answer::Ends);
        let child =
            program(&fake.url, &["hold", "job"]).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn();
        fake.until_called("/v1/hold", 1).await;
        drop(fake);
        let ended = output(child.unwrap()).await;
        assert_eq!(ended.status.code(), Some(4), "{}", text(&ended.stderr));
        assert!(text(&ended.stderr).contains("ends with its proxy"), "{}", text(&ended.stderr));
    });
}

/// A held lock that no server resumes is lost at the end of its lease, and not before.
#[test]
fn a_held_lock_that_no_server_resumes_is_lost() {
    crate::harness::run(async {
        let fake = Fake::start(1_500);
        fake.answers("/v1/hold", Answer::Ends);
        let began = std::time::Instant::now();
        let child =
            program(&fake.url, &["hold", "job"]).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn();
        fake.until_called("/v1/hold", 1).await;
        fake.answers("/v1/hold", Answer::Unavailable);
        let ended = output(child.unwrap()).await;
        assert_eq!(ended.status.code(), Some(4), "{}", text(&ended.stderr));
        assert!(
            began.elapsed() > Duration::from_millis(1_200),
            "it was given up after {:?}",
            began.elapsed()
        );
        assert!(fake.count("/v1/hold") > 2, "it was tried once");
    });
}

on_both! {
    /// Real proxies of one store: the proxy that granted the lock is killed; the lock is kept, and then released.
    async fn a_command_outlives_its_proxy(kind: Kind) {
        let url = database(kind).await;
        let (mut first, second) = (Proxy::start(&url).await, Proxy::start(&url).await);
        first.until_ready().await;
        second.until_ready().await;
        let servers = [&first, &second].map(|proxy| format!("http://{}", proxy.api_address())).join(",");
        let dir = folder();
        let child = under_lock(&servers, "run", dir.path(), &["--ttl", "3s"], UNTIL_GO).spawn().unwrap();
        until_file(&dir.path().join("begun")).await;
        first.kill();
        let killed = std::time::Instant::now();
        // Longer than the ttl.
        eventually("the ttl has passed", async || killed.elapsed() > Duration::from_millis(3_500)).await;
        assert_eq!(second.client().acquire(json!({"resource": "job"})).await.status, 409);
        std::fs::write(dir.path().join("go"), "").unwrap();
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(7), "{}", text(&ended.stderr));
        second.client().lease("job", 1_000).await;
    }
}
