//! Requests that a web page makes a browser send.

use serde_json::json;

use crate::harness::{Client, Proxy, Settings, database, fresh};

type Headers = &'static [(&'static str, &'static str)];

/// The headers of requests that no web page may cause, and the problems in the answers.
const FOREIGN: [(Headers, u16, &str); 6] = [
    (&[("origin", "https://evil.example")], 403, "cross_site"),
    (&[("origin", "null")], 403, "cross_site"),
    (&[("sec-fetch-site", "cross-site")], 403, "cross_site"),
    (&[("sec-fetch-site", "same-site")], 403, "cross_site"),
    // A page whose own name resolves to the proxy's address.
    (&[("host", "evil.example"), ("origin", "http://evil.example")], 421, "misdirected"),
    (&[("host", "evil.example:7070"), ("sec-fetch-site", "same-origin")], 421, "misdirected"),
];

on_both! {
    async fn a_web_page_can_neither_lock_nor_read_nor_change_a_policy(kind: Kind) {
        let sections = "[http]\nhosts = [\"locks.internal\"]\n".to_owned();
        let proxy = Proxy::with(Settings { url: database(kind).await, sections, ..Settings::default() }).await;
        let resource = fresh("shielded");
        let body = json!({"resource": resource, "ttl_ms": 60_000}).to_string();
        let (api, admin) = (proxy.client(), proxy.admin());
        let calls: [(&Client, &str, &str); 6] = [
            (&api, "POST", "/v1/acquire"),
            (&api, "GET", "/v1/locks"),
            (&admin, "POST", "/v1/policies/default/rollback"),
            (&admin, "PUT", "/v1/policies/default"),
            (&admin, "DELETE", "/v1/locks/any"),
            (&admin, "GET", "/ready"),
        ];
        for (client, method, path) in calls {
            for (headers, status, slug) in FOREIGN {
                let answer = client.send_with(method, path, headers, body.clone()).await;
                assert_eq!((answer.status, answer.slug()), (status, slug), "{path} {headers:?}: {}", answer.text);
            }
        }
        assert_eq!(api.show(&resource).await["holders"].as_array().map_or(0, Vec::len), 0, "nothing was locked");
        // What curl sends, what a page from the proxy itself would send, and names that the operator listed.
        let form = ("content-type", "application/x-www-form-urlencoded");
        let own = format!("http://{}", proxy.api_address());
        for headers in [&[form][..], &[("origin", &own), ("sec-fetch-site", "same-origin")], &[("host", "locks.internal")]] {
            let answer = api.send_with("GET", "/v1/locks", headers, "").await;
            assert_eq!(answer.status, 200, "{headers:?}: {}", answer.text);
        }
        let told = api.send_with("GET", "/v1/locks", &[("host", "locks")], "").await;
        assert!(told.text.contains("http.hosts"), "{}", told.text);
        assert_eq!(api.send_with("POST", "/v1/acquire", &[form], body).await.status, 200);
    }
}
