//! `watch` and `hold`: commands whose answers are streams.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::client::{CALL_TIMEOUT, encode_query};
use super::command::{rests_on_a_session, sleep_until};
use super::failure::Failure;
use super::output::{self, Printer};
use super::servers::Servers;
use super::{AcquireArgs, Options};
use crate::clock;
use crate::lock::Instant;

/// Runs `watch`.
pub async fn watch(prefix: Option<&str>, options: &Options) -> Result<(), Failure> {
    let servers = Servers::new(options)?;
    let path = format!("/v1/watch?prefix={}", encode_query(prefix.unwrap_or_default()));
    let mut lines = Lines::new(servers.stream(&path).await?);
    while let Some(line) = lines.next().await.map_err(Failure::Other)? {
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        if options.json {
            output::json(&event);
        } else if event["event"] == "lagged" {
            output::line(&format!("… {} events were missed", event["missed"]));
        } else {
            let [at, name, key, owner] =
                ["at", "event", "key", "owner"].map(|name| output::shown(&event[name]));
            // The event of a forced release has no owner and no token.
            let whose = match event["token"].as_u64() {
                Some(token @ 1..) => format!("  token {token}  {owner}"),
                _ => String::new(),
            };
            output::line(&format!("{at}  {name:<10}  {key}{whose}"));
        }
    }
    Err(Failure::Other("the proxy ended the stream".to_owned()))
}

/// The pause between two attempts to resume a lease.
const PAUSE: Duration = Duration::from_millis(200);

/// Runs `hold`.
pub async fn hold(args: &AcquireArgs, options: &Options) -> Result<(), Failure> {
    let servers = Servers::new(options)?;
    let printer = Printer::start();
    let failure = hold_on(args, &servers, &printer, options.json).await;
    printer.finish();
    Err(failure)
}

/// Holds a lock and returns the failure that ends the hold.
async fn hold_on(args: &AcquireArgs, servers: &Servers, printer: &Printer, as_json: bool) -> Failure {
    let (body, asked) = match servers.open("/v1/hold", &args.to_json(), args.wait).await {
        Ok(opened) => opened,
        Err(failure) => return failure,
    };
    let mut held = Held { lease_id: None, asked, heard: clock::now(), certain_until: asked };
    let mut lines = Lines::new(body);
    // Closing a connection would release the lease that another connection has resumed, so silent connections stay
    // open.
    let mut silent = Vec::new();
    loop {
        let why = match held.follow(&mut lines, servers, |event| print(event, printer, as_json)).await {
            End::Lost(reason) => return Failure::Lost(reason),
            End::Silent => {
                silent.push(lines);
                "the proxy is silent".to_owned()
            }
            End::Broken(why) => why,
        };
        servers.pass_over();
        lines = match held.go_on(servers, &why).await {
            Ok(lines) => lines,
            Err(failure) => return failure,
        };
    }
}

/// A lease that a proxy keeps alive.
struct Held {
    lease_id: Option<String>,
    /// When the request was sent; the proxy's times count from it.
    asked: Instant,
    /// When the last line was read.
    heard: Instant,
    certain_until: Instant,
}

/// The end of a stream.
enum End {
    Lost(String),
    Silent,
    /// The proxy stops or the connection broke, but the lease may still be valid.
    Broken(String),
}

impl Held {
    /// Prints the events of the lease until its stream ends.
    async fn follow(&mut self, lines: &mut Lines, servers: &Servers, print: impl Fn(&Value)) -> End {
        loop {
            let line = tokio::select! {
                biased;
                line = lines.next() => line,
                () = sleep_until(self.patient_until(servers)) => return End::Silent,
            };
            let line = match line {
                Ok(Some(line)) => line,
                Ok(None) => return End::Broken("the proxy ended the stream".to_owned()),
                Err(why) => return End::Broken(why),
            };
            let Ok(event) = serde_json::from_str::<Value>(&line) else { continue };
            self.hear(&event);
            if event["event"] == "granted" && rests_on_a_session(&event) {
                servers.stay();
            }
            print(&event);
            match event["event"].as_str() {
                Some("lost") => return End::Lost(output::shown(&event["reason"])),
                Some("draining") => return End::Broken("the proxy stops".to_owned()),
                _ => {}
            }
        }
    }

