//! A private server with a real proxy in front of it.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lockkeeper::config::{ManagedConfig, ServerBinary};
use lockkeeper::mysql::managed::ManagedServer;
use lockkeeper::policy::Digest;
use serde_json::{Value, json};

use crate::http::Client;

const PORTS: Range<u16> = 20_000..30_000;
const START_LIMIT: Duration = Duration::from_secs(60);

/// The server, the proxy, and a folder for their files.
pub struct World {
    dir: tempfile::TempDir,
    server: ManagedServer,
    proxy: Proxy,
}

/// The process of a proxy. Dropping this kills the process.
pub struct Proxy {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
    log: PathBuf,
}

impl World {
    /// Starts a server and a proxy.
    pub async fn start() -> Result<World> {
        // The folder is beside the executable, on a real disk: a /tmp in memory would improve the figures of both
        // sides.
        let exe = std::env::current_exe()?;
        let beside = exe.parent().context("no folder")?;
        let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(beside)?;
        let config = ManagedConfig { binary: ServerBinary::Mysql, data_dir: dir.path().join("mysql") };
        let server = ManagedServer::start(&config).await?;
        let proxy = Proxy::start(dir.path(), server.url(), "").await?;
        Ok(World { dir, server, proxy })
    }

    /// Stops the proxy and the server.
    pub async fn stop(self) {
        drop(self.proxy);
        self.server.stop().await;
    }

    /// The folder for files of the bench.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The URL of the server.
    pub fn url(&self) -> &str {
        self.server.url()
    }

    /// The address of the proxy's API.
    pub fn api(&self) -> SocketAddr {
        self.proxy.api
    }

    /// Starts another proxy on the same server, in a folder of this name, with these lines at the end of its
    /// configuration.
    pub async fn another_proxy(&self, name: &str, more: &str) -> Result<Proxy> {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir)?;
        Proxy::start(&dir, self.url(), more).await
    }

    /// The proxy.
    pub fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Kills the proxy, and starts it again with the same configuration. Returns how long the start took.
    pub async fn kill_and_start(&mut self) -> Result<Duration> {
        self.proxy.kill();
        let began = Instant::now();
        self.proxy = Proxy::serve(self.dir.path(), self.proxy.api, self.proxy.admin).await?;
        Ok(began.elapsed())
    }

    /// The process of the server, as long as it runs.
    pub fn server_pid(&self) -> Option<u32> {
        self.server.pid()
    }

    /// The server's name and version.
    pub fn server(&self) -> String {
        format!("{} {}", self.server.kind(), self.server.version())
    }

    /// The proxy's resident memory in bytes.
    pub fn proxy_memory(&self) -> Result<u64> {
        self.proxy.memory()
    }
}

/// The policies of the bench's resources, besides the default policy.
const POLICIES: &str = r#"
[policies.default]
path = "builtin:default"
[policies.once]
path = "builtin:default"
[policies.once.settings]
primitive = "once"
wait_ms = 60000
[policies.central]
path = "builtin:default"
[policies.central.settings]
stripes = 1
wait_ms = 60000
[policies.striped]
path = "builtin:default"
[policies.striped.settings]
stripes = 100
wait_ms = 60000
[policies.advisory]
path = "builtin:default"
[policies.advisory.settings]
primitive = "advisory"
[policies.delegated]
path = "builtin:default"
[policies.delegated.settings]
delegate = "always"
[policies.fair]
path = "builtin:fair-groups"
[policies.held]
path = "builtin:default"
[policies.global]
path = "builtin:default"
[policies.global.settings]
global_order = true
[[routes]]
resource = "advisory/*"
policy = "advisory"
[[routes]]
resource = "delegated/*"
policy = "delegated"
[[routes]]
resource = "fair/*"
policy = "fair"
[[routes]]
resource = "global/*"
policy = "global"
[[routes]]
resource = "held/*"
policy = "held"
[[routes]]
resource = "once/*"
policy = "once"
[[routes]]
resource = "central/*"
policy = "central"
[[routes]]
resource = "striped/*"
policy = "striped"
"#;

impl Proxy {
    /// The address of the proxy's API.
    pub fn api(&self) -> SocketAddr {
        self.api
    }

    /// The address of the proxy's admin API.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Sends a `PUT` to the admin API, and returns the status of the answer.
    pub async fn put(&self, path: &str, body: &[u8]) -> Result<u16> {
        let length = body.len();
        let head = format!("PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
        let mut admin = Client::connect(self.admin).await?;
        admin.send(&[head.as_bytes(), body].concat()).await?;
        admin.answered().await
    }

    /// Replaces the component of a policy, and waits until the new one is live.
    pub async fn push(&self, policy: &str, component: &[u8]) -> Result<()> {
        let status = self.put(&format!("/v1/policies/{policy}"), component).await?;
        if !matches!(status, 200 | 202) {
            bail!("the policy was refused: {status}");
        }
        let digest = json!(Digest::of(component).to_string());
        let mut admin = Client::connect(self.admin).await?;
        loop {
            let listed: Value = serde_json::from_str(admin.get("/v1/policies").await?)?;
            let listed = listed["policies"].as_array().context("no list of policies")?;
            if listed.iter().any(|listed| listed["name"] == policy && listed["digest"] == digest) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The proxy's resident memory in bytes.
    pub fn memory(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib * 1024)
    }

    async fn start(dir: &Path, url: &str, more: &str) -> Result<Proxy> {
        let (api, admin) = (free_address()?, free_address()?);
        let config = dir.join("config.toml");
        let text = format!(
            "[store]\nurl = \"{url}\"\n[api]\nlisten = \"{api}\"\n[admin]\nlisten = \"{admin}\"\n{POLICIES}{more}"
        );
        fs::write(&config, text)?;
        Proxy::serve(dir, api, admin).await
    }

    async fn serve(dir: &Path, api: SocketAddr, admin: SocketAddr) -> Result<Proxy> {
        let (config, log) = (dir.join("config.toml"), dir.join("proxy.log"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockkeeper"));
        command.arg("serve").arg("--config").arg(&config);
        command.stdout(File::create(&log)?).stderr(File::options().append(true).open(&log)?);
        let child = command.spawn().context("cannot start the proxy")?;
        let mut proxy = Proxy { child, api, admin, log };
        proxy.wait_until_ready().await?;
        Ok(proxy)
    }

    fn kill(&mut self) {
        // The process may have ended by itself, so ignore errors.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("the proxy ended with {status}:\n{}", self.log_tail());
            }
            if self.ready().await.is_ok_and(|status| status == 200) {
                return Ok(());
            }
            if began.elapsed() > START_LIMIT {
                bail!("the proxy did not become ready:\n{}", self.log_tail());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn ready(&self) -> Result<u16> {
        Client::connect(self.admin).await?.status("/ready").await
    }

    fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An address on this machine that nobody listens on now. Its port is below the ports that Linux gives to outgoing
/// connections, because the measurements open thousands of connections before somebody listens on it.
pub fn free_address() -> Result<SocketAddr> {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    for _ in 0..PORTS.len() {
        let port = PORTS.start + TRIED.fetch_add(1, Relaxed) % PORTS.len() as u16;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return Ok(listener.local_addr()?);
        }
    }
    bail!("no port from {} to {} is free", PORTS.start, PORTS.end - 1)
}
