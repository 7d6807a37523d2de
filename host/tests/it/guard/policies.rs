//! Policies for guarded routes: several keys for one request, and the example orders-policy.

use tempfile::TempDir;

use super::*;
use crate::harness::folder;
use crate::policies::{BASKET, ORDERS};

/// A proxy whose policy `own` is this component, in the folder.
async fn with_policy(kind: Kind, component: &[u8], routes: &str) -> (Guarded, TempDir) {
    let dir = folder();
    let file = dir.path().join("own.wasm");
    std::fs::write(&file, component).expect("a file of our own");
    let policy = format!("[policies.own]\npath = \"{}\"\n", file.display());
    let routes = routes.replace("policy = \"default\"", "policy = \"own\"");
    (Guarded::start(kind, &format!("{policy}{LISTEN}{routes}")).await, dir)
}

/// Routes for an order and its sub-paths. A request that says that it is patient waits for the lock.
fn orders() -> String {
    const SEEN: &str = "see = { headers = [\"x-tenant\", \"idempotency-key\"] }";
    let patient = route("/task/{id}/{*rest}", &format!("{SEEN}\nwait_ms = 20_000"))
        .replace("/{*rest}\" }", "/{*rest}\", headers = { x-patient = \"*\" } }");
    patient + &route("/task/{id}/{*rest}", SEEN) + &route("/echo/{id}", SEEN)
}

const ACME: (&str, &str) = ("x-tenant", "acme");
const PATIENT: (&str, &str) = ("x-patient", "1");

fn values(seen: &Value, header: &str) -> Vec<String> {
    let lines = seen["headers"][header].as_array().expect("the header is there");
    assert_eq!(lines.len(), 1, "{seen}");
    lines[0].as_str().expect("text").split(", ").map(str::to_owned).collect()
}