    /// Takes the times of a line. They count from the request, so a line that comes late promises no time that has
    /// passed.
    fn hear(&mut self, event: &Value) {
        let number = |name: &str| event[name].as_u64().and_then(|number| u32::try_from(number).ok());
        if let Some(id) = event["lease_id"].as_str() {
            self.lease_id = Some(id.to_owned());
        }
        self.heard = clock::now();
        // Proxies of earlier versions send only `waited_ms` with a grant, and neither with a renewal.
        let since_ms = number("since_ms").or_else(|| number("waited_ms"));
        let from = since_ms.map_or(self.heard, |since_ms| self.asked.plus_ms(since_ms));
        if let Some(left_ms) = number("expires_in_ms") {
            self.certain_until = from.plus_ms(left_ms);
        }
    }

    /// When to give up waiting for the next line. With several servers, another one is asked after half of the
    /// remaining time. A single server is waited for until the lease ends.
    fn patient_until(&self, servers: &Servers) -> Instant {
        if self.lease_id.is_none() {
            return self.heard.plus_us(CALL_TIMEOUT.as_micros() as u64);
        }
        let left_us = self.certain_until.us_since(self.heard);
        match servers.count() {
            1 => self.certain_until,
            _ => self.heard.plus_us(left_us / 2),
        }
    }

    /// Finds a server that resumes the lease, until the lease ends.
    async fn go_on(&mut self, servers: &Servers, why: &str) -> Result<Lines, Failure> {
        let Some(id) = &self.lease_id else { return Err(Failure::Lost(why.to_owned())) };
        let body: Bytes = json!({ "lease_id": id }).to_string().into();
        // Pause first, in case a server ends each stream at once.
        let left = Duration::from_micros(self.certain_until.us_since(clock::now()));
        tokio::time::sleep(PAUSE.min(left / 10)).await;
        loop {
            let asked = clock::now();
            let left = Duration::from_micros(self.certain_until.us_since(asked));
            if left.is_zero() {
                return Err(Failure::Lost(why.to_owned()));
            }
            let each = left / servers.count() as u32;
            let stream = servers.current().stream(Method::POST, "/v1/hold", body.clone());
            match tokio::time::timeout(each.max(PAUSE), stream).await {
                Ok(Ok(body)) => {
                    servers.settle();
                    (self.asked, self.heard) = (asked, clock::now());
                    return Ok(Lines::new(body));
                }
                // If the lock ends with its proxy, the lock is free by now.
                Ok(Err(failure @ Failure::NoProxy { .. })) if servers.is_fixed() => {
                    return Err(Failure::Lost(format!("{why}; it ends with its proxy: {failure}")));
                }
                Ok(Err(failure)) if !failure.is_of_the_server() => {
                    return Err(Failure::Lost(format!("{why}; {failure}")));
                }
                Ok(Err(_)) | Err(_) => {
                    servers.pass_over();
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

fn print(event: &Value, printer: &Printer, as_json: bool) {
    match event["event"].as_str() {
        _ if as_json => printer.line(event.to_string()),
        Some("granted") => {
            let lease = output::shown(&event["lease_id"]);
            printer.line(format!("granted  token {}  {lease}", event["token"]));
        }
        Some("renewed") => {
            printer.line(format!("renewed  expires in {}", output::time(&event["expires_in_ms"])));
        }
        _ => {}
    }
}

/// Splits a body into lines.
pub struct Lines {
    body: Incoming,
    split: Splitter,
}

impl Lines {
    /// The lines of `body`.
    pub fn new(body: Incoming) -> Lines {
        Lines { body, split: Splitter::default() }
    }

    /// The next line, or why the connection broke. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<String>, String> {
        loop {
            if let Some(line) = self.split.line()? {
                return Ok(Some(line));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(format!("the connection broke: {error}")),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.split.add(&data);
                    }
                }
            }
        }
    }
}

/// The longest line of a stream: more than an event with the longest names has.
const MAX_LINE: usize = 1 << 20;

/// Splits bytes into lines.
#[derive(Default)]
pub struct Splitter {
    held: Vec<u8>,
    /// How many of the held bytes are known to have no end of a line.
    searched: usize,
}

impl Splitter {
    /// Adds bytes of a body.
    pub fn add(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// The next line, without white space at its end. `None` if it is not complete.
    ///
    /// # Errors
    /// The line is longer than any that a proxy sends.
    pub fn line(&mut self) -> Result<Option<String>, String> {
        let end = memchr::memchr(b'\n', &self.held[self.searched..]);
        let Some(end) = end.map(|end| self.searched + end) else {
            self.searched = self.held.len();
            return match self.searched > MAX_LINE {
                true => Err(format!("the proxy sent a line of more than {MAX_LINE} bytes")),
                false => Ok(None),
            };
        };
        let rest = self.held.split_off(end + 1);
        let line = std::mem::replace(&mut self.held, rest);
        self.searched = 0;
        Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()))
    }
}
