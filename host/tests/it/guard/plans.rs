//! The locks of requests.

use super::*;

on_both! {
    async fn requests_with_the_same_name_run_one_at_a_time(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/task/{id}", "resource = \"jobs/{id}\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &config).await;
        let client = guarded.client();
        let begun = Instant::now();
        let asks = (0..12).map(|n| {
            let client = client.clone();
            async move { client.send("POST", &format!("/task/{}?ms=40", n % 2), "x").await }
        });
        let answers = join_all(asks).await;
        assert!(answers.iter().all(|answer| (answer.status, &*answer.text) == (200, "done")), "{answers:?}");
        assert!(begun.elapsed() >= Duration::from_millis(240), "six after each other");
        for path in ["/task/0", "/task/1"] {
            assert_eq!((guarded.upstream.served(path).await, guarded.upstream.together(path).await), (6, 1));
        }
        // All spellings of the path have the same lock.
        let held = guarded.send("POST", "/task/7?ms=400", &[]);
        guarded.until_served("/task/7", 1).await;
        let other = client.send("POST", "/task//%37/?ms=1", "").await;
        assert_eq!(other.status, 200);
        assert_eq!((held.await.unwrap().status, guarded.upstream.served("/task/7").await), (200, 1));
        eventually("it is free", async || {
            guarded.proxy.client().show("jobs/7").await["holders"].as_array().is_none_or(Vec::is_empty)
        })
        .await;
        assert_eq!(guarded.outcomes("locked").await, 14.0);
        let queued = guarded.proxy.metric("lockkeeper_acquire_total", &["granted"]).await;
        assert!(queued >= 14.0, "{queued}");
    }

    /// A request that an application could take for the locked request does not reach it by a route without a lock.
    async fn no_spelling_of_a_request_bypasses_its_lock(kind: Kind) {
        let config = LISTEN.to_owned()
            + &route("/task/{id:int}", "resource = \"jobs/{id}\"").replace("path =", "method = \"POST\", path =")
            + &route("/{*rest}", "").replace("\"default\"", "\"none\"");
        let guarded = Guarded::start(kind, &config).await;
        let held = guarded.send("POST", "/task/7?ms=3000", &[]);
        guarded.until_served("/task/7", 1).await;
        let client = guarded.client();
        for path in ["/TASK/7", "/task/7/", "/Task//%37"] {
            let answer = client.send("POST", path, "").await;
            assert_eq!((answer.status, answer.slug()), (423, "contended"), "{path}: {}", answer.text);
        }
        for path in [
            "/task/7;x", "/task;x/7", "//x/task/7", "/task%2F7", "/task/07", "/task/7.json", "/task/7%00", "/task/7%0A",
            "/task/%u0037", "/task/%2537", "/task/7%3Bx",
        ] {
            let answer = client.send("POST", path, "").await;
            assert_eq!((answer.status, answer.slug()), (400, "invalid"), "{path}: {}", answer.text);
        }
        assert_eq!(held.await.unwrap().status, 200);
        assert_eq!(guarded.upstream.served("/task/7").await, 1);
        // A GET by its request line stays a GET for the application.
        let misleading = [
            ("x-http-method-override", "POST"), ("x-original-url", "/task/7"), ("idempotency_key", "other"), ("x-a", "1"),
        ];
        let seen = client.send_with("GET", "/echo", &misleading, "").await.json;
        let names = ["x-http-method-override", "x-original-url", "idempotency_key", "x-a"];
        let passed: Vec<&&str> = names.iter().filter(|name| !seen["headers"][**name].is_null()).collect();
        assert_eq!(passed, [&"x-a"], "{seen}");
        let kept = LISTEN.to_owned() + "keep_headers = [\"idempotency_key\"]\n" + &route("/{*rest}", "");
        let guarded = Guarded::start(kind, &kept).await;
        let seen = guarded.client().send_with("GET", "/echo", &misleading, "").await.json;
        assert_eq!(seen["headers"]["idempotency_key"], json!(["other"]));
    }

    async fn a_request_that_does_not_wait_is_refused_at_once(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/task/{id}", "resource = \"jobs/{id}\"");
        let guarded = Guarded::start(kind, &config).await;
        let held = guarded.send("POST", "/task/1?ms=1500", &[]);
        guarded.until_served("/task/1", 1).await;
        let refused = guarded.client().send("POST", "/task/1", "").await;
        assert_eq!((refused.status, refused.slug()), (423, "contended"), "{}", refused.text);
        assert_eq!(refused.headers["content-type"], "application/problem+json");
        assert!(refused.headers.contains_key("retry-after") && refused.headers.contains_key("x-request-id"));
        assert_eq!(refused.json["status"], 423);
        assert!(!refused.text.contains("127.0.0.1"), "who holds it is not for strangers: {}", refused.text);
        assert_eq!(held.await.unwrap().status, 200);
        assert_eq!(guarded.upstream.served("/task/1").await, 1, "the application was not asked");
        assert_eq!(guarded.client().send("POST", "/task/1", "").await.status, 200, "it is free at once");
        assert_eq!(guarded.outcomes("contended").await, 1.0);
    }

    async fn readers_run_together_and_writers_alone(kind: Kind) {
        let shared = route("/task/{id}", "resource = \"doc/{id}\"\nwait_ms = 20_000\nmode = \"shared\"")
            .replace("path =", "method = [\"GET\", \"HEAD\"], path =");
        let config = LISTEN.to_owned() + &shared + &route("/task/{id}", "resource = \"doc/{id}\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &config).await;
        let readers: Vec<_> = (0..3).map(|_| guarded.send("GET", "/task/1?ms=600", &[])).collect();
        eventually("all read", async || guarded.upstream.together("/task/1").await == 3).await;
        let writer = guarded.send("PUT", "/task/1?ms=50", &[]);
        assert_eq!(writer.await.unwrap().status, 200);
        assert!(readers.iter().all(JoinHandle::is_finished), "the writer came after them");
        assert_eq!(guarded.upstream.together("/task/1").await, 3, "and was alone");
    }

    async fn permits_bound_the_concurrent_requests_of_an_upstream(kind: Kind) {
        let config = LISTEN.to_owned()
            + &route("/task/{id}", "resource = \"backend\"\nwait_ms = 20_000\nmode = { permits = 1 }")
            + "[policies.default]\npath = \"builtin:default\"\nsettings = { permits = 2 }\n";
        let guarded = Guarded::start(kind, &config).await;
        let asks: Vec<_> = (0..8).map(|_| guarded.send("GET", "/task/1?ms=60", &[])).collect();
        for ask in asks {
            assert_eq!(ask.await.unwrap().status, 200);
        }
        assert_eq!(guarded.upstream.together("/task/1").await, 2);
    }

    async fn a_request_can_be_named_by_its_header_query_body_or_path(kind: Kind) {
        let mut config = LISTEN.to_owned();
        for (path, more) in [
            ("/echo/header", "resource = \"h/{header.X-Cart}\""),
            ("/echo/query", "resource = \"q/{query.sku}\""),
            ("/echo/json", "resource = \"j/{json.order.id}\"\nsee = { body_bytes = 100 }"),
            ("/echo/{*all}", "resource = \"{method} {path}\"\nlabels = { tenant = \"{header.x-tenant}\" }"),
        ] {
            config += &route(path, more);
        }
        let guarded = Guarded::start(kind, &config).await;
        let client = guarded.client();
        let order = "{\"order\": {\"id\": 42}, \"note\": \"x\"}";
        let cases = [
            ("/echo/header", [("x-cart", "a,b")], "", "h/a%2Cb"),
            ("/echo/query?sku=1&x=2", [("x-a", "")], "", "q/1"),
            ("/echo/json", [("x-a", "")], order, "j/42"),
            ("/echo/any/thing", [("x-tenant", "t")], "", "PUT%20/echo/any/thing"),
        ];
        let mut last = 0;
        for (path, headers, body, key) in cases {
            let answer = client.send_with("PUT", path, &headers, body.to_owned()).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text);
            let seen = &answer.json["headers"];
            assert_eq!(seen["lock-key"], json!([key]), "{path}");
            let token: u64 = seen["lock-token"][0].as_str().unwrap().parse().unwrap();
            assert!(token > 0, "{path}");
            assert_eq!(answer.json["body"], body, "{path}");
            last = last.max(token);
        }
        assert!(last > 0);
        for (path, field) in [
            ("/echo/header", "header.x-cart"),
            ("/echo/query", "query.sku"),
            ("/echo/json", "json.order.id"),
            ("/echo/x", "header.x-tenant"),
        ] {
            let answer = client.send("PUT", path, "{}").await;
            assert_eq!((answer.status, answer.slug(), &answer.json["field"]), (400, "invalid", &json!(field)));
        }
        let form = client.send("PUT", "/echo/json", "order.id=42").await;
        assert!(form.text.contains("json.order.id: is missing") && form.text.contains("not JSON"), "{}", form.text);
        let twice = client.send("PUT", "/echo/query?sku=1&sku=2", "").await;
        assert_eq!(twice.status, 400, "{}", twice.text);
        // The body after the part that is read could name another order.
        let long = format!("{{\"order\": {{\"id\": 42}}, \"note\": \"{}\"}}", "x".repeat(50_000));
        let long = client.send("PUT", "/echo/json", long).await;
        assert_eq!((long.status, long.slug(), long.number("bound")), (413, "too_large", 100), "{}", long.text);
        for number in ["42.0", "4.2e1", "-0"] {
            let spelt = client.send("PUT", "/echo/json", format!("{{\"order\": {{\"id\": {number}}}}}")).await;
            assert_eq!(spelt.status, 400, "one order would have several names: {}", spelt.text);
        }
    }

    /// The token that the application receives increases with every request, and clients cannot choose it.
    async fn the_application_receives_the_fencing_token(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/echo", "resource = \"r\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &config).await;
        let lies = [("lock-token", "999999"), ("lock-key", "mine"), ("lock_token", "9"), ("lock-status", "x")];
        let mut last = 0;
        for _ in 0..5 {
            let answer = guarded.client().send_with("GET", "/echo", &lies, "").await;
            let seen = &answer.json["headers"];
            assert_eq!((&seen["lock-key"], &seen["lock-status"]), (&json!(["r"]), &Value::Null), "{seen}");
            assert!(seen["lock_token"].is_null() && seen["lock-token"].as_array().unwrap().len() == 1);
            let token: u64 = seen["lock-token"][0].as_str().unwrap().parse().unwrap();
            assert!(token > last, "{token} after {last}");
            last = token;
        }
    }

    async fn lower_ranks_go_first_and_a_lock_may_outlast_its_request(kind: Kind) {
        let config = LISTEN.to_owned()
            + &route("/task/{id}", "resource = \"jobs\"\nwait_ms = 20_000\nlabels = { rank = \"{query.rank}\" }")
            + "[policies.default]\npath = \"builtin:default\"\n\
               settings = { rank_label = \"rank\", lock_at_least_ms = 700 }\n";
        let guarded = Guarded::start(kind, &config).await;
        let begun = Instant::now();
        let first = guarded.send("POST", "/task/first?rank=0", &[]);
        guarded.until_served("/task/first", 1).await;
        let api = guarded.proxy.client();
        let late = guarded.send("POST", "/task/late?rank=5", &[]);
        api.until_queued("jobs", 1).await;
        let soon = guarded.send("POST", "/task/soon?rank=1", &[]);
        api.until_queued("jobs", 2).await;
        assert_eq!(first.await.unwrap().status, 200);
        assert_eq!(soon.await.unwrap().status, 200);
        assert!(begun.elapsed() >= Duration::from_millis(700), "kept after its request");
        assert_eq!(guarded.upstream.served("/task/late").await, 0);
        assert_eq!(late.await.unwrap().status, 200);
        assert!(begun.elapsed() >= Duration::from_millis(1_400));
    }

    /// A guarded request and a request of the API use the same lock.
    async fn guarded_requests_and_the_api_exclude_each_other(kind: Kind) {
        let config = LISTEN.to_owned() + &route("/task/{id}", "resource = \"jobs/{id}\"");
        let guarded = Guarded::start(kind, &config).await;
        let api = guarded.proxy.client();
        let lease = api.lease("jobs/1", 20_000).await;
        assert_eq!(guarded.client().send("POST", "/task/1", "").await.status, 423);
        assert_eq!(api.release(&lease).await.status, 200);
        let held = guarded.send("POST", "/task/1?ms=800", &[]);
        guarded.until_served("/task/1", 1).await;
        let refused = api.acquire(json!({"resource": "jobs/1"})).await;
        assert_eq!((refused.status, refused.slug()), (409, "contended"));
        assert!(refused.json["holder"]["owner"].as_str().unwrap().starts_with("127.0.0.1/"), "{}", refused.text);
        assert_eq!(held.await.unwrap().status, 200);
        let forged = api.acquire(json!({"resource": "r", "labels": {":path": "/"}})).await;
        assert_eq!((forged.status, forged.slug()), (400, "invalid"), "{}", forged.text);
    }
}
