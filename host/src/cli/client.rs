//! A client of the HTTP API.

use std::cell::RefCell;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client as HyperClient, ResponseFuture};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::Options;
use super::failure::Failure;
use super::unix::UnixConnector;
use super::{output, tls};
use crate::config::socket_path;

/// A client of one server.
pub struct Client {
    base: String,
    credentials: Option<Credentials>,
    http: Http,
}

enum Http {
    Tcp(HyperClient<HttpsConnector<HttpConnector>, Full<Bytes>>),
    Unix(HyperClient<UnixConnector, Full<Bytes>>),
}

/// A token in a file, which only its owner may read.
struct Credentials {
    file: PathBuf,
    /// The header `Authorization`, from the last reading.
    header: RefCell<HeaderValue>,
}

/// The base URL of requests through a Unix socket: the proxy answers to this host everywhere.
const LOCALHOST: &str = "http://localhost";
/// The time-out of a connection attempt, and of an answer that involves no waiting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time-out of a whole call that involves no waiting for a lock.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(15);

impl Client {
    /// A client for `base`: the URL of a proxy, or `unix:` and the path of its socket.
    pub fn new(base: &str, options: &Options) -> Result<Client, Failure> {
        let base = base.trim_end_matches('/');
        let http = match socket_path(base) {
            Some(path) => {
                let path = path.map_err(|error| Failure::Usage(format!("the URL of the proxy {error}")))?;
                let connector = UnixConnector::new(path, CONNECT_TIMEOUT);
                Http::Unix(HyperClient::builder(TokioExecutor::new()).build(connector))
            }
            None => Http::Tcp(Client::over_tcp(base, options)?),
        };
        let credentials = options.credentials_file.as_deref().map(Credentials::read).transpose()?;
        Ok(Client { base: base.to_owned(), credentials, http })
    }

    fn over_tcp(
        base: &str,
        options: &Options,
    ) -> Result<HyperClient<HttpsConnector<HttpConnector>, Full<Bytes>>, Failure> {
        let uri: Uri =
            base.parse().map_err(|error| Failure::Usage(format!("`{base}` is not a URL: {error}")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            let example = "http://127.0.0.1:7070, https://locks.example.com:7070 or unix:/run/locks.sock";
            return Err(Failure::Usage(format!("`{base}` must be like {example}")));
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let tls = tls::config(options, uri.scheme_str() == Some("https"))?;
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        if options.credentials_file.is_some() && !options.allow_plaintext && is_plain_and_remote(&uri) {
            output::complain(&format!(
                "the token is sent to {base} unencrypted; use https://, or --allow-plaintext if something else encrypts it"
            ));
        }
        Ok(HyperClient::builder(TokioExecutor::new()).build(connector))
    }

    /// The base URL.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// A GET; returns the JSON of the answer.
    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::GET, path, Bytes::new(), CALL_TIMEOUT).await
    }

    /// A POST; returns the JSON of the answer.
    pub async fn post(&self, path: &str, body: &Value, timeout: Duration) -> Result<Value, Failure> {
        self.call(Method::POST, path, body.to_string().into(), timeout).await
    }

    /// A call. Returns the JSON of the answer; a problem is a failure.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Value, Failure> {
        let answer = async {
            let (status, body) = self.send(method, path, body).await?;
            let bytes = body.collect().await.map_err(|error| self.broken(&error))?.to_bytes();
            self.decode(status, &bytes)
        };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(Failure::Silent { url: self.base.clone() }),
        }
    }

    /// A call whose answer is a stream; a problem is a failure.
    pub async fn stream(&self, method: Method, path: &str, body: Bytes) -> Result<Incoming, Failure> {
        let (status, body) = self.send(method, path, body).await?;
        if status == 200 {
            return Ok(body);
        }
        let bytes = body.collect().await.map_err(|error| self.broken(&error))?.to_bytes();
        Err(self.decode(status, &bytes).err().unwrap_or_else(|| {
            Failure::Other(format!("{} answered {status} where a stream was expected", self.base))
        }))
    }

    /// The failure of a connection that broke during a call.
    pub fn broken(&self, error: &hyper::Error) -> Failure {
        let why = format!("the connection broke: {error}");
        Failure::NoProxy { url: self.base.clone(), why, was_asked: true }
    }

    /// Sends a request. If the token is refused and its file has another one by now, sends the request again.
    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(u16, Incoming), Failure> {
        let header = self.credentials.as_ref().map(|credentials| credentials.header.borrow().clone());
        let answer = self.send_as(header.as_ref(), method.clone(), path, body.clone()).await?;
        if let ((401, _), Some(credentials), Some(refused)) = (&answer, &self.credentials, &header)
            && let Some(next) = credentials.other_than(refused)
        {
            return self.send_as(Some(&next), method, path, body).await;
        }
        Ok(answer)
    }

    async fn send_as(
        &self,
        credentials: Option<&HeaderValue>,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(u16, Incoming), Failure> {
        let base = if let Http::Unix(_) = self.http { LOCALHOST } else { &self.base };
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(format!("{base}{path}"))
            .header(CONTENT_TYPE, "application/json");
        if let Some(credentials) = credentials {
            request = request.header(AUTHORIZATION, credentials);
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| Failure::Usage(format!("{}{path}: {error}", self.base)))?;
        let answer: ResponseFuture = match &self.http {
            Http::Tcp(http) => http.request(request),
            Http::Unix(http) => http.request(request),
        };
        let response = answer.await.map_err(|error| Failure::NoProxy {
            url: self.base.clone(),
            why: root_cause(&error),
            was_asked: !error.is_connect(),
        })?;
        Ok((response.status().as_u16(), response.into_body()))
    }

    fn decode(&self, status: u16, bytes: &[u8]) -> Result<Value, Failure> {
        let body: Value = serde_json::from_slice(bytes).map_err(|_| {
            Failure::Other(format!("{} answered {status} without JSON: is it a proxy's API?", self.base))
        })?;
        if (200..300).contains(&status) { Ok(body) } else { Err(Failure::Problem { status, body }) }
    }
}

