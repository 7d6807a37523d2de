//! Applications, clients, stores and policies that fail during a guarded request.

use rustix::process::Signal;

use super::*;
use crate::harness::{folder, own_server, signal};
use crate::policies::{RENAMED, default_policy};

/// Checks that the lock is free: a request that does not wait gets it.
async fn is_free(guarded: &Guarded) {
    eventually("the lock is free", async || {
        guarded.client().send("GET", "/task/probe?ms=0", "").await.status == 200
    })
    .await;
}

/// The same lock for all paths, without waiting.
fn one_lock(more: &str) -> String {
    let bad = route("/bad/{name}", &format!("resource = \"one\"\n{more}")).replace("GOOD", "BAD");
    LISTEN.to_owned() + &bad + &route("/{*all}", &format!("resource = \"one\"\n{more}"))
}

on_both! {
    /// Answers that a server must not send, and what the client receives.
    async fn a_bad_upstream_answer_is_reported_and_its_lock_released(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("response_timeout_ms = 700\nidle_timeout_ms = 700")).await;
        let client = guarded.client();
        for (name, status, slug) in [
            ("reset", 502, "upstream_failed"),
            ("close", 502, "upstream_failed"),
            ("half-head", 502, "upstream_failed"),
            ("both-lengths", 502, "upstream_failed"),
            ("two-lengths", 502, "upstream_failed"),
            ("large-head", 502, "upstream_failed"),
            ("garbage", 502, "upstream_failed"),
            ("hang", 504, "upstream_timeout"),
        ] {
            let answer = client.get(&format!("/bad/{name}")).await;
            assert_eq!((answer.status, answer.slug()), (status, slug), "{name}: {}", answer.text);
            is_free(&guarded).await;
        }
        for name in ["half", "half-chunk"] {
            let broken = client.try_send("GET", &format!("/bad/{name}"), "").await;
            assert!(broken.is_none(), "{name} is not taken for a whole answer: {broken:?}");
            is_free(&guarded).await;
        }
        assert_eq!(client.get("/bad/old").await.text, "old", "an HTTP/1.0 server will do");
        is_free(&guarded).await;
        assert_eq!(client.get("/never").await.status, 504);
        is_free(&guarded).await;
        let twice = guarded.proxy.metric("lockkeeper_releases_total", &["\"lost\""]).await;
        assert!(twice < 0.5, "each was released once");
    }

    async fn an_unreachable_application_is_answered_with_502(kind: Kind) {
        let mut guarded = Guarded::start(kind, &one_lock("")).await;
        let address = guarded.upstream.good.to_string();
        guarded.upstream.kill();
        let refused = guarded.client().get("/task/1").await;
        assert_eq!((refused.status, refused.slug()), (502, "upstream_failed"), "{}", refused.text);
        assert!(!refused.text.contains(&address), "strangers need not know: {}", refused.text);
        // At most ten such errors per second are logged.
        eventually("the operator is told", async || {
            guarded.client().get("/task/1").await;
            guarded.proxy.log().contains(&address)
        })
        .await;
        guarded.upstream = Upstream::at(&address).await;
        is_free(&guarded).await;
    }

    /// The application's machine neither accepts nor refuses further connections.
    async fn a_connect_timeout_is_answered_with_504(kind: Kind) {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let full = (0..8).map(|_| tokio::time::timeout(Duration::from_millis(300), tokio::net::TcpStream::connect(address)));
        let full = join_all(full).await;
        assert!(full.iter().any(Result::is_err), "its queue is full");
        let config = "[upstreams]\nconnect_timeout_ms = 300\n".to_owned()
            + &one_lock("").replace("GOOD", &format!("http://{address}"));
        let guarded = Guarded::start(kind, &config).await;
        let late = guarded.client().get("/task/1").await;
        assert_eq!((late.status, late.slug()), (504, "upstream_timeout"), "{}", late.text);
        assert_eq!(guarded.client().get("/bad/old").await.text, "old", "the lock is free");
    }

    async fn a_client_that_leaves_the_queue_is_not_served(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("wait_ms = 20_000")).await;
        let held = guarded.send("POST", "/task/1?ms=2500", &[]);
        guarded.until_served("/task/1", 1).await;
        let api = guarded.proxy.client();
        for request in [
            "GET /task/gone HTTP/1.1\r\nhost: x\r\n\r\n",
            "POST /task/gone HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n",
            "POST /task/gone HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
            "POST /task/gone HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nhalf",
        ] {
            let mut gone = Raw::connect(guarded.proxy.guard_address()).await;
            gone.send(request).await;
            api.until_queued("one", 1).await;
            drop(gone);
            api.until_queued("one", 0).await;
        }
        assert_eq!(held.await.unwrap().status, 200);
        is_free(&guarded).await;
        assert_eq!(guarded.upstream.served("/task/gone").await, 0);
    }

    /// The application continues to work for a client that is gone, so its lock stays.
    async fn the_lock_is_held_until_the_application_is_done(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("ttl_ms = 1_000")).await;
        let mut gone = Raw::connect(guarded.proxy.guard_address()).await;
        gone.send("POST /task/1?ms=2500 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").await;
        guarded.until_served("/task/1", 1).await;
        let begun = Instant::now();
        drop(gone);
        while begun.elapsed() < Duration::from_millis(2_000) {
            assert_eq!(guarded.client().get("/task/2").await.status, 423, "held, and renewed");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        is_free(&guarded).await;

        // While the answer streams, its rest is read, and then the lock is free.
        let mut gone = Raw::connect(guarded.proxy.guard_address()).await;
        gone.send("GET /bytes?n=30000000 HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(gone.hears_within(Duration::from_secs(10)).await);
        assert_eq!(guarded.client().get("/task/2").await.status, 423);
        drop(gone);
        is_free(&guarded).await;
    }

    /// A client that stops reading, and a client that leaves an endless answer.
    async fn an_answer_that_its_client_does_not_read_frees_the_lock(kind: Kind) {
        let config = one_lock("idle_timeout_ms = 700\nttl_ms = 500\nresponse_timeout_ms = 60_000")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { max_hold_ms = 2_000 }\n";
        let guarded = Guarded::start(kind, &config).await;
        let mut slow = Raw::connect(guarded.proxy.guard_address()).await;
        slow.send("GET /bytes?n=500000000 HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(slow.hears_within(Duration::from_secs(10)).await);
        assert_eq!(guarded.client().get("/task/2").await.status, 423);
        is_free(&guarded).await;
        assert!(slow.count().await < 500_000_000, "it is not told that this was all");

        let mut gone = Raw::connect(guarded.proxy.guard_address()).await;
        gone.send("GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(gone.hears_within(Duration::from_secs(10)).await);
        drop(gone);
        eventually("the longest hold is over, and with it the exchange", async || {
            guarded.upstream.stats().await["now"]["/endless"] == 0
        })
        .await;
        is_free(&guarded).await;
    }

    /// If an application answers before it has received the whole request, the rest is not sent.
    async fn an_early_answer_ends_the_exchange(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("")).await;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send("POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nhalf").await;
        let answer = raw.until("early").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        is_free(&guarded).await;
        raw.send(vec![b'x'; 999_996]).await;
        eventually("the application sees it break off", async || guarded.upstream.served("/early/broken").await == 1)
            .await;
        assert_eq!(guarded.upstream.served("/early/whole").await, 0);
    }

    /// A client leaves an application that never ends: the longest hold is the limit.
    async fn no_lock_outlasts_the_longest_hold(kind: Kind) {
        let config = one_lock("ttl_ms = 500\nresponse_timeout_ms = 60_000")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { max_hold_ms = 1_500 }\n";
        let guarded = Guarded::start(kind, &config).await;
        let mut gone = Raw::connect(guarded.proxy.guard_address()).await;
        gone.send("GET /never HTTP/1.1\r\nhost: x\r\n\r\n").await;
        guarded.until_served("/never", 1).await;
        drop(gone);
        assert_eq!(guarded.client().get("/task/2").await.status, 423);
        eventually("it is free", async || guarded.client().get("/task/2").await.status == 200).await;
    }

    async fn a_refusal_or_fault_of_the_policy_is_answered_without_the_application(kind: Kind) {
        let dir = folder();
        let policy = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            format!("[policies.{name}]\npath = \"{}\"\n", path.display())
        };
        let bad: &[u8] = &crate::policies::BAD;
        let config = LISTEN.to_owned()
            + &route("/task/refuse", "resource = \"refuse\"").replace("\"default\"", "\"bad\"")
            + &route("/task/trap", "resource = \"panic\"").replace("\"default\"", "\"bad\"")
            + &route("/task/once", "resource = \"version\"")
            + &policy("bad", bad)
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { primitive = \"version\" }\n";
        let guarded = Guarded::start(kind, &config).await;
        let refused = guarded.client().get("/task/refuse").await;
        assert_eq!((refused.status, refused.slug()), (403, "refused"), "{}", refused.text);
        assert!(refused.json["reason"].is_string());
        let trapped = guarded.client().get("/task/trap").await;
        assert_eq!((trapped.status, trapped.slug(), &trapped.json["reason"]), (503, "policy_fault", &json!("trap")));
        // The client is not told what is wrong; the log tells it.
        assert!(!trapped.text.contains("could not decide: "), "{}", trapped.text);
        assert!(guarded.proxy.log().contains("could not decide: "), "{}", guarded.proxy.log());
        let never = guarded.client().get("/task/once").await;
        assert_eq!((never.status, never.slug()), (400, "invalid"), "{}", never.text);
        for path in ["/task/refuse", "/task/trap", "/task/once"] {
            assert_eq!(guarded.upstream.served(path).await, 0);
        }
    }

    /// A lease is taken away while the application works: the policy decides what happens.
    async fn a_lost_lease_is_ignored_marked_or_cut_off_as_the_policy_says(kind: Kind) {
        let policy = |name: &str, on_loss: &str| {
            format!("[policies.{name}]\npath = \"builtin:default\"\nsettings = {{ on_loss = \"{on_loss}\" }}\n")
        };
        let named = |name: &str| {
            route(&format!("/task/{name}"), &format!("resource = \"{name}\""))
                .replace("\"default\"", &format!("\"{name}\""))
        };
        let config = LISTEN.to_owned()
            + &named("finish") + &named("mark") + &named("cut")
            + &policy("finish", "finish") + &policy("mark", "mark") + &policy("cut", "cut");
        let guarded = Guarded::start(kind, &config).await;
        let mut asks = Vec::new();
        for path in ["/task/finish?ms=1500", "/task/mark?ms=1500", "/task/cut?ms=60000"] {
            asks.push(guarded.send("GET", path, &[]));
            guarded.until_served(path.split('?').next().unwrap(), 1).await;
        }
        for key in ["finish", "mark", "cut"] {
            let taken = guarded.proxy.admin().send("DELETE", &format!("/v1/locks/{key}"), "").await;
            assert_eq!((taken.status, taken.number("holders")), (200, 1), "{}", taken.text);
        }
        let mut answers = Vec::new();
        for ask in asks {
            answers.push(ask.await.unwrap());
        }
        let [finish, mark, cut] = &answers[..] else { panic!("three") };
        assert!((finish.status, &*finish.text) == (200, "done") && !finish.headers.contains_key("lock-status"));
        assert_eq!((mark.status, &*mark.text), (200, "done"));
        assert_eq!(mark.headers["lock-status"], "lost");
        assert!(!guarded.client().get("/task/mark").await.headers.contains_key("lock-status"));
        assert_eq!((cut.status, cut.slug()), (503, "lost"), "{}", cut.text);
        assert_eq!(guarded.proxy.metric("lockkeeper_guard_lost_total", &[]).await, 3.0);
    }

    /// The store fails between the grant and the answer. The answer is delivered and says so.
    async fn an_answer_is_delivered_without_the_store(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let config = one_lock("ttl_ms = 1_000")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { on_loss = \"mark\" }\n";
        let guarded = Guarded::on(server.url(), &config).await;
        let ask = guarded.send("GET", "/task/1?ms=3000", &[]);
        guarded.until_served("/task/1", 1).await;
        signal(server.pid().unwrap(), Signal::STOP);
        let answer = ask.await.unwrap();
        assert_eq!((answer.status, &*answer.text, &answer.headers["lock-status"]), (200, "done", &"lost".parse().unwrap()));
        assert!(guarded.proxy.log().contains("a lease was lost while the upstream worked"));
        assert_eq!(guarded.proxy.metric("lockkeeper_guard_lost_total", &[]).await, 1.0);
        signal(server.pid().unwrap(), Signal::CONT);
        is_free(&guarded).await;
        server.stop().await;
    }

    /// Without the store, a route is closed, unless it is configured to be open. Then requests are marked.
    async fn routes_are_closed_or_open_while_the_store_is_down(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let config = LISTEN.to_owned()
            + &route("/echo/closed", "resource = \"a\"")
            + &route("/echo/open", "resource = \"b\"\nfail = \"open\"")
            + "[[guard.routes]]\nmatch = { path = \"/echo/free\" }\nupstream = \"GOOD\"\n";
        let guarded = Guarded::on(server.url(), &config).await;
        assert!(guarded.client().get("/echo/open").await.json["headers"]["lock-token"].is_array());
        signal(server.pid().unwrap(), Signal::STOP);
        let closed = guarded.client().get("/echo/closed").await;
        assert_eq!((closed.status, closed.slug()), (503, "store_unavailable"), "{}", closed.text);
        assert!(closed.text.contains("the log of the proxy says why"), "{}", closed.text);
        assert!(guarded.proxy.log().contains("the MySQL server did not answer"), "{}", guarded.proxy.log());
        assert!(closed.headers.contains_key("retry-after"));
        let open = guarded.client().get("/echo/open").await;
        assert_eq!((open.status, &open.headers["lock-status"]), (200, &"unlocked".parse().unwrap()));
        let seen = &open.json["headers"];
        assert_eq!((&seen["lock-status"], &seen["lock-token"]), (&json!(["unlocked"]), &Value::Null));
        assert_eq!(guarded.client().get("/echo/free").await.status, 200, "it needs no store");
        assert_eq!(guarded.outcomes("unlocked").await, 1.0);
        assert_eq!(guarded.upstream.served("/echo/closed").await, 0);
        signal(server.pid().unwrap(), Signal::CONT);
        guarded.proxy.until_ready().await;
        assert_eq!(guarded.client().get("/echo/closed").await.status, 200);
        server.stop().await;
    }

    /// A route's policy is replaced during a request: later requests wait for it.
    async fn a_policy_replaced_during_a_guarded_request_makes_no_second_holder(kind: Kind) {
        let dir = folder();
        let path = dir.path().join("p.wasm");
        std::fs::write(&path, default_policy()).unwrap();
        // Built in advance, because a build may take longer than the request.
        let renamed = RENAMED.clone();
        let config = LISTEN.to_owned()
            + &route("/task/{id}", "resource = \"jobs/{id}\"\nwait_ms = 20_000").replace("\"default\"", "\"p\"")
            + &format!("[policies.p]\npath = \"{}\"\n", path.display());
        let guarded = Guarded::start(kind, &config).await;
        let held = guarded.send("POST", "/task/1?ms=8000", &[]);
        guarded.until_served("/task/1", 1).await;
        let pushed = guarded.proxy.admin().send("PUT", "/v1/policies/p", renamed).await;
        assert_eq!(pushed.status, 200, "{}", pushed.text);
        assert!(!held.is_finished(), "the old key is held yet");
        let next = guarded.send("POST", "/task/1?ms=10", &[]);
        assert_eq!((held.await.unwrap().status, next.await.unwrap().status), (200, 200));
        assert_eq!((guarded.upstream.together("/task/1").await, guarded.upstream.served("/task/1").await), (1, 2));
        let keys = guarded.proxy.client().show("x/jobs/1").await;
        assert!(!keys.is_null(), "the new name is known");
    }
}
