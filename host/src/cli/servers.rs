//! Several proxies of one store: what one cannot do now, the next one does.
//!
//! A lease belongs to the store, so any proxy renews and releases it, and a repeated `request_id` gives the
//! same lease on each. A call that may be repeated goes from server to server; one that may not is passed on
//! only where it has not arrived.

use std::cell::Cell;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;

use super::client::{CALL_TIMEOUT, Client};
use super::failure::Failure;
use super::output;
use crate::clock;
use crate::lock::Instant;
use crate::random;

/// Between two rounds in which no server could be used.
const PAUSE: Duration = Duration::from_millis(500);
/// As long as a call may take that waits for as long as a policy says.
const FOR_EVER: Duration = Duration::from_secs(30 * 24 * 3600);

pub struct Servers {
    clients: Vec<Client>,
    /// The one that is asked first.
    current: Cell<usize>,
    /// The one that said something last.
    used: Cell<Option<usize>>,
    /// Nothing that others could do counts.
    is_fixed: Cell<bool>,
}

impl Servers {
    pub fn new(urls: &[String]) -> Result<Servers, Failure> {
        let urls = urls.iter().map(|url| url.trim()).filter(|url| !url.is_empty());
        let clients = urls.map(Client::new).collect::<Result<Vec<_>, _>>()?;
        if clients.is_empty() {
            return Err(Failure::Usage("there is no --server".to_owned()));
        }
        Ok(Servers { clients, current: Cell::new(0), used: Cell::new(None), is_fixed: Cell::new(false) })
    }

    pub fn count(&self) -> usize {
        if self.is_fixed.get() { 1 } else { self.clients.len() }
    }

    /// From now on the server that is used is used alone: it alone knows a lock that rests on a session of its own.
    pub fn stay(&self) {
        self.is_fixed.set(true);
    }

    pub fn is_fixed(&self) -> bool {
        self.is_fixed.get()
    }

    pub fn current(&self) -> &Client {
        &self.clients[self.current.get()]
    }

    /// Notes that the current server is of no use now.
    pub fn pass_over(&self) {
        if !self.is_fixed.get() {
            self.current.set((self.current.get() + 1) % self.clients.len());
        }
    }

    /// Notes that the current server has answered, and says so where it is another one than before. To be
    /// called when what the answer demands is done.
    pub fn settle(&self) {
        let before = self.used.replace(Some(self.current.get()));
        if let Some(before) = before.filter(|before| *before != self.current.get()) {
            output::aside(format!(
                "{} is used now; {} cannot be",
                self.current().url(),
                self.clients[before].url()
            ));
        }
    }

    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::GET, path, &Bytes::new(), CALL_TIMEOUT, Failure::is_of_the_server).await
    }

    /// A call that may be repeated: each server is asked once, for as long as `timeout`.
    pub async fn post(&self, path: &str, body: &Value, timeout: Duration) -> Result<Value, Failure> {
        self.call(Method::POST, path, &body.to_string().into(), timeout, Failure::is_of_the_server).await
    }

    /// A call that must not be repeated once it may have arrived.
    pub async fn post_once(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Method::POST, path, &body.to_string().into(), CALL_TIMEOUT, Failure::was_not_heard).await
    }

    /// A call whose answer is a stream.
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

    /// Waits for a lock: its grant, and when the server was asked that gave it. All servers are asked with one
    /// request id, so that what one has granted and could not say is what the next one says. The wait counts over
    /// all of them; one that cannot be used is passed over until it has ended. Where the policy says how long to
    /// wait, each server is asked once.
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
                // A server that could not say what it had granted has taken it back.
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

/// Makes a call safe to repeat.
pub fn new_request_id() -> String {
    format!("cli-{:032x}", random::number::<u128>())
}

fn has_ended(problem: &Value) -> bool {
    problem["type"] == "request_id_reused" && problem["ended"] == true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_url_is_checked() {
        let servers =
            |urls: &[&str]| Servers::new(&urls.iter().map(|&url| url.to_owned()).collect::<Vec<_>>());
        assert_eq!(servers(&["http://a:1", " http://b:2/ ", ""]).unwrap().count(), 2);
        assert!(matches!(servers(&["http://a:1", "b:2"]), Err(Failure::Usage(_))));
        assert!(matches!(servers(&[]), Err(Failure::Usage(_))));
    }

    #[test]
    fn a_session_is_known_to_its_own_server() {
        let servers = Servers::new(&["http://a:1".to_owned(), "http://b:2".to_owned()]).unwrap();
        servers.pass_over();
        assert_eq!(servers.current().url(), "http://b:2");
        servers.stay();
        servers.pass_over();
        assert_eq!((servers.current().url(), servers.count()), ("http://b:2", 1));
    }
}
