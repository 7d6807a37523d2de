//! Time-outs of guarded requests, and failures that do not count as an unavailable store.

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};

use super::*;

/// The same lock for all paths, without waiting.
fn one_lock(more: &str) -> String {
    LISTEN.to_owned() + &route("/{*all}", &format!("resource = \"one\"\n{more}"))
}

on_both! {
    /// Over HTTP/2, the end of a body may come in a separate frame, after its announced length has been passed on.
    async fn the_response_timeout_starts_when_the_announced_body_was_passed_on(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("response_timeout_ms = 700\nidle_timeout_ms = 60_000")).await;
        let stream = tokio::net::TcpStream::connect(guarded.proxy.guard_address()).await.unwrap();
        let (mut http, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let frames = stream::iter([Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"hello")))]);
        let request = hyper::Request::post("http://x/never").header("content-length", 5);
        let request = request.body(StreamBody::new(frames)).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(20), http.send_request(request)).await;
        let answer = answer.expect("the application's time is over").unwrap();
        assert_eq!(answer.status(), 504);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&body).contains("upstream_timeout"), "{body:?}");
        assert_eq!(guarded.client().get("/task/1").await.status, 200, "its lock is free");
    }

    /// An HTTP/2 client that does not accept even the first piece of its answer.
    async fn a_client_with_a_closed_http2_window_does_not_keep_the_lock(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("idle_timeout_ms = 700")).await;
        let stream = tokio::net::TcpStream::connect(guarded.proxy.guard_address()).await.unwrap();
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut http, connection) =
            builder.initial_stream_window_size(0).handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::get("http://x/bytes?n=5000000").body(Empty::<Bytes>::new()).unwrap();
        let unread = http.send_request(request).await.unwrap();
        assert_eq!(unread.status(), 200);
        eventually("the lock is free", async || guarded.client().get("/task/1").await.status == 200).await;
        drop(unread);
    }

    /// The application reads only the head of a request.
    async fn an_application_that_reads_no_body_is_given_up_after_the_idle_timeout(kind: Kind) {
        let guarded = Guarded::start(kind, &one_lock("response_timeout_ms = 60_000\nidle_timeout_ms = 700")).await;
        let client = Client::http2(guarded.proxy.guard_address());
        let sent = client.send_with("POST", "/never", &[], vec![b'x'; 40_000_000]);
        let answer = tokio::time::timeout(Duration::from_secs(20), sent).await.expect("it is given up");
        assert_eq!((answer.status, answer.slug()), (504, "upstream_timeout"), "{}", answer.text);
        assert_eq!(guarded.client().get("/task/1").await.status, 200, "its lock is free");
    }

    /// A proxy may not grant beside other proxies, which may hold the key. So its route stays closed.
    async fn an_open_route_is_closed_while_its_proxy_is_not_in_the_fleet(kind: Kind) {
        let url = database(kind).await;
        let first = Guarded::on(&url, &one_lock("")).await;
        let held = first.send("POST", "/task/1?ms=6000", &[]);
        first.until_served("/task/1", 1).await;
        let routes = "[[routes]]\nresource = \"r/*\"\npolicy = \"default\"\n";
        let second = Proxy::with(Settings { api: String::new(),
            url,
            store: "timeout_ms = 500".to_owned(),
            sections: named(&first.upstream, &(one_lock("fail = \"open\"") + routes)),
        });
        let second = second.await;
        let admin = second.admin();
        eventually("it says why", async || admin.get("/ready").await.text.contains("[[routes]]")).await;
        let refused = second.guarded().send("POST", "/task/1", "").await;
        assert_eq!((refused.status, refused.slug()), (503, "store_unavailable"), "{}", refused.text);
        assert!(refused.headers.contains_key("retry-after"));
        assert_eq!(first.upstream.served("/task/1").await, 1);
        assert_eq!(held.await.unwrap().status, 200);
    }
}
