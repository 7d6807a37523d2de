//! Tests of the server with TLS.

use std::fs;
use std::io;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ProtocolVersion, RootCertStore, SupportedProtocolVersion, version};

use super::*;
use crate::config::TlsFiles;
use crate::net::Tls;

/// A server with TLS, and its certificate.
struct Encrypted {
    server: Server,
    cert: CertificateDer<'static>,
}

/// Answers with what it knows of its peer. Never answers `/wait`, and answers `/switch` by echoing what arrives.
struct Front {
    waiting: Arc<AtomicUsize>,
}

impl Handler for Front {
    const FRONT: &'static str = "test";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        let mut response = json(&(peer.tls, request.version() == hyper::Version::HTTP_2));
        match request.uri().path() {
            "/wait" => {
                let _here = Waiting::new(&self.waiting);
                std::future::pending().await
            }
            "/switch" => {
                peer.upgrade(|mut stream, _early| {
                    Box::pin(async move {
                        let mut bytes = [0; 4];
                        stream.read_exact(&mut bytes).await.unwrap();
                        stream.write_all(&bytes).await.unwrap();
                        stream.shutdown().await.unwrap();
                    })
                });
                response = Response::new(Body::full(""));
                *response.status_mut() = hyper::StatusCode::SWITCHING_PROTOCOLS;
                response
            }
            _ => response,
        }
    }
}

fn encrypted(limits: HttpLimits) -> Encrypted {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".into()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    fs::write(&cert_file, cert.pem()).unwrap();
    fs::write(&key_file, signing_key.serialize_pem()).unwrap();
    let files = TlsFiles { cert: cert_file, key: key_file, client_ca: None, crl: None };
    let config = Tls::load(&files, ALPN).unwrap();
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap().with_tls(config);
    let waiting = Arc::new(AtomicUsize::new(0));
    let server = start_on(listener, Front { waiting: Arc::clone(&waiting) }, limits, waiting);
    Encrypted { server, cert: cert.der().clone() }
}

impl Encrypted {
    async fn try_connect(
        &self,
        alpn: &[&str],
        versions: &[&'static SupportedProtocolVersion],
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.cert.clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, self.server.connect().await).await
    }

    async fn connect(&self, alpn: &[&str]) -> TlsStream<TcpStream> {
        self.try_connect(alpn, &[&version::TLS13]).await.unwrap()
    }

    async fn exchange(&self, text: &str) -> String {
        let mut stream = self.connect(&["http/1.1"]).await;
        stream.write_all(text.as_bytes()).await.unwrap();
        rest(&mut stream).await
    }
}

/// What arrives until the server ends the connection with a TLS close.
async fn rest(stream: &mut TlsStream<TcpStream>) -> String {
    let mut text = String::new();
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_string(&mut text)).await;
    read.expect("the server leaves the connection open").expect("the connection is cut off");
    text
}

const GET: &str = "GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn http1_is_served_in_both_versions_of_tls() {
    let encrypted = encrypted(limits());
    let versions = [(&version::TLS12, ProtocolVersion::TLSv1_2), (&version::TLS13, ProtocolVersion::TLSv1_3)];
    for (asked, found) in versions {
        for alpn in [&["http/1.1"][..], &[]] {
            let mut stream = encrypted.try_connect(alpn, &[asked]).await.unwrap();
            assert_eq!(stream.get_ref().1.protocol_version(), Some(found));
            stream.write_all(GET.as_bytes()).await.unwrap();
            let answer = rest(&mut stream).await;
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("[true,false]"), "{answer}");
        }
    }
}

#[tokio::test]
async fn http2_is_served_when_the_handshake_selected_it() {
    let encrypted = encrypted(limits());
    let stream = encrypted.connect(&["h2", "http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let executor = hyper_util::rt::TokioExecutor::new();
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut send, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let _connection = tokio::spawn(connection);
    let answer = send.send_request(h2_request("/", "")).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "[true,true]");
}

#[tokio::test]
async fn a_client_that_negotiated_http2_gets_no_http1_answer() {
    let encrypted = encrypted(limits());
    let mut stream = encrypted.connect(&["h2"]).await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut bytes)).await;
    let _ = read.expect("the server leaves the connection open");
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP/1.1"));
}

#[tokio::test]
async fn a_protocol_that_is_not_http_is_refused_in_the_handshake() {
    let encrypted = encrypted(limits());
    let error = encrypted.try_connect(&["smtp"], &[&version::TLS13]).await.unwrap_err();
    assert!(error.to_string().contains("NoApplicationProtocol"), "{error}");
}

#[tokio::test]
async fn a_client_without_tls_is_not_served() {
    let encrypted = encrypted(limits());
    let mut plain = encrypted.server.send(GET).await;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), plain.read_to_end(&mut bytes)).await;
    let _ = read.expect("the server leaves the connection open");
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP/1.1"));
    assert!(encrypted.exchange(GET).await.ends_with("[true,false]"), "others are served");
}

#[tokio::test]
async fn an_unfinished_handshake_is_aborted() {
    let encrypted = encrypted(HttpLimits { max_connections: 1, ..limits() });
    // The first bytes of a handshake of 512 bytes.
    for half in [&b""[..], b"\x16\x03\x01\x02\x00\x01\x00"] {
        let begun = Instant::now();
        let mut stream = encrypted.server.connect().await;
        stream.write_all(half).await.unwrap();
        assert_eq!(read_all(&mut stream).await, "");
        assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    }
    // The connection no longer counts toward the limit.
    assert!(encrypted.exchange(GET).await.ends_with("[true,false]"));
}

#[tokio::test]
async fn limits_and_problems_apply_over_tls() {
    let encrypted = encrypted(limits());
    assert_problem(&encrypted.exchange("GET / HTTP/1.1\r\nhost").await, 408, "timeout");
    assert_problem(&encrypted.exchange("GET / HTTP/1.1\nhost: x\n\n").await, 400, "invalid");
    let long = format!("GET / HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "a".repeat(40_000));
    assert_problem(&encrypted.exchange(&long).await, 431, "headers_too_large");
}

#[tokio::test]
async fn an_upgraded_connection_stays_encrypted() {
    let encrypted = encrypted(limits());
    let mut stream = encrypted.connect(&["http/1.1"]).await;
    let switch = "GET /switch HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    stream.write_all(switch.as_bytes()).await.unwrap();
    let mut bytes = [0; 12];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"HTTP/1.1 101");
    stream.write_all(b"\0\n\r\xff").await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    assert!(bytes.ends_with(b"\r\n\r\n\0\n\r\xff"), "{bytes:?}");
}

#[tokio::test]
async fn a_disconnect_drops_its_handler_and_a_shutdown_ends_the_other_connections() {
    let encrypted = encrypted(limits());
    let mut stream = encrypted.connect(&["http/1.1"]).await;
    stream.write_all(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    encrypted.server.waiting_becomes(1).await;
    drop(stream);
    encrypted.server.waiting_becomes(0).await;

    let _half = encrypted.server.send("\x16\x03\x01").await;
    let mut idle = encrypted.connect(&["http/1.1"]).await;
    encrypted.server.stop.cancel();
    assert_eq!(idle.read(&mut [0; 10]).await.unwrap_or(0), 0);
    let ended = tokio::time::timeout(Duration::from_secs(2), encrypted.server.task).await;
    ended.expect("the server ends").unwrap();
}
