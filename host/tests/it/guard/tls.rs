//! A guarded listener with TLS. The kind of the store's server does not matter here, so only MySQL is used.

use std::process::Stdio;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::*;
use crate::harness::{folder, lockkeeper, run};

/// A certificate for `localhost`, with its folder, which has the certificate and its key as `cert.pem` and `key.pem`.
struct Certified {
    dir: TempDir,
    cert: CertificateDer<'static>,
}

fn certified() -> Certified {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".into()]).unwrap();
    let dir = folder();
    std::fs::write(dir.path().join("cert.pem"), cert.pem()).unwrap();
    std::fs::write(dir.path().join("key.pem"), signing_key.serialize_pem()).unwrap();
    Certified { dir, cert: cert.der().clone() }
}

impl Certified {
    /// A listener with this certificate, and a route that locks `one`.
    fn config(&self) -> String {
        let file = |name| self.dir.path().join(name).display().to_string();
        let tls = format!("tls = {{ cert = \"{}\", key = \"{}\" }}\n", file("cert.pem"), file("key.pem"));
        format!("{LISTEN}{tls}{}", route("/{*all}", "resource = \"one\"\nwait_ms = 20_000"))
    }

    async fn connect(&self, guarded: &Guarded, alpn: &[&str]) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.cert.clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let tcp = TcpStream::connect(guarded.proxy.guard_address()).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap()
    }

    /// The request that arrived at the application, sent over TLS.
    async fn echo(&self, guarded: &Guarded, alpn: &[&str]) -> Value {
        let stream = self.connect(guarded, alpn).await;
        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        assert_eq!(is_h2, alpn.contains(&"h2"));
        let target = if is_h2 { "https://localhost/echo/x?y=1" } else { "/echo/x?y=1" };
        let mut request = hyper::Request::post(target).body(Full::new(Bytes::from("a body"))).unwrap();
        request.headers_mut().insert("x-forwarded-proto", "ftp".parse().unwrap());
        let io = TokioIo::new(stream);
        let (answer, connection) = if is_h2 {
            let (mut send, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
            let connection = tokio::spawn(connection);
            (send.send_request(request).await.unwrap(), connection)
        } else {
            request.headers_mut().insert("host", "localhost".parse().unwrap());
            let (mut send, connection) = http1::handshake(io).await.unwrap();
            let connection = tokio::spawn(connection);
            (send.send_request(request).await.unwrap(), connection)
        };
        let answer = answer.into_body().collect().await.unwrap().to_bytes();
        connection.abort();
        serde_json::from_slice(&answer).unwrap_or_else(|_| panic!("{answer:?}"))
    }
}

#[test]
fn both_versions_of_http_reach_the_application_under_a_lock() {
    run(async {
        let certified = certified();
        let guarded = Guarded::start(Kind::Mysql, &certified.config()).await;
        let mut last = 0;
        for alpn in [&["http/1.1"][..], &["h2", "http/1.1"], &[]] {
            let seen = certified.echo(&guarded, alpn).await;
            assert_eq!(
                (&seen["method"], &seen["target"]),
                (&json!("POST"), &json!("/echo/x?y=1")),
                "{alpn:?}"
            );
            assert_eq!((&seen["body"], &seen["headers"]["host"]), (&json!("a body"), &json!(["localhost"])));
            assert_eq!(seen["headers"]["x-forwarded-proto"], json!(["https"]), "{alpn:?}");
            let forwarded = seen["headers"]["forwarded"][0].as_str().unwrap();
            assert!(
                forwarded.starts_with("for=127.0.0.1;") && forwarded.ends_with(";proto=https"),
                "{forwarded}"
            );
            assert_eq!(seen["headers"]["lock-key"], json!(["one"]), "{alpn:?}");
            let token: u64 = seen["headers"]["lock-token"][0].as_str().unwrap().parse().unwrap();
            assert!(token > last, "{token} after {last}");
            last = token;
        }
        assert_eq!(guarded.outcomes("locked").await, 3.0);
    });
}

#[test]
fn a_request_without_tls_is_refused_and_other_requests_are_served() {
    run(async {
        let certified = certified();
        let guarded = Guarded::start(Kind::Mysql, &certified.config()).await;
        for plain in
            ["GET /task/plain HTTP/1.1\r\nhost: x\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\0\0"]
        {
            let mut raw = Raw::connect(guarded.proxy.guard_address()).await;
            raw.send(plain).await;
            raw.leave().await;
            let answer = raw.rest().await;
            assert!(!answer.contains("HTTP/1.1"), "{answer}");
            assert_eq!(certified.echo(&guarded, &["http/1.1"]).await["headers"]["lock-key"], json!(["one"]));
        }
        assert_eq!(guarded.upstream.served("/task/plain").await, 0);
    });
}

#[test]
fn a_proxy_with_a_key_of_another_certificate_does_not_start() {
    run(async {
        let (certified, other) = (certified(), certified());
        std::fs::copy(other.dir.path().join("key.pem"), certified.dir.path().join("key.pem")).unwrap();
        let config = certified.dir.path().join("config.toml");
        let url = database(Kind::Mysql).await;
        let listeners = "[api]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n";
        let guard = certified.config().replace("GOOD", "http://127.0.0.1:9");
        std::fs::write(&config, format!("[store]\nurl = \"{url}\"\n{listeners}{guard}")).unwrap();
        let mut command = lockkeeper();
        command.arg("serve").arg("--config").arg(&config).stdin(Stdio::null());
        let mut command = tokio::process::Command::from(command);
        let ended = tokio::time::timeout(Duration::from_secs(60), command.kill_on_drop(true).output()).await;
        let output = ended.expect("it does not serve").unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("key.pem: the key is not that of the certificate in"), "{told}");
    });
}
