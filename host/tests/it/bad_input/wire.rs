//! Input that is too large, too slow or incomplete is answered, closed and forgotten.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{Proxy, Raw, Settings, database, fresh, parsed};

const LIMITS: &str = "[http]\nmax_header_bytes = 4096\nmax_body_bytes = 4096\nheader_timeout_ms = 600\n\
                      body_timeout_ms = 600\nidle_timeout_ms = 600\n";
/// The number of concurrent connections, and of repetitions.
const CROWD: usize = 300;
const CROWDS: usize = 6;
/// Memory that the allocator may keep.
const SLACK: u64 = 12 << 20;

async fn strict(url: &str) -> Proxy {
    Proxy::with(Settings { url: url.to_owned(), sections: LIMITS.to_owned(), ..Settings::default() }).await
}

/// The answer to bytes after which the client waits for the proxy to close.
async fn answer(proxy: &Proxy, bytes: impl AsRef<[u8]>) -> (u16, String) {
    let mut socket = Raw::connect(proxy.api_address()).await;
    socket.send(bytes).await;
    let (status, problem) = parsed(&socket.rest().await);
    (status, problem["type"].as_str().unwrap_or_default().to_owned())
}

fn post(length: usize, body: &str) -> String {
    format!("POST /v1/acquire HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
}

on_both! {
    /// Input over a limit.
    async fn oversized_requests_are_refused(kind: Kind) {
        let proxy = strict(&database(kind).await).await;
        let body = "x".repeat(5_000);
        assert_eq!(answer(&proxy, post(5_000, &body)).await, (413, "too_large".into()));
        let announced = answer(&proxy, post(usize::MAX >> 1, "")).await;
        assert_eq!(announced, (413, "too_large".into()), "it is not waited for");
        let chunk = format!("1388\r\n{body}\r\n0\r\n\r\n");
        let chunked =
            format!("POST /v1/acquire HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n{chunk}");
        assert_eq!(answer(&proxy, chunked).await, (413, "too_large".into()));
        let header = format!("GET /v1/locks HTTP/1.1\r\nhost: localhost\r\nx-long: {body}\r\n\r\n");
        assert_eq!(answer(&proxy, header).await, (431, "headers_too_large".into()));
        let many = format!("GET /v1/locks HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "a: b\r\n".repeat(500));
        assert_eq!(answer(&proxy, many).await, (431, "headers_too_large".into()));
        assert_eq!(answer(&proxy, "nonsense\r\n\r\n").await, (400, "invalid".into()));
        assert_eq!(proxy.client().get("/v1/locks").await.status, 200);
    }

    /// Half a request with nothing after it, and a request that comes byte by byte.
    async fn slow_requests_are_refused(kind: Kind) {
        let proxy = strict(&database(kind).await).await;
        for half in ["GET /v1/locks HT", "GET /v1/locks HTTP/1.1\r\nhost: localhost\r\n"] {
            assert_eq!(answer(&proxy, half).await, (408, "timeout".into()), "{half}");
        }
        assert_eq!(answer(&proxy, post(100, "{\"resource\"")).await, (408, "timeout".into()));
        assert_eq!(answer(&proxy, "").await.0, 0, "nothing was asked, so nothing is answered");
        let began = Instant::now();
        let mut slow = Raw::connect(proxy.api_address()).await;
        for byte in b"GET /v1/locks HTTP/1.1\r\nx: ".iter().chain([b'a'; 300].iter()) {
            slow.send([*byte]).await;
            if slow.hears_within(Duration::from_millis(30)).await {
                break;
            }
        }
        assert_eq!(parsed(&slow.rest().await).0, 408);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }

    /// Thousands of clients that send half a request leave no memory behind.
    async fn incomplete_requests_leave_no_memory_behind(kind: Kind) {
        let proxy = strict(&database(kind).await).await;
        crowd(&proxy).await;
        let before = proxy.memory();
        for _ in 0..CROWDS {
            crowd(&proxy).await;
        }
        let after = proxy.memory();
        assert!(after < before + SLACK, "{} KiB became {} KiB", before >> 10, after >> 10);
        let lease = proxy.client().lease(&fresh("after"), 1_000).await;
        assert!(lease["token"].is_u64());
    }
}

/// A third send half a head, a third half a body, and a third too much. All are answered and closed.
async fn crowd(proxy: &Proxy) {
    let requests = [
        format!("GET /v1/locks HTTP/1.1\r\nx: {}", "y".repeat(3_000)),
        post(4_000, &json!({"resource": "y".repeat(3_000)}).to_string()),
        post(5_000, &"y".repeat(5_000)),
    ];
    let mut sockets = Vec::new();
    for n in 0..CROWD {
        let mut socket = Raw::connect(proxy.api_address()).await;
        socket.send(&requests[n % 3]).await;
        sockets.push(socket);
    }
    for (n, mut socket) in sockets.into_iter().enumerate() {
        let expected = [408, 408, 413][n % 3];
        assert_eq!(parsed(&socket.rest().await).0, expected, "{}", n % 3);
    }
}
