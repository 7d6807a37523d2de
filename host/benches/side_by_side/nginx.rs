//! nginx as a reverse proxy, without root and with all files in one folder.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::http::Client;
use crate::world::free_address;

const START_LIMIT: Duration = Duration::from_secs(10);
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Connections on both sides are kept as long as the bench needs them. With `reuseport` the kernel distributes
/// connections over the workers; without it, an idle worker may take all of them.
const CONFIG: &str = r#"
worker_processes @WORKERS@;
daemon off;
pid nginx.pid;
error_log error.log;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    keepalive_requests 1000000000;
    upstream application {
        server @UPSTREAM@;
        keepalive 64;
        keepalive_requests 1000000000;
    }
    server {
        listen @LISTEN@ reuseport;
        location / {
            proxy_pass http://application;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }
    }
}
"#;

/// The master process of nginx. Dropping this ends the master and its workers.
pub struct Nginx {
    child: Child,
    pub address: SocketAddr,
    said: PathBuf,
}

impl Nginx {
    /// Starts `program` in front of `upstream`, with one worker per core and its files in `dir`, and waits until it
    /// serves.
    pub async fn start(program: &Path, dir: &Path, upstream: SocketAddr) -> Result<Nginx> {
        fs::create_dir_all(dir)?;
        let address = free_address()?;
        let workers = std::thread::available_parallelism()?.to_string();
        let mut text = CONFIG
            .replace("@WORKERS@", &workers)
            .replace("@UPSTREAM@", &upstream.to_string())
            .replace("@LISTEN@", &address.to_string());
        if geteuid().is_root() {
            // Its workers would switch to a user that may not exist on this machine.
            text.insert_str(0, "user root root;");
        }
        let config = dir.join("nginx.conf");
        fs::write(&config, text)?;
        let said = dir.join("said.log");
        let mut command = Command::new(program);
        // nginx takes the folder name as a plain prefix, so the name must end with a slash.
        command.arg("-p").arg(dir.join("")).arg("-c").arg(&config);
        command.stdout(File::create(&said)?).stderr(File::options().append(true).open(&said)?);
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut nginx = Nginx { child, address, said };
        nginx.wait_until_ready().await?;
        Ok(nginx)
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("nginx ended with {status}:\n{}", self.log());
            }
            if self.ready().await.is_ok_and(|status| status == 200) {
                return Ok(());
            }
            if began.elapsed() > START_LIMIT {
                bail!("nginx did not become ready:\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn ready(&self) -> Result<u16> {
        Client::connect(self.address).await?.status("/").await
    }

    fn log(&self) -> String {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        read(&self.said) + &read(&self.said.with_file_name("error.log"))
    }

    /// Whether the master has ended. It ends after its workers.
    fn stop(&mut self) -> Result<bool> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM)?;
        let began = Instant::now();
        while began.elapsed() < STOP_LIMIT {
            if self.child.try_wait()?.is_some() {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(false)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Ask the master to stop first: if it were killed, its workers would stay.
        if !self.stop().unwrap_or(false) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
