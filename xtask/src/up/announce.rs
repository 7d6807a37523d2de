//! Waits until the proxy is ready, and tells the user what to do with it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::settings::Address;

const POLL: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(300);
const NEWS: Duration = Duration::from_secs(5);

/// Waits for the proxy that this program has become.
#[derive(clap::Args)]
pub struct Args {
    #[arg(long)]
    api: Address,
    #[arg(long)]
    admin: Address,
    /// Where guarded routes are served.
    #[arg(long = "guard", value_name = "URL")]
    guards: Vec<String>,
    /// The process to wait for: when it ends, there is nothing to say.
    #[arg(long)]
    parent: u32,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let began = Instant::now();
    let mut told = began;
    while parent_id() == args.parent && began.elapsed() < PATIENCE {
        let answer = ready(&args.admin);
        if let Ok((200, _)) = answer {
            if parent_id() == args.parent {
                welcome(args);
            }
            return Ok(ExitCode::SUCCESS);
        }
        if told.elapsed() >= NEWS {
            told = Instant::now();
            let why = match answer {
                Ok((_, body)) => body,
                Err(error) => format!("{error:#}"),
            };
            eprintln!("      {:>4} s  not ready yet: {why}", began.elapsed().as_secs());
        }
        sleep(POLL);
    }
    Ok(ExitCode::SUCCESS)
}

/// The status and body of `GET /ready`.
fn ready(admin: &Address) -> Result<(u16, String)> {
    let second = Duration::from_secs(1);
    match admin {
        Address::Tcp(address) => {
            let stream = TcpStream::connect_timeout(address, second).context("no connection")?;
            stream.set_read_timeout(Some(second))?;
            ask(stream)
        }
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).context("no connection")?;
            stream.set_read_timeout(Some(second))?;
            ask(stream)
        }
    }
}

fn ask(mut stream: impl Read + Write) -> Result<(u16, String)> {
    stream.write_all(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    // The answer ends with the connection; if it is kept open, with the silence after it.
    let read = stream.take(64 * 1024).read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        read.context("no answer")?;
        bail!("that is no HTTP");
    };
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("that is no HTTP")?, body.trim().to_owned()))
}

/// The URL of a listener, or its socket.
pub fn url(scheme: &str, address: &Address) -> String {
    match address {
        Address::Tcp(address) => format!("{scheme}://{address}"),
        socket @ Address::Unix(_) => socket.to_string(),
    }
}

fn welcome(args: &Args) {
    let (api, admin) = (url("http", &args.api), url("http", &args.admin));
    let guards: String = args.guards.iter().map(|url| format!("\n  guard  {url}")).collect();
    let curl = match &args.api {
        Address::Tcp(address) => format!("curl -s http://{address}/v1/acquire"),
        Address::Unix(path) => {
            format!("curl -s --unix-socket {} http://localhost/v1/acquire", path.display())
        }
    };
    eprintln!(
        "\nLockkeeper is ready.\n\
         \n  API    {api}\n  admin  {admin}   (/metrics, /v1/policies){guards}\n\
         \nTake a lock for 10 seconds, from another terminal:\n\
         \n  {curl} -d '{{\"resource\": \"orders/42\", \"ttl_ms\": 10000}}'\n\
         \nCtrl-C stops the proxy and its server; the data stays.\n"
    );
}