impl Credentials {
    fn read(file: &Path) -> Result<Credentials, Failure> {
        Ok(Credentials { file: file.to_owned(), header: RefCell::new(authorization(file)?) })
    }

    /// The token in the file, if it is another one than the refused one: tokens are changed while commands run.
    fn other_than(&self, refused: &HeaderValue) -> Option<HeaderValue> {
        let found = authorization(&self.file).ok().filter(|found| found != refused)?;
        self.header.replace(found.clone());
        Some(found)
    }
}

/// Whether others on the network can read what is sent to this URL.
fn is_plain_and_remote(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default();
    let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
    let stays = host == "localhost" || address.is_some_and(|address| address.is_loopback());
    uri.scheme_str() == Some("http") && !stays
}

/// The header for the token in a file.
fn authorization(file: &Path) -> Result<HeaderValue, Failure> {
    let wrong = |what: String| Failure::Usage(format!("the credentials file {}: {what}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let mode = std::fs::metadata(file).map_err(|error| wrong(error.to_string()))?.mode();
    if mode & 0o077 != 0 {
        let what = format!("other users can read or change it; run `chmod 600 {}`", file.display());
        return Err(wrong(what));
    }
    let mut header = HeaderValue::from_str(&format!("Bearer {}", text.trim()))
        .ok()
        .filter(|_| !text.trim().is_empty())
        .ok_or_else(|| wrong("it must hold a token and nothing else".to_owned()))?;
    header.set_sensitive(true);
    Ok(header)
}

/// Encodes a name as a path and keeps its slashes.
pub fn encode_path(text: &str) -> String {
    encode(text, b"-._~/:@!$'()*,;=")
}

/// Encodes a value of a query.
pub fn encode_query(text: &str) -> String {
    encode(text, b"-._~/:")
}

fn encode(text: &str, plain: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            encoded.push(byte.into());
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The innermost error. Outer errors only say that the call failed.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_path_decodes_to_the_original() {
        for name in ["orders/42", "a b?c#d%e", "ü+&=", "//x"] {
            assert_eq!(crate::http::decode_path(&encode_path(name)).as_deref(), Some(name));
        }
    }

    #[test]
    fn only_urls_of_http_and_paths_of_sockets_are_accepted() {
        for good in ["http://localhost:7070/", "https://localhost:7070", "unix:/run/a.sock", "unix:a.sock"] {
            assert!(Client::new(good, &Options::default()).is_ok(), "{good}");
        }
        for bad in ["localhost:7070", "ftp://x", "", "http://", "unix:", "unix:@a", "/run/a.sock"] {
            assert!(matches!(Client::new(bad, &Options::default()), Err(Failure::Usage(_))), "{bad}");
        }
    }

    #[test]
    fn only_another_machine_can_read_what_is_sent_without_tls() {
        let is_read = |url: &str| is_plain_and_remote(&url.parse().unwrap());
        for quiet in ["http://localhost:7070", "http://127.8.8.8", "http://[::1]:7070", "https://a.example"] {
            assert!(!is_read(quiet), "{quiet}");
        }
        for read in
            ["http://a.example:7070", "http://10.0.0.1", "http://localhost.example", "http://[2001:db8::1]"]
        {
            assert!(is_read(read), "{read}");
        }
    }

    #[tokio::test]
    async fn a_failed_connection_says_how_to_start_a_proxy() {
        // The port was free a moment ago.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let client = Client::new(&format!("http://127.0.0.1:{port}"), &Options::default()).unwrap();
        let failure = client.get("/v1/locks").await.unwrap_err();
        assert_eq!(failure.code(), 5);
        assert!(failure.to_string().contains("start one with `lockkeeper serve`"), "{failure}");
    }
}
