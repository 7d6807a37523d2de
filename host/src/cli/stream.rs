//! `watch` and `hold`: answers that go on.

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use serde_json::Value;

use super::client::{Client, encode_query};
use super::failure::Failure;
use super::{AcquireArgs, Options, output};

pub async fn watch(prefix: Option<&str>, options: &Options) -> Result<(), Failure> {
    let client = Client::new(&options.server)?;
    let path = format!("/v1/watch?prefix={}", encode_query(prefix.unwrap_or_default()));
    let mut lines = Lines::new(client.stream(Method::GET, &path, Bytes::new()).await?);
    while let Some(line) = lines.next(&client).await? {
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        if options.json {
            output::json(&event);
        } else if event["event"] == "lagged" {
            output::line(&format!("… {} events were missed", event["missed"]));
        } else {
            let [at, name, key, owner] =
                ["at", "event", "key", "owner"].map(|name| output::shown(&event[name]));
            // What an operator takes away has no owner here, and no token.
            let whose = match event["token"].as_u64() {
                Some(token @ 1..) => format!("  token {token}  {owner}"),
                _ => String::new(),
            };
            output::line(&format!("{at}  {name:<10}  {key}{whose}"));
        }
    }
    Err(Failure::Other("the proxy ended the stream".to_owned()))
}

pub async fn hold(args: &AcquireArgs, options: &Options) -> Result<(), Failure> {
    let client = Client::new(&options.server)?;
    let body = args.to_json().to_string().into();
    let mut lines = Lines::new(client.stream(Method::POST, "/v1/hold", body).await?);
    let mut reason = "the connection ended".to_owned();
    while let Some(line) = lines.next(&client).await.map_err(|failure| lost(&failure))? {
        let Ok(event) = serde_json::from_str::<Value>(&line) else { continue };
        match event["event"].as_str() {
            _ if options.json => output::json(&event),
            Some("granted") => {
                let lease = output::shown(&event["lease_id"]);
                output::line(&format!("granted  token {}  {lease}", event["token"]));
            }
            Some("renewed") => {
                output::line(&format!("renewed  expires in {}", output::time(&event["expires_in_ms"])));
            }
            _ => {}
        }
        if event["event"] == "lost" {
            reason = output::shown(&event["reason"]);
        }
    }
    Err(Failure::Lost(reason))
}

/// A connection that breaks takes its lease with it.
fn lost(failure: &Failure) -> Failure {
    Failure::Lost(failure.to_string())
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    held: Vec<u8>,
}

impl Lines {
    fn new(body: Incoming) -> Lines {
        Lines { body, held: Vec::new() }
    }

    async fn next(&mut self, client: &Client) -> Result<Option<String>, Failure> {
        loop {
            if let Some(end) = self.held.iter().position(|&byte| byte == b'\n') {
                let rest = self.held.split_off(end + 1);
                let line = std::mem::replace(&mut self.held, rest);
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(client.broken(&error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.held.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}
