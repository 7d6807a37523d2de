//! Routes that are replaced during requests.

use std::fs;

use super::*;

on_both! {
    async fn routes_are_replaced_without_dropping_a_connection(kind: Kind) {
        let first = LISTEN.to_owned() + &route("/task/{id}", "resource = \"old/{id}\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &first).await;
        let file = guarded.proxy.config_file();
        let before = fs::read_to_string(&file).unwrap();
        let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
        raw.send("GET /task/1?ms=2500 HTTP/1.1\r\nhost: x\r\n\r\n").await;
        guarded.until_served("/task/1", 1).await;
        let client = guarded.client();
        assert_eq!(client.get("/echo/new").await.status, 404);

        let listener = before.split(LISTEN).next().unwrap().to_owned();
        let second = listener + &named(&guarded.upstream, &(LISTEN.to_owned() + &route("/echo/{id}", "resource = \"new/{id}\"")))
            + "[policies.default]\npath = \"builtin:default\"\n";
        fs::write(&file, &second).unwrap();
        eventually("the new route is there", async || client.get("/echo/new").await.status == 200).await;
        assert_eq!(client.get("/echo/x").await.json["headers"]["lock-key"], json!(["new/x"]));
        assert_eq!(client.get("/task/1").await.status, 404);
        let answer = raw.until("done").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "what was under way goes on: {answer}");
        raw.send("GET /echo/kept HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        assert!(raw.rest().await.contains("new/kept"), "on the same connection");
        assert_eq!(guarded.proxy.metric("lockkeeper_config_loads_total", &["live"]).await, 1.0);

        for (bad, told) in [
            (second.replace("resource = \"new/{id}\"", "resource = \"new/{sku}\""), "not in the path of the route"),
            (second.replace("policy = \"default\"", "policy = \"other\""), "no policy is named"),
            (second.replace("\"127.0.0.1:0\"\n[[guard.r", "\"127.0.0.1:1\"\n[[guard.r"), "needs a restart"),
        ] {
            assert_ne!(bad, second);
            fs::write(&file, bad).unwrap();
            eventually(told, async || guarded.proxy.log().contains(told)).await;
            let ready = guarded.proxy.admin().get("/ready").await;
            assert!(ready.status == 200 && ready.json["warnings"].to_string().contains(told), "{}", ready.text);
            assert_eq!(client.get("/echo/x").await.status, 200, "the old ones stay");
        }
        assert_eq!(guarded.proxy.metric("lockkeeper_config_loads_total", &["refused"]).await, 3.0);

        for (changed, told) in [
            (format!("{second}[shutdown]\ndrain_ms = 999\n"), "the rest needs a restart"),
            (second.clone(), "is again what the proxy runs on"),
        ] {
            fs::write(&file, changed).unwrap();
            eventually(told, async || guarded.proxy.log().contains(told)).await;
        }
        assert_eq!(guarded.proxy.admin().get("/ready").await.json["warnings"], json!([]));
        assert!(guarded.proxy.log().contains("the configuration is fine again"));
    }

    /// A waiting request starts over if new routes read more of its body than the old ones.
    async fn a_waiting_request_is_renamed_by_the_whole_body_that_new_routes_read(kind: Kind) {
        let first = LISTEN.to_owned() + &route("/echo/{id}", "resource = \"old/{id}\"\nwait_ms = 20_000");
        let guarded = Guarded::start(kind, &first).await;
        let file = guarded.proxy.config_file();
        let text = fs::read_to_string(&file).unwrap();
        let held = guarded.proxy.client().acquire(json!({"resource": "old/1"})).await;
        assert_eq!(held.status, 200, "{}", held.text);
        let client = guarded.client();
        let waiting = tokio::spawn(async move { client.send("POST", "/echo/1", r#"{"order": 7}"#).await });
        guarded.proxy.client().until_queued("old/1", 1).await;
        let renamed = "new/{json.order}\"\nsee = { body_bytes = 100 }\nwait_ms = 20_000";
        let text = text.replace("old/{id}\"\nwait_ms = 20_000", renamed);
        assert!(text.contains("new/"), "{text}");
        fs::write(&file, text).unwrap();
        let answer = waiting.await.unwrap();
        assert_eq!((answer.status, &answer.json["headers"]["lock-key"]), (200, &json!(["new/7"])), "{}", answer.text);
        assert_eq!(answer.json["body"], r#"{"order": 7}"#, "it arrives in whole");
    }
}