on_both! {
    async fn a_request_carries_each_of_its_keys_and_tokens(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &BASKET, &route("/echo/{*all}", "")).await;
        let mut last = vec![0; 3];
        for _ in 0..3 {
            let seen = guarded.client().send("PUT", "/echo/x?items=c,a,b,a", "").await.json;
            assert_eq!(values(&seen, "lock-key"), ["stock/a", "stock/b", "stock/c"]);
            let tokens: Vec<u64> = values(&seen, "lock-token").iter().map(|token| token.parse().unwrap()).collect();
            assert!(tokens.len() == 3 && tokens.iter().zip(&last).all(|(now, last)| now > last), "{tokens:?} after {last:?}");
            last = tokens;
        }
        let one = guarded.client().send("PUT", "/echo/x?items=b", "").await.json;
        assert_eq!(values(&one, "lock-key"), ["stock/b"]);
        assert!(values(&one, "lock-token")[0].parse::<u64>().unwrap() > last[1]);
        let none = guarded.client().send("PUT", "/echo/x", "").await;
        assert_eq!((none.status, none.slug()), (403, "refused"), "{}", none.text);
    }

    /// Any two of these requests have an item in common, each in another order.
    async fn requests_that_share_a_key_run_one_at_a_time(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &BASKET, &route("/task/{*all}", "wait_ms = 20_000")).await;
        let asks = (0..12).map(|n| {
            let (client, items) = (guarded.client(), ["1,2", "2,3", "3,1", "2,1,3"][n % 4]);
            async move { client.send("PUT", &format!("/task/x?ms=30&items={items}"), "").await }
        });
        let answers = join_all(asks).await;
        assert!(answers.iter().all(|answer| (answer.status, &*answer.text) == (200, "done")), "{answers:?}");
        assert_eq!((guarded.upstream.served("/task/x").await, guarded.upstream.together("/task/x").await), (12, 1));
        for key in ["stock/1", "stock/2", "stock/3"] {
            eventually("each key is free", async || {
                guarded.proxy.client().show(key).await["holders"].as_array().is_none_or(Vec::is_empty)
            })
            .await;
        }
    }

    async fn requests_that_share_no_key_run_together(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &BASKET, &route("/task/{*all}", "wait_ms = 20_000")).await;
        let held: Vec<_> = ["/task/x?ms=3000&items=1,2", "/task/x?ms=3000&items=3,4", "/task/x?ms=3000&items=5"]
            .map(|path| guarded.send("PUT", path, &[]))
            .into();
        eventually("all are there", async || guarded.upstream.together("/task/x").await == 3).await;
        // A request that needs keys of two others waits for both.
        let both = guarded.send("PUT", "/task/both?ms=1&items=2,3", &[]);
        assert_eq!(both.await.unwrap().status, 200);
        assert!(held[..2].iter().all(JoinHandle::is_finished), "it came after them");
        for held in held {
            assert_eq!(held.await.unwrap().status, 200);
        }
    }

    async fn orders_are_locked_per_tenant_and_a_request_without_a_tenant_is_refused(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &ORDERS, &orders()).await;
        let client = guarded.client();
        let nobody = client.send("PUT", "/task/42", "").await;
        assert_eq!((nobody.status, nobody.slug()), (403, "refused"), "{}", nobody.text);
        assert!(nobody.text.contains("the request needs one header `x-tenant`"), "{}", nobody.text);
        let two = client.send_with("PUT", "/task/42", &[ACME, ("x-tenant", "globex")], "").await;
        assert_eq!(two.status, 403, "{}", two.text);
        let unkeyed = client.send_with("POST", "/task/42/pay", &[ACME], "").await;
        assert_eq!(unkeyed.status, 403, "{}", unkeyed.text);
        assert!(unkeyed.text.contains("`Idempotency-Key`"), "{}", unkeyed.text);
        assert_eq!(guarded.upstream.stats().await["served"], json!({}), "the application was not asked");
        for (tenant, key) in [("acme", "acme/orders/42"), ("globex", "globex/orders/42"), ("a/b", "a%252Fb/orders/42")] {
            let seen = client.send_with("PUT", "/echo/42", &[("x-tenant", tenant)], "").await.json;
            assert_eq!(values(&seen, "lock-key"), [key]);
        }
    }

    async fn readers_of_an_order_run_together_and_its_writer_alone(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &ORDERS, &orders()).await;
        let client = guarded.client();
        let readers: Vec<_> = (0..3).map(|_| guarded.send("GET", "/task/42?ms=1500", &[ACME])).collect();
        eventually("all read", async || guarded.upstream.together("/task/42").await == 3).await;
        let refused = client.send_with("PUT", "/task/42", &[ACME], "").await;
        assert_eq!(refused.status, 423, "{}", refused.text);
        let writer = guarded.send("PUT", "/task/42?ms=2000", &[ACME, PATIENT]);
        guarded.until_served("/task/42", 4).await;
        assert!(readers.iter().all(JoinHandle::is_finished), "the writer came after them");

        let refused = client.send_with("GET", "/task/42", &[ACME], "").await;
        assert_eq!((refused.status, refused.slug()), (423, "contended"), "{}", refused.text);
        assert_eq!(refused.json["detail"], "somebody is changing this order; try again in a moment");
        assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
        let other = client.send_with("PUT", "/task/43", &[ACME], "").await;
        let stranger = client.send_with("PUT", "/task/42/x", &[("x-tenant", "globex")], "").await;
        assert_eq!((other.status, stranger.status), (200, 200), "{}{}", other.text, stranger.text);
        assert_eq!(writer.await.unwrap().status, 200);
        assert_eq!((guarded.upstream.served("/task/42").await, guarded.upstream.together("/task/42").await), (4, 3));
    }

    async fn a_payment_is_made_once_for_each_key(kind: Kind) {
        let (guarded, _dir) = with_policy(kind, &ORDERS, &orders()).await;
        const KEY: (&str, &str) = ("idempotency-key", "7f3a");
        let client = guarded.client();
        let first = guarded.send("POST", "/task/42/pay?ms=2000", &[ACME, KEY]);
        guarded.until_served("/task/42/pay", 1).await;
        let duplicate = guarded.send("POST", "/task/42/pay?ms=2000", &[ACME, KEY, PATIENT]);
        let refused = client.send_with("POST", "/task/42/pay?ms=2000", &[ACME, KEY], "").await;
        assert_eq!((refused.status, refused.slug()), (409, "contended"), "{}", refused.text);
        let words = "this payment is being made; send it again with the same Idempotency-Key";
        assert_eq!(refused.json["detail"], words);
        let (first, duplicate) = (first.await.unwrap(), duplicate.await.unwrap());
        let later = client.send_with("POST", "/task/42/pay?ms=2000", &[ACME, KEY], "").await;
        assert!(!first.headers.contains_key("lock-replayed"));
        for answer in [&first, &duplicate, &later] {
            assert_eq!((answer.status, &*answer.text), (200, "done"));
        }
        assert!([&duplicate, &later].iter().all(|answer| answer.headers["lock-replayed"] == "true"));
        assert_eq!(guarded.upstream.served("/task/42/pay").await, 1);
        for headers in [&[ACME, ("idempotency-key", "another")][..], &[("x-tenant", "globex"), KEY]] {
            let answer = client.send_with("POST", "/task/42/pay", headers, "").await;
            assert!(answer.status == 200 && !answer.headers.contains_key("lock-replayed"), "{}", answer.text);
        }
        assert_eq!(guarded.upstream.served("/task/42/pay").await, 3);
    }
}
