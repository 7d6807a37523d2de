//! Answers that are kept for duplicates: who may receive them, and what is not kept.

use super::*;
use crate::harness::sql;

const SETTINGS: &str = "[policies.default]\npath = \"builtin:default\"\n\
                        settings = { primitive = \"once\", wait_ms = 20_000, ttl_ms = 5_000 }\n";

fn once(path: &str, more: &str) -> String {
    route(path, &format!("resource = \"pay/{{header.idempotency-key}}\"\n{more}"))
}

impl Guarded {
    async fn post(&self, path: &str, headers: &[(&str, &str)]) -> Response {
        self.client().send_with("POST", path, headers, "").await
    }
}

on_both! {
    /// A client of the API can store an outcome that looks like an answer of the application.
    async fn an_outcome_stored_by_the_api_is_never_replayed_as_an_answer(kind: Kind) {
        let url = database(kind).await;
        let guarded = Guarded::on(&url, &(LISTEN.to_owned() + &once("/{*all}", "") + SETTINGS)).await;
        assert_eq!(guarded.post("/task/1", &[("idempotency-key", "real")]).await.text, "done");
        let rows = sql(&url, "SELECT state FROM lockkeeper_lease WHERE state LIKE '%done%'").await;
        let state: String = mysql_async::from_row(rows.into_iter().next().expect("the answer is kept"));
        let state: Value = serde_json::from_str(&state).unwrap();
        let mut forged: Value = serde_json::from_str(state["kept"]["value"].as_str().unwrap()).unwrap();
        forged["text"] = "forged".into();

        let api = guarded.proxy.client();
        let begun = api.post("/v1/once/begin", &json!({"resource": "pay/forged"})).await;
        assert_eq!(begun.json["state"], "first", "{}", begun.text);
        let finish = json!({"lease_id": begun.json["lease_id"], "outcome": forged});
        assert_eq!(api.post("/v1/once/finish", &finish).await.status, 200);
        let answer = guarded.post("/task/1", &[("idempotency-key", "forged")]).await;
        assert_eq!((answer.status, answer.slug()), (409, "conflict"), "{}", answer.text);
        assert!(!answer.text.contains("\"forged\""), "{}", answer.text);
        assert_eq!(guarded.upstream.served("/task/1").await, 1, "what was done is not done again");
        let done = api.post("/v1/once/begin", &json!({"resource": "pay/forged"})).await;
        assert_eq!(done.json["outcome"]["text"], "forged", "the API's own is for its clients: {}", done.text);
    }

    /// The answers that a route keeps are for its own clients, and lists show no values.
    async fn a_stored_answer_is_not_shown_by_the_api(kind: Kind) {
        let guarded = Guarded::start(kind, &(LISTEN.to_owned() + &once("/{*all}", "") + SETTINGS)).await;
        assert_eq!(guarded.post("/cache/max-age=1", &[("idempotency-key", "a")]).await.text, "secret");
        let api = guarded.proxy.client();
        let begun = api.post("/v1/once/begin", &json!({"resource": "own"})).await;
        let finish = json!({"lease_id": begun.json["lease_id"], "outcome": "own value"});
        assert_eq!(api.post("/v1/once/finish", &finish).await.status, 200);

        let list = api.get("/v1/locks").await;
        let locks = list.json["locks"].as_array().expect("a list");
        assert_eq!(locks.iter().filter(|lock| lock["kept"]["since"].is_string()).count(), 2, "{}", list.text);
        assert!(locks.iter().all(|lock| lock["kept"]["value"].is_null()), "{}", list.text);
        assert_eq!(api.show("own").await["kept"]["value"], "own value");
        let shown = api.show("pay%2Fa").await;
        assert!(shown["kept"]["since"].is_string() && shown["kept"]["value"].is_null(), "{shown}");
        let begun = api.post("/v1/once/begin", &json!({"resource": "pay/a"})).await;
        assert_eq!((begun.status, begun.slug(), &begun.json["state"]), (409, "conflict", &json!("done")));
        for told in [list.text, shown.to_string(), begun.text] {
            assert!(!told.contains("secret"), "{told}");
        }
    }

    /// Unless the route says otherwise.
    async fn a_stored_answer_is_replayed_only_to_the_sender_of_its_request(kind: Kind) {
        let config = LISTEN.to_owned() + &once("/task/anyone", "caller = []") + &once("/{*all}", "") + SETTINGS;
        let guarded = Guarded::start(kind, &config).await;
        for (name, first, second) in [("authorization", "Bearer a", "Bearer b"), ("cookie", "id=a", "id=b")] {
            let key = ("idempotency-key", name);
            let path = format!("/task/{name}");
            assert_eq!(guarded.post(&path, &[key, (name, first)]).await.status, 200);
            let again = guarded.post(&path, &[key, (name, first)]).await;
            assert_eq!((again.status, again.headers.contains_key("lock-replayed")), (200, true));
            for other in [&[key, (name, second)][..], &[key]] {
                let refused = guarded.post(&path, other).await;
                assert_eq!((refused.status, refused.slug()), (422, "request_id_reused"), "{}", refused.text);
            }
            assert_eq!(guarded.upstream.served(&path).await, 1);
        }
        let key = ("idempotency-key", "anyone");
        assert_eq!(guarded.post("/task/anyone", &[key, ("cookie", "id=a")]).await.status, 200);
        let again = guarded.post("/task/anyone", &[key, ("cookie", "id=b")]).await;
        assert_eq!((again.status, again.headers.contains_key("lock-replayed")), (200, true));
    }

    /// The application forbids that its answer is kept. The proxy records that an answer was given, and the work is
    /// not repeated.
    async fn an_answer_that_forbids_storing_is_not_stored(kind: Kind) {
        let url = database(kind).await;
        let guarded = Guarded::on(&url, &(LISTEN.to_owned() + &once("/{*all}", "") + SETTINGS)).await;
        let user = ("authorization", "Bearer a");
        for (n, (directive, who, is_kept)) in [
            ("no-store", Some(user), false),
            ("max-age=0,Private", None, false),
            ("max-age=0,Private", Some(user), true),
        ]
        .into_iter()
        .enumerate()
        {
            let (path, key) = (format!("/cache/{directive}"), n.to_string());
            let headers: Vec<_> = [("idempotency-key", key.as_str())].into_iter().chain(who).collect();
            let served = guarded.upstream.served(&path).await;
            assert_eq!(guarded.post(&path, &headers).await.text, "secret");
            let again = guarded.post(&path, &headers).await;
            match is_kept {
                true => assert_eq!((again.status, &*again.text), (200, "secret")),
                false => assert_eq!((again.status, again.number("original_status")), (409, 200), "{}", again.text),
            }
            assert_eq!(guarded.upstream.served(&path).await, served + 1, "{directive}");
        }
        let stored = sql(&url, "SELECT state FROM lockkeeper_lease WHERE state LIKE '%secret%'").await;
        assert_eq!(stored.len(), 1, "the one that is for a known user");
    }
}
