//! Measurements of the server alone; run by hand: `cargo test --release http::measure -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::*;

struct Fixed;

impl Handler for Fixed {
    const FRONT: &'static str = "test";

    async fn handle(&self, request: Request) -> Response {
        let waits = request.uri().path() == "/wait";
        let body = read_body(request, 1_000, Duration::from_secs(1)).await;
        if waits {
            std::future::pending::<()>().await;
        }
        json(&body.map_or(0, |body| body.len()))
    }
}

async fn start() -> SocketAddr {
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let (limits, stop) = (HttpLimits::default(), CancellationToken::new());
    tokio::spawn(serve(listener, Fixed, limits, Metrics::default(), stop));
    address
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn memory_of_waiting_connections() {
    raise_file_limit();
    let address = start().await;
    let before = resident_kib();
    let mut held = Vec::new();
    for _ in 0..8_000 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request =
            format!("POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{}", "x".repeat(100));
        stream.write_all(request.as_bytes()).await.unwrap();
        held.push(stream);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let each = (resident_kib() - before) as f64 / held.len() as f64;
    println!("{} connections: {each:.1} KiB each, client and server", held.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn requests_a_second() {
    let address = start().await;
    let begun = Instant::now();
    let each = 20_000;
    let clients: Vec<_> = (0..16)
        .map(|_| {
            tokio::spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let mut answer = [0; 1024];
                for _ in 0..each {
                    let request =
                        b"POST /v1/acquire HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                                    content-length: 24\r\n\r\n{\"resource\": \"orders/1\"}";
                    stream.write_all(request).await.unwrap();
                    assert!(stream.read(&mut answer).await.unwrap() > 0);
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    let rate = 16.0 * f64::from(each) / begun.elapsed().as_secs_f64();
    println!("{rate:.0} requests a second, client and server on 2 threads");
}
