//! The rules on each path of each listener, on leases, on keys, and their changes.

use lockkeeper::fronts::routes::Needs;
use mysql_async::prelude::Queryable;

use super::*;

/// A request that the path serves, if the client may make it. Its resources belong to `billing`.
fn body(path: &str, lease_id: &str) -> Value {
    match path {
        "/v1/renew" | "/v1/release" | "/v1/once/finish" => json!({"lease_id": lease_id}),
        "/v1/versions/commit" => json!({"resource": "orders/v", "version": 0}),
        _ => json!({"resource": "orders/1"}),
    }
}

fn filled(path: &str) -> String {
    path.replace("{name...}", "orders/1").replace("{key...}", "orders/1").replace("{name}", "default")
}

on_both! {
    /// Each path of the routers' own tables, for a client without credentials, with unknown and ended ones, and for
    /// another tenant.
    async fn every_path_refuses_clients_without_a_right(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let tokens = &secured.tokens;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let id = lease["lease_id"].as_str().unwrap();
        let (api, admin) = (secured.proxy.client(), secured.proxy.admin());
        let paths = api::ROUTES.iter().map(|route| (&api, route.methods, route.path, route.needs));
        let of_admin = admin::ROUTES.iter().map(|route| (&admin, route.methods, route.path, route.needs));
        for (listener, methods, path, needs) in paths.chain(of_admin) {
            let method = methods.allow().split(',').next().unwrap();
            let body = if method == "GET" { String::new() } else { body(path, id).to_string() };
            let send = async |client: Client| client.send(method, &filled(path), body.clone()).await;
            let nobody = send(listener.clone()).await;
            if needs == Needs::Nothing {
                assert!(["/live", "/ready"].contains(&path), "{path} asks nobody for credentials");
                assert_eq!(nobody.status, 200, "{path}: {}", nobody.text);
                continue;
            }
            let unknown = new_token();
            for token in [None, Some(&unknown), Some(&tokens.ended)] {
                let client = token.map_or(listener.clone(), |token| listener.with_token(&token.token));
                let answer = send(client).await;
                assert_eq!((answer.status, answer.slug()), (401, "unauthenticated"), "{path}: {}", answer.text);
                assert!(answer.headers.contains_key("www-authenticate"), "{path}");
            }
            if path == "/v1/watch" || path.starts_with("/v1/locks") && method == "GET" {
                continue; // Below: they show what the client may read.
            }
            is_forbidden(&send(listener.with_token(&tokens.other.token)).await);
        }
        let other = secured.client(&tokens.other);
        assert_eq!(other.get("/v1/locks").await.json["locks"], json!([]));
        assert_eq!(other.get("/v1/locks/orders/1").await.status, 404);
        assert_eq!(secured.billing().renew(&lease).await.status, 200, "nobody has touched the lease");
    }

    async fn the_listener_of_health_has_nothing_else(kind: Kind) {
        let secured = Secured::start(kind, "[health]\nlisten = \"127.0.0.1:0\"\n").await;
        let health = secured.proxy.health();
        for path in ["/live", "/ready", "/metrics"] {
            assert_eq!(health.get(path).await.status, 200, "{path}");
        }
        let operator = health.with_token(&secured.tokens.operator.token);
        for path in ["/v1/policies", "/v1/fleet", "/v1/locks", "/v1/watch", "/v1/locks/orders/1"] {
            for method in ["GET", "DELETE", "PUT", "POST"] {
                // With an audit log or not, no other path leads anywhere.
                let answer = operator.send(method, path, "").await;
                assert_eq!(answer.status, 404, "{method} {path}: {}", answer.text);
            }
        }
    }

    /// The header may be meant for a proxy in between.
    async fn a_proxy_without_principals_ignores_credentials(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        proxy.until_ready().await;
        let headers = [("authorization", "Digest username=\"a\""), ("authorization", "Bearer x")];
        for headers in [&headers[..1], &headers[..]] {
            let answer = proxy.client().send_with("GET", "/v1/locks", headers, "").await;
            assert_eq!(answer.status, 200, "{}", answer.text);
        }
    }

    /// A lease id in the wrong hands is of no use, even to a client with the same rights.
    async fn a_lease_belongs_to_the_client_that_took_it(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        let lease = billing.lease("orders/1", 60_000).await;
        is_forbidden(&shipping.renew(&lease).await);
        is_forbidden(&shipping.release(&lease).await);
        is_forbidden(&shipping.post("/v1/hold", &json!({"lease_id": lease["lease_id"]})).await);
        assert_eq!(billing.renew(&lease).await.status, 200);
        let shown = billing.show("orders/1").await;
        assert_eq!(shown["holders"][0]["principal"], "billing", "{shown}");
        assert_eq!(billing.release(&lease).await.status, 200);
    }

    /// A lease id that was altered is of no use either, and does not affect what the proxy knows of the lease.
    async fn an_altered_lease_id_affects_no_lease_of_another_client(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        let (mut held, granted) = billing.hold(&json!({"resource": "orders/1", "ttl_ms": 3_000})).await;
        let id = granted["lease_id"].as_str().unwrap().to_owned();
        let (head, key) = id.rsplit_once('-').unwrap();
        // An invented key of another space before the key; another key; another token.
        let altered = [
            format!("{head}-a~IQ.{key}"),
            format!("{head}-b3JkZXJzLzI"),
            format!("{}-{key}", head.replacen(&granted["token"].to_string(), "7", 1)),
        ];
        for id in &altered {
            for path in ["/v1/renew", "/v1/release", "/v1/once/finish"] {
                let answer = shipping.post(path, &json!({"lease_id": id})).await;
                assert!([403, 410, 503].contains(&answer.status), "{path} {id}: {}", answer.text);
            }
        }
        let taken = shipping.acquire(json!({"resource": "orders/1"})).await;
        assert_eq!(taken.slug(), "contended", "{}", taken.text);
        let next = held.json().await.expect("a line");
        assert_eq!(next["event"], "renewed", "{next}");
    }

    /// On another proxy of the store, which knows the lease from the store alone.
    async fn a_lease_belongs_to_its_client_on_every_proxy(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let second = Proxy::with(secured.settings.clone()).await;
        second.until_ready().await;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let with = |token: &NewToken| second.client().with_token(&token.token);
        is_forbidden(&with(&secured.tokens.shipping).renew(&lease).await);
        is_forbidden(&with(&secured.tokens.shipping).release(&lease).await);
        assert_eq!(with(&secured.tokens.billing).renew(&lease).await.status, 200);
        assert_eq!(with(&secured.tokens.billing).release(&lease).await.status, 200);
    }

    async fn a_repeated_request_id_of_another_client_gets_no_lease(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let body = json!({"resource": "orders/1", "owner": "w", "request_id": "r"});
        assert_eq!(secured.billing().acquire(body.clone()).await.status, 200);
        let stolen = secured.shipping().acquire(body.clone()).await;
        assert_eq!((stolen.status, stolen.slug()), (409, "contended"), "{}", stolen.text);
        // Another client can use the same id for its own request.
        let own = json!({"resource": "orders/2", "request_id": "r"});
        let operator = secured.client(&secured.tokens.operator);
        assert_eq!(operator.acquire(own).await.status, 200);
        assert_eq!(secured.billing().acquire(body).await.status, 200);
    }

    async fn an_owner_name_alone_re_enters_no_lease_of_another_client(kind: Kind) {
        let policy = "[policies.default]\npath = \"builtin:default\"\nsettings = { reentrant = true }\n";
        let secured = Secured::start(kind, policy).await;
        let body = json!({"resource": "orders/1", "owner": "worker-1"});
        let first = secured.billing().acquire(body.clone()).await;
        assert_eq!(first.status, 200, "{}", first.text);
        assert_eq!(secured.shipping().acquire(body.clone()).await.slug(), "contended");
        let again = secured.billing().acquire(body).await;
        assert_eq!((again.status, &again.json["lease_id"]), (200, &first.json["lease_id"]), "{}", again.text);
    }

    /// The policy makes two keys of the resource, one of which the client may not lock.
    async fn the_keys_of_a_policy_need_the_right_as_well(kind: Kind) {
        let policy = "[policies.default]\npath = \"builtin:default\"\nsettings = { separator = \"+\" }\n";
        let secured = Secured::start(kind, policy).await;
        let billing = secured.billing();
        is_forbidden(&billing.acquire(json!({"resource": "orders/1+invoices/1"})).await);
        is_forbidden(&billing.acquire(json!({"resource": "orders/1+orders/secret/1"})).await);
        is_forbidden(&billing.acquire(json!({"resource": "orders/secret"})).await);
        assert_eq!(billing.acquire(json!({"resource": "orders/1+orders/2"})).await.status, 200);
        // A client that may read one of the keys does not learn the name of the whole resource.
        let operator = secured.client(&secured.tokens.operator);
        assert_eq!(operator.acquire(json!({"resource": "invoices/9+orders/7"})).await.status, 200);
        for path in ["/v1/locks/orders%2F7", "/v1/locks?prefix=orders/7"] {
            let (seen, whole) = (billing.get(path).await, operator.get(path).await);
            assert!(seen.status == 200 && seen.text.contains("\"holders\":[{"), "{}", seen.text);
            assert!(!seen.text.contains("invoices"), "{}", seen.text);
            assert!(whole.text.contains("\"resource\":\"invoices/9+orders/7\""), "{}", whole.text);
        }
    }

    async fn lists_and_events_show_what_the_client_may_read(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let operator = secured.client(&secured.tokens.operator);
        let auditor = secured.client(&secured.tokens.auditor);
        let mut events = auditor.stream("GET", "/v1/watch", "").await;
        assert_eq!(events.line().await.as_deref(), Some(": watching"));
        for resource in ["invoices/1", "orders/1", "orders/2", "payments/1"] {
            operator.lease(resource, 60_000).await;
        }
        let names = |list: &Response| {
            let locks = list.json["locks"].as_array().unwrap().clone();
            locks.iter().map(|lock| lock["key"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(&auditor.get("/v1/locks").await), ["orders/1", "orders/2"]);
        let page = auditor.get("/v1/locks?limit=1").await;
        assert_eq!((names(&page), &page.json["next"]), (vec!["orders/1".to_owned()], &json!("orders/1")));
        assert_eq!(names(&auditor.get("/v1/locks?limit=1&after=orders/1").await), ["orders/2"]);
        assert_eq!(auditor.get("/v1/locks/payments/1").await.status, 404);
        assert_eq!(auditor.get("/v1/locks/orders/1").await.status, 200);
        let mut seen = Vec::new();
        while seen.len() < 2 {
            let line = events.line().await.expect("the stream goes on");
            if let Some(data) = line.strip_prefix("data: ") {
                let event: Value = serde_json::from_str(data).unwrap();
                seen.push(event["key"].as_str().unwrap().to_owned());
            }
        }
        assert_eq!(seen, ["orders/1", "orders/2"]);
    }

    async fn the_pages_of_a_list_have_what_each_rule_of_the_client_allows(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (other, operator) = (secured.client(&secured.tokens.other), secured.client(&secured.tokens.operator));
        for (client, resource) in [
            (&secured.shipping(), "orders/1"),
            (&operator, "orders/secret"),
            (&operator, "others"),
            (&other, "other/2"),
            (&other, "other/1"),
            (&secured.shipping(), "orders/2"),
            (&operator, "a"),
        ] {
            client.lease(resource, 60_000).await;
        }
        let one = "name = \"billing\"\nroles = [\"orders\"]";
        let both = "name = \"billing\"\nroles = [\"other\", \"orders\"]";
        write(&secured.file(), &secured.tokens.to_toml().replace(one, both));
        let billing = secured.billing();
        let listed = async |prefix: &str, limit: usize| {
            let (mut keys, mut after) = (Vec::new(), String::new());
            loop {
                let page = billing.get(&format!("/v1/locks?prefix={prefix}&limit={limit}&after={after}")).await.json;
                let found: Vec<String> = page["locks"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|lock| lock["key"].as_str().unwrap().to_owned())
                    .collect();
                assert!(found.len() <= limit, "{page}");
                keys.extend(found);
                match page["next"].as_str() {
                    Some(next) => after = next.to_owned(),
                    None => return keys,
                }
            }
        };
        eventually("the rules are applied", async || listed("", 10).await.len() == 4).await;
        for limit in [1, 2, 3, 4, 100] {
            assert_eq!(listed("", limit).await, ["orders/1", "orders/2", "other/1", "other/2"], "{limit}");
            assert_eq!(listed("other", limit).await, ["other/1", "other/2"], "{limit}");
            assert_eq!(listed("orders/2", limit).await, ["orders/2"], "{limit}");
            assert_eq!(listed("a", limit).await, [""; 0], "{limit}");
        }
    }

    /// A list goes past the keys that its client may not read, which may be all of them.
    async fn a_list_reads_a_bounded_number_of_keys_that_its_client_may_not_read(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let operator = secured.client(&secured.tokens.operator);
        for resource in ["orders/1", "orders/secret", "orders/z"] {
            operator.lease(resource, 600_000).await;
        }
        let mut conn = mysql_async::Conn::from_url(&secured.settings.url).await.expect("a connection");
        let copies = "INSERT INTO lockkeeper_lease SELECT CONCAT(k, '/', a.n, b.n, c.n, d.n, e.n), token, until_us, revision, \
             state FROM lockkeeper_lease, tens a, tens b, tens c, tens d, tens e WHERE k = 'orders/secret'";
        let digits: Vec<String> = (0..10).map(|n| format!("({n})")).collect();
        for statement in ["CREATE TABLE tens (n INT)", &format!("INSERT INTO tens VALUES {}", digits.join(",")), copies] {
            conn.query_drop(statement).await.expect("the statement is executed");
        }
        let billing = secured.billing();
        let page = billing.get("/v1/locks").await;
        assert_eq!((page.status, &page.json["next"]), (200, &json!("orders/1")), "{}", page.text);
        let rest = billing.get("/v1/locks?after=orders/1").await;
        assert_eq!((rest.status, &rest.json["field"]), (400, &json!("prefix")), "{}", rest.text);
        assert!(rest.text.contains("longer prefix"), "{}", rest.text);
        let last = billing.get("/v1/locks?prefix=orders/z").await;
        assert_eq!(last.json["locks"][0]["key"], "orders/z", "{}", last.text);
    }

    async fn stored_values_need_a_right_of_their_own(kind: Kind) {
        let policy = "[policies.default]\npath = \"builtin:default\"\nsettings = { primitive = \"version\" }\n";
        let secured = Secured::start(kind, policy).await;
        let billing = secured.billing();
        let read = billing.post("/v1/versions/read", &json!({"resource": "orders/v"})).await;
        let version = read.number("version");
        let body = json!({"resource": "orders/v", "version": version, "value": {"secret": 1}});
        assert_eq!(billing.post("/v1/versions/commit", &body).await.status, 200);
        assert_eq!(billing.show("orders/v").await["kept"]["value"], json!({"secret": 1}));
        let auditor = secured.client(&secured.tokens.auditor);
        let shown = auditor.get("/v1/locks/orders/v").await;
        assert_eq!(shown.status, 200, "{}", shown.text);
        assert!(!shown.text.contains("secret"), "{}", shown.text);
        is_forbidden(&auditor.post("/v1/versions/read", &json!({"resource": "orders/v"})).await);
    }

    /// The keys of a waiter, the values of its labels, and the reason why it waits are shown as far as the reader's
    /// rights go.
    async fn waiters_are_shown_as_far_as_the_rights_go(kind: Kind) {
        let policy = "[policies.default]\npath = \"builtin:default\"\n\
            settings = { separator = \"+\", rank_label = \"rank\" }\n";
        let secured = Secured::start(kind, policy).await;
        let operator = secured.client(&secured.tokens.operator);
        let held = operator.acquire(json!({"resource": "invoices/9", "owner": "hidden", "ttl_ms": 60_000})).await;
        assert_eq!(held.status, 200, "{}", held.text);
        let waiting = tokio::spawn({
            let body = json!({"resource": "invoices/9+orders/7", "owner": "both", "wait_ms": 60_000,
                "labels": {"rank": "4711"}});
            let operator = operator.clone();
            async move { operator.acquire(body).await }
        });
        operator.until_queued("orders/7", 1).await;
        let waiter = async |client: &Client| client.show("orders/7").await["queue"][0].clone();
        eventually("the store has answered", async || waiter(&operator).await["why"]["reason"] == "held").await;
        let whole = waiter(&operator).await;
        assert_eq!((&whole["why"]["reason"], &whole["why"]["key"]), (&json!("held"), &json!("invoices/9")), "{whole}");
        assert_eq!((&whole["why"]["holder"]["owner"], &whole["plan"]["reads"][0]["value"]),
            (&json!("hidden"), &json!("invoices/9+orders/7")), "{whole}");

        // It may read values of `orders/`, but not the other key.
        let part = waiter(&secured.billing()).await;
        assert_eq!((&part["owner"], &part["plan"]["keys"]), (&json!("both"), &json!(["orders/7"])), "{part}");
        assert_eq!(part["why"], json!({"reason": "other_key", "text": "one of its other keys is not free"}), "{part}");
        assert!(part.to_string().contains("4711"), "{part}");
        assert!(!part.to_string().contains("invoices") && !part.to_string().contains("hidden"), "{part}");

        // It may read no values.
        let least = waiter(&secured.client(&secured.tokens.auditor)).await;
        let reads = least["plan"]["reads"].as_array().unwrap();
        assert!(reads.contains(&json!({"part": "label(rank)"})), "{least}");
        assert!(reads.contains(&json!({"part": "name"})), "{least}");
        assert_eq!(secured.client(&secured.tokens.other).get("/v1/locks/orders/7").await.status, 404);
        waiting.abort();
    }

    /// The rules change while connections live.
    async fn streams_and_waiters_end_when_their_right_is_withdrawn(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let billing = secured.billing();
        let (mut held, _) = billing.hold(&json!({"resource": "orders/1", "ttl_ms": 60_000})).await;
        let mut events = billing.stream("GET", "/v1/watch", "").await;
        assert_eq!(events.line().await.as_deref(), Some(": watching"));
        let waiter = secured.billing();
        let waiting = tokio::spawn(async move {
            waiter.acquire(json!({"resource": "orders/1", "wait_ms": 600_000})).await
        });
        billing.until_queued("orders/1", 1).await;
        let without = secured.tokens.to_toml().replace("name = \"billing\"\nroles = [\"orders\"]", "name = \"billing\"");
        write(&secured.file(), &without);
        is_forbidden(&waiting.await.unwrap());
        let lost = held.json().await.expect("a last line");
        assert_eq!(lost["event"], "lost", "{lost}");
        is_forbidden(&billing.acquire(json!({"resource": "orders/2"})).await);
        let log = secured.proxy.log();
        assert!(log.contains("the principals were replaced"), "{log}");
        // Without the token, the client is unknown.
        let unknown = without.replace(&secured.tokens.billing.sha256, &new_token().sha256);
        write(&secured.file(), &unknown);
        eventually("the token is unknown", async || billing.get("/v1/locks").await.status == 401).await;
        eventually("the events end", async || events.line().await.is_none()).await;
    }

    /// A client that asks too much gets 429, and another one is served.
    /// The lease belongs to the client, which can give it up. It cannot keep it, and stores nothing under it.
    async fn a_lease_can_be_released_and_not_renewed_after_the_right_to_it_is_withdrawn(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let text = secured.tokens.to_toml();
        let billing = "name = \"billing\"\nroles = [\"orders\"]";
        assert!(text.contains(billing));
        write(&secured.file(), &text.replace(billing, "name = \"billing\"\nroles = []"));
        let client = secured.billing();
        eventually("the right is withdrawn", async || {
            client.acquire(json!({"resource": "orders/2"})).await.status == 403
        })
        .await;
        is_forbidden(&client.renew(&lease).await);
        let finish = json!({"lease_id": lease["lease_id"], "outcome": 1}).to_string();
        is_forbidden(&client.send("POST", "/v1/once/finish", finish).await);
        is_forbidden(&secured.shipping().release(&lease).await);
        let nobody = secured.proxy.client().release(&lease).await;
        assert_eq!((nobody.status, nobody.slug()), (401, "unauthenticated"));
        assert_eq!(secured.shipping().acquire(json!({"resource": "orders/1"})).await.status, 409);
        assert_eq!(client.release(&lease).await.status, 200);
        secured.shipping().lease("orders/1", 1_000).await;
    }

    async fn a_principal_is_held_to_its_limits(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (billing, shipping) = (secured.billing(), secured.shipping());
        let lease = billing.lease("orders/1", 60_000).await;
        secured.limit("in_progress = 2").await;
        let over = async || {
            let answer = billing.get("/v1/locks").await;
            (answer.status == 429).then_some(answer)
        };
        let mut streams = Vec::new();
        for _ in 0..2 {
            streams.push(billing.stream("GET", "/v1/watch", "").await);
        }
        eventually("the streams count", async || over().await.is_some()).await;
        let refused = over().await.unwrap();
        assert_eq!((refused.slug(), refused.number("bound")), ("too_many_requests", 2), "{}", refused.text);
        assert_eq!(refused.json["limit"], "in_progress", "{}", refused.text);
        assert!(refused.headers.contains_key("retry-after"));
        assert_eq!(shipping.get("/v1/locks").await.status, 200);
        drop(streams);
        eventually("the streams no longer count", async || over().await.is_none()).await;
        secured.limit("per_second = 3").await;
        eventually("the rate counts", async || over().await.is_some()).await;
        assert_eq!(shipping.get("/v1/locks").await.status, 200);
        eventually("a second later it may ask again", async || over().await.is_none()).await;
        // What keeps or gives up a lease does not count.
        for _ in 0..10 {
            assert_eq!(billing.renew(&lease).await.status, 200);
        }
        assert_eq!(billing.release(&lease).await.status, 200);
    }

    async fn a_broken_file_changes_nothing_and_is_reported(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let good = secured.tokens.to_toml();
        let hidden = "names `others`";
        write(&secured.file(), &good.replace("roles = [\"other\"]", "roles = [\"others\"]"));
        let ready = async || secured.proxy.admin().get("/ready").await;
        eventually("the fault is reported", async || ready().await.text.contains("file of principals")).await;
        assert!(secured.proxy.log().contains(hidden) && !ready().await.text.contains(hidden));
        assert_eq!(ready().await.status, 200);
        secured.billing().lease("orders/1", 1_000).await;
        write(&secured.file(), &good);
        eventually("the fault is gone", async || !ready().await.text.contains("file of principals")).await;
    }

    async fn a_file_of_principals_that_is_gone_is_reported(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let text = std::fs::read_to_string(secured.file()).unwrap();
        std::fs::remove_file(secured.file()).unwrap();
        let ready = async || secured.proxy.admin().get("/ready").await;
        eventually("the loss is reported", async || ready().await.text.contains("file of principals")).await;
        assert_eq!((ready().await.status, trouble(&secured, "principals").await), (200, 1.0));
        secured.billing().lease("orders/1", 1_000).await;
        // The same contents.
        write(&secured.file(), &text);
        eventually("the file is back", async || !ready().await.text.contains("file of principals")).await;
        assert_eq!(trouble(&secured, "principals").await, 0.0);
    }
}

#[test]
fn a_proxy_does_not_start_with_a_file_that_others_can_read() {
    let dir = folder();
    let file = dir.path().join("auth.toml");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    std::fs::write(dir.path().join("config.toml"), "[auth]\nfile = \"auth.toml\"\n").unwrap();
    for args in [&["serve"][..], &["serve", "--check"]] {
        let (code, said) = ending(lockkeeper().args(args).current_dir(dir.path()).output().unwrap());
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("has the mode 644") && said.contains("chmod 600"), "{said}");
    }
}
