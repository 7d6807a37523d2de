//! Several proxies of one store: if one proxy cannot serve a call, the next one does.
//!
//! A lease belongs to the store, so any proxy can renew and release it, and a repeated `request_id` gives the same
//! lease on each proxy. A call that is safe to repeat goes from server to server. A call that is not safe to repeat
//! goes to the next server only if it has not arrived.

use std::cell::Cell;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;

use super::Options;
use super::client::{CALL_TIMEOUT, Client};
use super::failure::Failure;
use super::output;
use crate::clock;
use crate::lock::Instant;
use crate::random;

/// The pause between two rounds in which no server could be used.
const PAUSE: Duration = Duration::from_millis(500);
/// The time-out of a call whose longest wait only the policy knows.
const FOR_EVER: Duration = Duration::from_secs(30 * 24 * 3600);

/// The servers of `--server`, and the one in use.
pub struct Servers {
    clients: Vec<Client>,
    /// The server to ask first.
    current: Cell<usize>,
    /// The server that answered last.
    used: Cell<Option<usize>>,
    /// Whether only the current server counts; see [`Servers::stay`].
    is_fixed: Cell<bool>,
}

impl Servers {
    /// Servers from the URLs of `--server`.
    pub fn new(options: &Options) -> Result<Servers, Failure> {
        let urls = options.server.iter().map(|url| url.trim()).filter(|url| !url.is_empty());
        let clients = urls.map(|url| Client::new(url, options)).collect::<Result<Vec<_>, _>>()?;
        if clients.is_empty() {
            return Err(Failure::Usage("there is no --server".to_owned()));
        }
        Ok(Servers { clients, current: Cell::new(0), used: Cell::new(None), is_fixed: Cell::new(false) })
    }

    /// How many servers may be asked.
    pub fn count(&self) -> usize {
        if self.is_fixed.get() { 1 } else { self.clients.len() }
    }

    /// Uses only the current server from now on, because the lock depends on that server's database session.
    pub fn stay(&self) {
        self.is_fixed.set(true);
    }

    /// Whether only one server may be asked.
    pub fn is_fixed(&self) -> bool {
        self.is_fixed.get()
    }

    /// The server to ask first.
    pub fn current(&self) -> &Client {
        &self.clients[self.current.get()]
    }

    /// Goes on to the next server, because the current one cannot be used now.
    pub fn pass_over(&self) {
        if !self.is_fixed.get() {
            self.current.set((self.current.get() + 1) % self.clients.len());
        }
    }

    /// Records that the current server has answered, and reports a change of servers. Call this after acting on the
    /// answer.
    pub fn settle(&self) {
        let before = self.used.replace(Some(self.current.get()));
        if let Some(before) = before.filter(|before| *before != self.current.get()) {
            output::aside(format!(
                "{} cannot be used; {} is used now",
                self.clients[before].url(),
                self.current().url()
            ));
        }
    }

