//! Redis with an append-only file that is synced at each write, and a client that locks as Redis's documentation recommends:
//! `SET key value NX PX ttl`, and a script that deletes the key if it still has the value.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::world::free_address;

const START_LIMIT: Duration = Duration::from_secs(10);
/// Deletes the key if it still has the value of this owner.
const RELEASE: &str =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end";

/// A server. Dropping this kills it.
pub struct Redis {
    child: Child,
    address: SocketAddr,
}

impl Redis {
    /// Starts `program` with its files in `dir`, and waits until it answers.
    pub async fn start(program: &Path, dir: &Path) -> Result<Redis> {
        fs::create_dir_all(dir)?;
        let address = free_address()?;
        let mut command = Command::new(program);
        command.arg("--bind").arg(address.ip().to_string()).arg("--port").arg(address.port().to_string());
        command.args(["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir"]).arg(dir);
        let log = File::create(dir.join("redis.log"))?;
        command.stderr(log.try_clone()?).stdout(log);
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let redis = Redis { child, address };
        let began = Instant::now();
        while let Err(error) = redis.connect(0).await {
            if began.elapsed() > START_LIMIT {
                bail!("Redis did not become ready: {error:#}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(redis)
    }

    /// A connection, and the script on the server.
    pub async fn connect(&self, owner: u64) -> Result<Client> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let mut client =
            Client { stream, buffer: Vec::new(), owner: owner.to_string(), script: String::new() };
        client.send(&["SCRIPT", "LOAD", RELEASE]).await?;
        client.script = client.answer().await?.trim_start_matches(|c| c != '\n').trim().to_owned();
        Ok(client)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to the server.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    owner: String,
    script: String,
}

impl Client {
    /// Takes the lock unless it is held. Returns whether it was taken.
    pub async fn try_acquire(&mut self, key: &str) -> Result<bool> {
        let owner = self.owner.clone();
        self.send(&["SET", key, &owner, "NX", "PX", "10000"]).await?;
        match self.answer().await? {
            answer if answer.starts_with("+OK") => Ok(true),
            answer if answer.starts_with("$-1") => Ok(false),
            answer => bail!("SET was answered {answer}"),
        }
    }

    /// Gives the lock back.
    pub async fn release(&mut self, key: &str) -> Result<()> {
        let (script, owner) = (self.script.clone(), self.owner.clone());
        self.send(&["EVALSHA", &script, "1", key, &owner]).await?;
        match self.answer().await? {
            answer if answer.starts_with(":1") => Ok(()),
            answer => bail!("the release was answered {answer}"),
        }
    }

    async fn send(&mut self, words: &[&str]) -> Result<()> {
        let mut text = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| text += &format!("${}\r\n{word}\r\n", word.len()));
        Ok(self.stream.write_all(text.as_bytes()).await?)
    }

    /// One answer as the server sent it: a line, or a line with its length and a line of that length.
    async fn answer(&mut self) -> Result<String> {
        self.buffer.clear();
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("Redis closed the connection");
            }
            let text = std::str::from_utf8(&self.buffer)?;
            let lines = if text.starts_with('$') && !text.starts_with("$-1") { 2 } else { 1 };
            if text.matches("\r\n").count() == lines {
                return Ok(text.to_owned());
            }
        }
    }
}
