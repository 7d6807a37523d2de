//! Requests that are done once, and answered to all clients that send them.

use rustix::process::Signal;

use super::*;
use crate::harness::{folder, own_server, signal};

const SETTINGS: &str = "[policies.default]\npath = \"builtin:default\"\n\
                        settings = { primitive = \"once\", wait_ms = 20_000, ttl_ms = 2_000 }\n";

fn config(path: &str) -> String {
    LISTEN.to_owned()
        + &route(path, "resource = \"pay/{header.idempotency-key}\"\nsee = { body_bytes = 64 }")
        + SETTINGS
}

on_both! {
    async fn duplicates_get_the_answer_of_the_first_request(kind: Kind) {
        let guarded = Guarded::start(kind, &config("/{*all}")).await;
        let client = guarded.client();
        let asks = (0..6).map(|_| {
            let client = client.clone();
            async move { client.send_with("POST", "/task/pay?ms=200", &[("idempotency-key", "a")], "{}").await }
        });
        let answers = join_all(asks).await;
        assert!(answers.iter().all(|answer| (answer.status, &*answer.text) == (200, "done")), "{answers:?}");
        let replayed = answers.iter().filter(|answer| answer.headers.contains_key("lock-replayed")).count();
        assert_eq!((replayed, guarded.upstream.served("/task/pay").await), (5, 1));
        let other = client.send_with("POST", "/task/pay?ms=200", &[("idempotency-key", "b")], "{}").await;
        assert!(other.status == 200 && !other.headers.contains_key("lock-replayed"));

        let first = client.send_with("POST", "/status/402", &[("idempotency-key", "c")], "").await;
        let again = client.send_with("POST", "/status/402", &[("idempotency-key", "c")], "").await;
        assert_eq!((first.status, &*first.text), (402, "status 402"));
        assert_eq!((again.status, &*again.text), (402, "status 402"));
        assert_eq!(first.headers.get_all("set-cookie").iter().count(), 2);
        assert!(!again.headers.contains_key("set-cookie"), "it is for the one who got it first");
        let links: Vec<_> = again.headers.get_all("link").iter().collect();
        assert_eq!(links, ["</a>", "</b>"], "headers are kept, each of them");
        assert_eq!(again.headers["lock-replayed"], "true");
        let misused = client.send_with("POST", "/status/402", &[("idempotency-key", "c")], "other").await;
        assert_eq!((misused.status, misused.slug()), (422, "request_id_reused"), "{}", misused.text);
        assert_eq!(guarded.upstream.served("/status/402").await, 1);
        assert_eq!(guarded.outcomes("replayed").await, 6.0);
    }

    /// An answer that means "not now" or "not you" is not the outcome of a request.
    async fn an_answer_that_is_no_outcome_is_not_stored(kind: Kind) {
        let guarded = Guarded::start(kind, &config("/{*all}")).await;
        let client = guarded.client();
        for status in [503, 429, 401, 403, 407] {
            let path = format!("/status/{status}");
            let key = status.to_string();
            for _ in 0..2 {
                let answer = client.send_with("POST", &path, &[("idempotency-key", &key)], "").await;
                assert_eq!(answer.status, status);
                assert!(!answer.headers.contains_key("lock-replayed"));
            }
            assert_eq!(guarded.upstream.served(&path).await, 2);
        }
    }

    async fn an_answer_over_the_size_limit_is_recorded_as_given(kind: Kind) {
        let guarded = Guarded::start(kind, &config("/{*all}")).await;
        let client = guarded.client();
        let whole = client.send_with("POST", "/bytes?n=5000", &[("idempotency-key", "a")], "").await;
        let again = client.send_with("POST", "/bytes?n=5000", &[("idempotency-key", "a")], "").await;
        assert!(again.text == whole.text && again.headers.contains_key("lock-replayed"));
        let large = client.send_with("POST", "/bytes?n=500000", &[("idempotency-key", "b")], "").await;
        assert_eq!((large.status, large.text.len()), (200, 500_000), "the first has it in whole");
        let again = client.send_with("POST", "/bytes?n=500000", &[("idempotency-key", "b")], "").await;
        assert_eq!((again.status, again.slug()), (409, "conflict"), "{}", again.text);
        assert_eq!((&again.json["original_status"], guarded.upstream.served("/bytes").await), (&json!(200), 2));
    }

    /// The application dies during the first request: the next request is done.
    async fn a_crash_of_the_application_lets_the_next_request_run(kind: Kind) {
        let url = database(kind).await;
        let mut guarded = Guarded::on(&url, &config("/{*all}")).await;
        let first = guarded.send("POST", "/task/pay?ms=20000", &[("idempotency-key", "a")]);
        guarded.until_served("/task/pay", 1).await;
        let address = guarded.upstream.good.to_string();
        guarded.upstream.kill();
        let failed = first.await.unwrap();
        assert_eq!((failed.status, failed.slug()), (502, "upstream_failed"), "{}", failed.text);
        guarded.upstream = Upstream::at(&address).await;
        let path = "/task/pay?ms=20000".replace("20000", "1");
        let again = guarded.client().send_with("POST", &path, &[("idempotency-key", "a")], "").await;
        assert_eq!(again.status, 200, "{}", again.text);
        assert_eq!(guarded.upstream.served("/task/pay").await, 1);
    }

    /// The proxy dies during the first request: when its lease has ended, another proxy does the next request.
    async fn a_crash_of_the_proxy_lets_the_next_request_run(kind: Kind) {
        let url = database(kind).await;
        let guarded = Guarded::on(&url, &config("/{*all}")).await;
        let other = before(&guarded.upstream, &url, &config("/{*all}")).await;
        let client = guarded.client();
        let first = tokio::spawn(async move { client.try_send("POST", "/task/none", "").await });
        drop(first);
        let client = guarded.client();
        let begun = tokio::spawn(async move {
            let headers = [("idempotency-key", "a")];
            tokio::time::timeout(Duration::from_secs(5), client.send_with("POST", "/task/pay?ms=3000", &headers, "")).await.is_ok()
        });
        guarded.until_served("/task/pay", 1).await;
        guarded.proxy.signal(Signal::KILL);
        let again = other.guarded().send_with("POST", "/task/pay?ms=3000", &[("idempotency-key", "a")], "").await;
        assert_eq!((again.status, &*again.text), (200, "done"), "{}", again.text);
        assert_eq!(guarded.upstream.served("/task/pay").await, 2);
        let replayed = other.guarded().send_with("POST", "/task/pay?ms=3000", &[("idempotency-key", "a")], "").await;
        assert_eq!(replayed.headers["lock-replayed"], "true");
        begun.abort();
    }

    /// The first client leaves before its answer arrives. The answer is kept anyway.
    async fn the_outcome_is_stored_although_its_client_left(kind: Kind) {
        let guarded = Guarded::start(kind, &config("/{*all}")).await;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        let head = "POST /task/pay?ms=700 HTTP/1.1\r\nidempotency-key: a\r\ncontent-length: 0\r\nhost: ";
        raw.send(format!("{head}{}\r\n\r\n", guarded.proxy.guard_address())).await;
        guarded.until_served("/task/pay", 1).await;
        drop(raw);
        let again = guarded.client().send_with("POST", "/task/pay?ms=700", &[("idempotency-key", "a")], "").await;
        assert_eq!((again.status, &*again.text), (200, "done"));
        assert_eq!((again.headers["lock-replayed"].to_str().unwrap(), guarded.upstream.served("/task/pay").await), ("true", 1));
    }

    /// The store pauses while the outcome is on its way. The outcome is sent again, because the lease still lasts.
    async fn the_outcome_outlives_a_pause_of_the_store(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let upstream = Upstream::start().await;
        let proxy = Proxy::with(Settings { api: String::new(),
            url: server.url().to_owned(),
            store: "timeout_ms = 300".to_owned(),
            sections: named(&upstream, &config("/{*all}").replace("ttl_ms = 2_000", "ttl_ms = 9_000")),
        });
        let guarded = Guarded { upstream, proxy: proxy.await };
        guarded.proxy.until_ready().await;
        let first = guarded.send("POST", "/task/pay?ms=500", &[("idempotency-key", "a")]);
        guarded.until_served("/task/pay", 1).await;
        signal(server.pid().unwrap(), Signal::STOP);
        tokio::time::sleep(Duration::from_millis(2_000)).await;
        signal(server.pid().unwrap(), Signal::CONT);
        let first = first.await.unwrap();
        assert_eq!((first.status, &*first.text), (200, "done"));
        assert!(!first.headers.contains_key("lock-status"), "it is kept: {:?}", first.headers);
        let again = guarded.client().send_with("POST", "/task/pay?ms=500", &[("idempotency-key", "a")], "").await;
        assert_eq!((again.status, again.headers.contains_key("lock-replayed")), (200, true), "{}", again.text);
        assert_eq!(guarded.upstream.served("/task/pay").await, 1);
        server.stop().await;
    }

    /// The store is unavailable for longer than the lease: the client receives its answer, with a note.
    async fn an_outcome_that_could_not_be_stored_is_marked_as_unkept(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let config = config("/{*all}").replace("ttl_ms = 2_000", "ttl_ms = 1_000");
        let guarded = Guarded::on(server.url(), &config).await;
        for path in ["/task/pay?ms=500", "/empty?ms=500"] {
            let first = guarded.send("POST", path, &[("idempotency-key", "a")]);
            guarded.until_served(path.split('?').next().unwrap(), 1).await;
            signal(server.pid().unwrap(), Signal::STOP);
            let answer = first.await.unwrap();
            signal(server.pid().unwrap(), Signal::CONT);
            assert_eq!((answer.status, answer.headers.get("lock-status")), (200, Some(&"unkept".parse().unwrap())));
            guarded.proxy.until_ready().await;
        }
        server.stop().await;
    }

    /// Only the client that stops reading is given up: the answer is read to its end, and the proxy records that it
    /// was given.
    async fn a_stalled_client_does_not_prevent_the_outcome_from_being_recorded(kind: Kind) {
        let config = config("/{*all}").replace("see =", "idle_timeout_ms = 700\nsee =");
        let guarded = Guarded::start(kind, &config).await;
        let mut slow = Raw::connect(guarded.proxy.guard_address()).await;
        slow.send("POST /bytes?n=60000000 HTTP/1.1\r\nhost: x\r\nidempotency-key: a\r\ncontent-length: 0\r\n\r\n").await;
        assert!(slow.hears_within(Duration::from_secs(20)).await);
        let headers = [("idempotency-key", "a"), ("host", "x")];
        let again = guarded.client().send_with("POST", "/bytes?n=60000000", &headers, "").await;
        assert_eq!((again.status, again.number("original_status")), (409, 200), "{}", again.text);
        assert_eq!(guarded.upstream.served("/bytes").await, 1);
        assert!(slow.count().await < 60_000_000, "it is not told that this was all");
    }

    /// The client has read the whole content and waits for the end of the answer. The store delays that end for
    /// longer than a client may be idle.
    async fn a_client_gets_its_whole_answer_although_the_store_delays_its_end(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let config = config("/{*all}").replace("see =", "idle_timeout_ms = 1_000\nsee =");
        let guarded = Guarded::on(server.url(), &config.replace("ttl_ms = 2_000", "ttl_ms = 20_000")).await;
        let mut client = Raw::connect(guarded.proxy.guard_address()).await;
        let head = "POST /bytes?n=60000000 HTTP/1.1\r\nhost: x\r\nidempotency-key: a\r\nconnection: close\r\n";
        client.send(format!("{head}content-length: 0\r\n\r\n")).await;
        assert!(client.hears_within(Duration::from_secs(20)).await);
        signal(server.pid().unwrap(), Signal::STOP);
        // Together with the chunk sizes, there are more bytes.
        client.skip(60_000_000).await;
        let mut end = tokio::spawn(async move { client.rest().await });
        let waits = tokio::time::timeout(Duration::from_millis(2_500), &mut end).await;
        assert!(waits.is_err(), "its end waits for the store");
        signal(server.pid().unwrap(), Signal::CONT);
        assert!(end.await.unwrap().ends_with("0\r\n\r\n"), "the answer is whole");
        let again = guarded.client().send_with("POST", "/bytes?n=60000000", &[("idempotency-key", "a"), ("host", "x")], "").await;
        assert_eq!((again.status, again.number("original_status")), (409, 200), "{}", again.text);
        server.stop().await;
    }
}