    /// A GET, which is safe to repeat.
    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::GET, path, &Bytes::new(), CALL_TIMEOUT, Failure::is_of_the_server).await
    }

    /// A POST that is safe to repeat. Each server is asked once, for at most `timeout`.
    pub async fn post(&self, path: &str, body: &Value, timeout: Duration) -> Result<Value, Failure> {
        self.call(Method::POST, path, &body.to_string().into(), timeout, Failure::is_of_the_server).await
    }

    /// A POST that must not be repeated once it may have arrived.
    pub async fn post_once(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Method::POST, path, &body.to_string().into(), CALL_TIMEOUT, Failure::was_not_heard).await
    }

    /// A GET whose answer is a stream.
    pub async fn stream(&self, path: &str) -> Result<Incoming, Failure> {
        let mut left = self.count();
        loop {
            left -= 1;
            match self.current().stream(Method::GET, path, Bytes::new()).await {
                Err(failure) if failure.is_of_the_server() && left > 0 => self.pass_over(),
                answer => return answer,
            }
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: &Bytes,
        timeout: Duration,
        may_go_on: impl Fn(&Failure) -> bool,
    ) -> Result<Value, Failure> {
        let mut left = self.count();
        loop {
            left -= 1;
            match self.current().call(method.clone(), path, body.clone(), timeout).await {
                Err(failure) if may_go_on(&failure) => {
                    self.pass_over();
                    if left == 0 {
                        return Err(failure);
                    }
                }
                answer => {
                    self.settle();
                    return answer;
                }
            }
        }
    }

    /// Waits for a lock. Returns the grant, and the time at which its server was asked. All servers are asked with
    /// the same request id, so if one server's answer with a grant is lost, the next server returns that grant.
    /// `wait_ms` covers all attempts: servers that cannot be used are skipped until the time is over. Without
    /// `wait_ms`, each server is asked once.
    pub async fn acquire(
        &self,
        path: &str,
        body: &Value,
        wait_ms: Option<u32>,
    ) -> Result<(Value, Instant), Failure> {
        let ask = async |body: &Value, timeout| self.current().post(path, body, timeout).await;
        self.wait(body, wait_ms, ask).await
    }

    /// As [`Servers::acquire`], for an answer that is a stream.
    pub async fn open(
        &self,
        path: &str,
        body: &Value,
        wait_ms: Option<u32>,
    ) -> Result<(Incoming, Instant), Failure> {
        let ask = async |body: &Value, timeout| {
            let answer = self.current().stream(Method::POST, path, body.to_string().into());
            let silent = |_| Failure::Silent { url: self.current().url().to_owned() };
            tokio::time::timeout(timeout, answer).await.map_err(silent)?
        };
        self.wait(body, wait_ms, ask).await
    }

    async fn wait<T>(
        &self,
        body: &Value,
        wait_ms: Option<u32>,
        ask: impl AsyncFn(&Value, Duration) -> Result<T, Failure>,
    ) -> Result<(T, Instant), Failure> {
        let mut body = body.clone();
        let has_id_of_its_own = body.get("request_id").is_none();
        if has_id_of_its_own {
            body["request_id"] = new_request_id().into();
        }
        let until = wait_ms.map(|ms| clock::now().plus_ms(ms));
        let mut left = self.count();
        loop {
            let asked = clock::now();
            let timeout = until.map_or(FOR_EVER, |until| {
                let left_ms = until.ms_since(asked);
                body["wait_ms"] = left_ms.into();
                CALL_TIMEOUT + Duration::from_millis(left_ms.into())
            });
            match ask(&body, timeout).await {
                Err(failure) if failure.is_of_the_server() => {
                    self.pass_over();
                    left -= 1;
                    if left == 0 {
                        if until.is_none_or(|until| clock::now() >= until) {
                            return Err(failure);
                        }
                        output::aside(format!("{failure}; trying again"));
                        tokio::time::sleep(PAUSE).await;
                        left = self.count();
                    }
                }
                // The server could not deliver its grant and has undone it.
                Err(Failure::Problem { body: problem, .. }) if has_id_of_its_own && has_ended(&problem) => {
                    body["request_id"] = new_request_id().into();
                }
                answer => {
                    self.settle();
                    return answer.map(|answer| (answer, asked));
                }
            }
        }
    }
}

/// A request id, which makes a call safe to repeat.
pub fn new_request_id() -> String {
    format!("cli-{:032x}", random::number::<u128>())
}

fn has_ended(problem: &Value) -> bool {
    problem["type"] == "request_id_reused" && problem["ended"] == true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(urls: &[&str]) -> Result<Servers, Failure> {
        let server = urls.iter().map(|&url| url.to_owned()).collect();
        Servers::new(&Options { server, ..Options::default() })
    }

    #[test]
    fn every_server_url_is_checked() {
        assert_eq!(servers(&["http://a:1", " http://b:2/ ", ""]).unwrap().count(), 2);
        assert!(matches!(servers(&["http://a:1", "b:2"]), Err(Failure::Usage(_))));
        assert!(matches!(servers(&[]), Err(Failure::Usage(_))));
    }

    #[test]
    fn a_client_that_must_stay_with_its_server_does_not_switch() {
        let servers = servers(&["http://a:1", "http://b:2"]).unwrap();
        servers.pass_over();
        assert_eq!(servers.current().url(), "http://b:2");
        servers.stay();
        servers.pass_over();
        assert_eq!((servers.current().url(), servers.count()), ("http://b:2", 1));
    }
}
