//! The proxy as a reverse proxy: what it passes on, what it removes, and what it refuses.

use rustix::process::Signal;

use super::*;

/// Routes that pass everything on; paths below `/locked` have a lock.
fn open() -> String {
    let all = "[[guard.routes]]\nmatch = { path = \"/{*all}\" }\nupstream = \"GOOD\"\npolicy = \"none\"\nambiguous_paths = \"allow\"\n";
    LISTEN.to_owned() + &route("/locked/{*all}", "resource = \"one\"") + all
}

on_both! {
    async fn requests_and_answers_pass_as_they_are(kind: Kind) {
        let guarded = Guarded::start(kind, &open()).await;
        let headers = [
            ("x-custom", "1"), ("x-custom", "2"), ("connection", "x-secret"), ("x-secret", "hop"),
            ("te", "trailers"), ("x-forwarded-for", "6.6.6.6"), ("cookie", "a=1"), ("user-agent", "it"),
        ];
        let path = "/echo/a%20b/%2F?x=1&y=%26";
        let answer = guarded.client().send_with("PATCH", path, &headers, "the body").await;
        assert_eq!(answer.status, 200);
        let seen = &answer.json["headers"];
        assert_eq!((&answer.json["method"], &answer.json["target"]), (&json!("PATCH"), &json!(path)));
        assert_eq!((&answer.json["body"], &seen["x-custom"]), (&json!("the body"), &json!(["1", "2"])));
        assert_eq!((&seen["x-secret"], &seen["te"]), (&Value::Null, &json!(["trailers"])));
        assert_eq!(seen["host"], json!([guarded.proxy.guard_address().to_string()]));
        assert_eq!((&seen["x-forwarded-for"], &seen["x-forwarded-proto"]), (&json!(["127.0.0.1"]), &json!(["http"])));
        assert!(seen["forwarded"][0].as_str().unwrap().starts_with("for=127.0.0.1;host="), "{seen}");
        let plain = guarded.client().get("/status/200").await;
        assert!(!plain.headers.contains_key("lock-status"), "the application does not speak for the proxy");
        assert_eq!(guarded.client().get("/status/204").await.status, 204);
        // A body of unknown length, with a method that rarely has a body.
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send(
            "GET /count HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n\
             3\r\nabc\r\n0\r\n\r\n",
        )
        .await;
        assert_eq!(parsed(&raw.rest().await).1, json!({"bytes": 3, "sum": 294}));
        let head = guarded.client().send("HEAD", "/status/200", "").await;
        assert_eq!((head.status, &*head.text, head.headers["content-length"].to_str().unwrap()), (200, "", "10"));
        assert_eq!(guarded.client().get("/status/503").await.text, "status 503", "errors are the application's own");

        let h2 = Client::http2(guarded.proxy.guard_address());
        let answer = h2.send_with("PUT", "/locked/echo", &[("cookie", "a=1"), ("cookie", "b=2")], "over two").await;
        assert_eq!((answer.status, &answer.json["body"]), (200, &json!("over two")));
        assert_eq!(answer.json["headers"]["cookie"], json!(["a=1; b=2"]));
        assert_eq!(answer.json["headers"]["lock-key"], json!(["one"]));
        assert_eq!(answer.json["headers"]["host"], json!([guarded.proxy.guard_address().to_string()]));
    }

    async fn large_bodies_pass_in_bounded_memory(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/{*all}", "resource = \"one\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &config).await;
        guarded.client().get("/bytes?n=100000").await;
        let before = guarded.proxy.memory();
        const SIZE: u64 = 200_000_000;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send(format!("GET /bytes?n={SIZE} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await;
        assert!(raw.count().await > SIZE);
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send(format!("POST /count HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {SIZE}\r\n\r\n")).await;
        let piece = vec![1; 1 << 20];
        let mut left = SIZE as usize;
        while left > 0 {
            let part = left.min(piece.len());
            raw.send(&piece[..part]).await;
            left -= part;
        }
        let (status, counted) = parsed(&raw.rest().await);
        assert_eq!((status, &counted), (200, &json!({"bytes": SIZE, "sum": SIZE})));
        let grown = guarded.proxy.memory().saturating_sub(before);
        assert!(grown < 16 << 20, "{} KiB more for {SIZE} bytes", grown >> 10);
    }

    async fn trailers_pass_both_ways(kind: Kind) {
        let guarded = Guarded::start(kind, &open()).await;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send(
            "POST /trailers HTTP/1.1\r\nhost: x\r\nte: trailers\r\nconnection: close, te\r\ntrailer: x-sum, x-forwarded-for\r\n\
             transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 9\r\nx-forwarded-for: 6.6.6.6\r\n\r\n",
        )
        .await;
        let answer = raw.rest().await;
        assert!(answer.contains("\"9\"") && answer.contains("x-check: 42"), "{answer}");
        assert!(!answer.contains("6.6.6.6"), "{answer}");
    }

    async fn a_client_that_expects_100_continue_sends_its_body_after_the_grant(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/{*all}", "resource = \"one\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &config).await;
        let held = guarded.send("POST", "/task/1?ms=700", &[]);
        guarded.until_served("/task/1", 1).await;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send("POST /count HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n").await;
        assert!(!raw.hears_within(Duration::from_millis(300)).await, "it is queued");
        assert!(raw.hears_within(Duration::from_secs(20)).await);
        assert!(held.await.unwrap().status == 200);
        raw.send("abc").await;
        let answer = raw.rest().await;
        assert!(answer.starts_with("HTTP/1.1 100 ") && answer.contains("{\"bytes\":3"), "{answer}");
    }

    async fn an_upgraded_connection_holds_its_lock(kind: Kind) {
        let guarded = Guarded::start(kind, &(LISTEN.to_owned() + &route("/{*all}", "resource = \"one\"\nttl_ms = 1_000"))).await;
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send("GET /socket HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: echo\r\n\r\nearly").await;
        let head = raw.until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 101 ") && head.to_lowercase().contains("upgrade: echo"), "{head}");
        assert_eq!(raw.until("early").await, "early");
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(guarded.client().get("/task/1").await.status, 423, "held, and renewed");
            raw.send("ping").await;
            assert_eq!(raw.until("ping").await, "ping");
        }
        drop(raw);
        eventually("it is free", async || guarded.client().get("/task/1").await.status == 200).await;
        // HTTP/2 in a tunnel would bypass the routes.
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send(
            "GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade, http2-settings\r\nupgrade: h2c\r\n\
             http2-settings: AAM\r\n\r\n",
        )
        .await;
        let answer = raw.rest().await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && !answer.contains("h2c"), "{answer}");
        let plain = guarded.client().get("/socket").await;
        assert_eq!((plain.status, plain.slug()), (502, "upstream_failed"), "nobody asked for it: {}", plain.text);
    }

    /// Framing that two servers could read differently never reaches the application.
    async fn smuggled_requests_are_refused(kind: Kind) {
        let guarded = Guarded::start(kind, &open()).await;
        let shapes = [
            "POST /task/s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 5\r\n\r\nhello",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
            "POST /task/s HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
            "GET /task/s HTTP/1.1\nhost: x\n\n",
            "GET /task/s HTTP/1.1\r\nhost: x\nx: y\r\n\r\n",
            "GET /task/s HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n",
            "GET /task/s HTTP/1.1\r\n\r\n",
            "GET /task/s HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
            "get /task/s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "GET /task/../secret HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "GET /task/%2e%2e/secret HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ];
        for shape in shapes {
            let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
            raw.send(shape).await;
            let (status, problem) = parsed(&raw.rest().await);
            assert_eq!((status, &problem["type"]), (400, &json!("invalid")), "{shape:?}");
        }
        for shape in ["5\nhello\n0\n\n", "0x5\r\nhello\r\n0\r\n\r\n", " 5\r\nhello\r\n0\r\n\r\n", "5\r\nhelloX\r\n0\r\n\r\n"] {
            let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
            raw.send(format!("POST /count HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{shape}")).await;
            let answer = raw.rest().await;
            assert!(!answer.starts_with("HTTP/1.1 200"), "{shape:?}: {answer}");
        }
        let served = guarded.upstream.stats().await["served"].clone();
        assert!(served["/task/s"].is_null() && served["/secret"].is_null(), "{served}");
        let none = guarded.client().send("CONNECT", "/", "").await;
        assert!(none.status >= 400, "{}", none.text);
    }

    /// Several upstreams: one that is gone or unhealthy is soon not used.
    async fn requests_go_to_healthy_upstreams(kind: Kind) {
        let (one, mut two) = (Upstream::start().await, Upstream::start().await);
        let config = format!(
            "[upstreams]\ndown_ms = 300\nhealth_every_ms = 100\n{LISTEN}[[guard.routes]]\nmatch = {{ path = \"/{{*all}}\" }}\n\
             upstream = [\"http://{}\", \"http://{}\"]\nhealth = \"/status/200\"\n",
            one.good, two.good
        );
        let proxy = before(&one, &database(kind).await, &config).await;
        let client = proxy.guarded();
        let all = |count: u64| {
            let client = client.clone();
            async move {
                for _ in 0..count {
                    assert_eq!(client.get("/task/1").await.status, 200);
                }
            }
        };
        all(60).await;
        let (first, second) = (one.served("/task/1").await, two.served("/task/1").await);
        assert!(first + second == 60 && first >= 5 && second >= 5, "{first} and {second}");
        let address = two.good.to_string();
        two.kill();
        all(40).await;
        assert_eq!(one.served("/task/1").await, first + 40, "none was lost");
        eventually("the log tells", async || proxy.log().contains("an upstream is not well")).await;
        let two = Upstream::at(&address).await;
        eventually("it is asked again", async || {
            all(5).await;
            two.served("/task/1").await > 0
        })
        .await;
        one.signal(Signal::STOP);
        eventually("it is known to hang", async || proxy.log().matches("an upstream is not well").count() > 1).await;
        all(20).await;
        one.signal(Signal::CONT);
    }

    /// An upstream gets no more concurrent requests than its limit; afterwards it is free again.
    async fn concurrent_requests_to_an_upstream_are_bounded(kind: Kind) {
        let config = "[upstreams]\nmax_requests = 3\n".to_owned() + &open();
        let guarded = Guarded::start(kind, &config).await;
        let busy: Vec<_> = (0..3).map(|_| guarded.send("GET", "/task/1?ms=1000", &[])).collect();
        guarded.until_served("/task/1", 3).await;
        let over = guarded.client().get("/task/1").await;
        assert_eq!((over.status, over.slug(), over.number("bound")), (503, "overloaded", 3), "{}", over.text);
        for busy in busy {
            assert_eq!(busy.await.unwrap().status, 200);
        }
        let none = guarded.proxy.guarded().get("/status/200").await;
        assert_eq!(none.status, 200);
    }
}
