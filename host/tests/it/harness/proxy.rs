//! A proxy in its own process.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use super::Client;

/// The settings of a proxy.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub url: String,
    /// Additional keys of `[store]` in config.toml.
    pub store: String,
    /// Additional keys of `[api]` in config.toml.
    pub api: String,
    /// Additional sections of config.toml. If `[policies` is not in them, the default policy gets the settings for
    /// tests: nobody waits unless asked to.
    pub sections: String,
}

/// The process of a proxy. Dropping this kills the process.
pub struct Proxy {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
    guards: Vec<SocketAddr>,
    log: PathBuf,
    dir: Option<tempfile::TempDir>,
}

impl Proxy {
    /// Starts a proxy on a database, and waits until it serves (but not until its store is ready).
    pub async fn start(url: &str) -> Proxy {
        Proxy::with(Settings { url: url.to_owned(), ..Settings::default() }).await
    }

    /// Starts a proxy with these settings.
    pub async fn with(settings: Settings) -> Proxy {
        Proxy::of(lockkeeper(), settings).await
    }

    /// Starts a proxy of another build.
    pub async fn of(mut command: Command, settings: Settings) -> Proxy {
        let dir = super::folder();
        let config = dir.path().join("config.toml");
        fs::write(&config, settings.to_toml()).expect("a configuration");
        command.arg("serve").arg("--config").arg(&config).current_dir(dir.path());
        let log = dir.path().join("log");
        let mut proxy = Proxy::start_as(command, log).await;
        proxy.dir = Some(dir);
        proxy
    }

    /// Starts a proxy in a folder, configured only by the environment.
    pub async fn bare(dir: &Path, env: &[(&str, &str)]) -> Proxy {
        let mut command = lockkeeper();
        command.arg("serve").current_dir(dir).envs(env.iter().copied());
        command.env("LOCKKEEPER_API_LISTEN", "127.0.0.1:0").env("LOCKKEEPER_ADMIN_LISTEN", "127.0.0.1:0");
        command.env("LOCKKEEPER_LOG_FORMAT", "json");
        Proxy::start_as(command, dir.join("log")).await
    }

    async fn start_as(command: Command, log: PathBuf) -> Proxy {
        tokio::task::spawn_blocking(move || Proxy::spawn(command, log)).await.expect("the proxy starts")
    }

    fn spawn(mut command: Command, log: PathBuf) -> Proxy {
        command.stdin(Stdio::null());
        command.stdout(fs::File::create(&log).expect("a log"));
        command.stderr(fs::File::options().append(true).open(&log).expect("a log"));
        let mut child = command.spawn().expect("the proxy's binary");
        for _ in 0..1200 {
            if let Some((api, admin, guards)) = addresses(&log) {
                return Proxy { child, api, admin, guards, log, dir: None };
            }
            if let Some(status) = child.try_wait().expect("its own child") {
                panic!("the proxy ended ({status}): {}", fs::read_to_string(&log).unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(25));
        }
        let _ = child.kill();
        panic!("the proxy does not serve: {}", fs::read_to_string(&log).unwrap_or_default());
    }

    /// A client of the lock API, with its own connections.
    pub fn client(&self) -> Client {
        Client::new(self.api)
    }

    /// A client of the admin API.
    pub fn admin(&self) -> Client {
        Client::new(self.admin)
    }

    /// A client of the listener of health.
    pub fn health(&self) -> Client {
        Client::new(self.health_address())
    }

    /// The address of the listener of health.
    pub fn health_address(&self) -> SocketAddr {
        let log = self.log();
        let line = log.lines().find(|line| line.contains("\"serving\"")).expect("it serves");
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let url = line["health"].as_str().expect("it has a listener of health");
        url.trim_start_matches("http://").parse().expect("an address")
    }

    /// A client of the first guarded listener.
    pub fn guarded(&self) -> Client {
        Client::new(self.guard_address())
    }

    /// The address of the first guarded listener.
    pub fn guard_address(&self) -> SocketAddr {
        *self.guards.first().expect("a guarded listener")
    }

    /// The configuration file, for a proxy from [`Proxy::with`].
    pub fn config_file(&self) -> PathBuf {
        self.dir.as_ref().expect("it has a folder of its own").path().join("config.toml")
    }

    /// The address of the lock API.
    pub fn api_address(&self) -> SocketAddr {
        self.api
    }

    /// The address of the admin API.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A number in `/metrics`: the sum over all series whose labels contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.admin().get("/metrics").await.text;
        let wanted = text.lines().filter(|line| {
            let series = line.split(['{', ' ']).next() == Some(name);
            series && labels.iter().all(|label| line.contains(label))
        });
        wanted.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Resident memory, in bytes.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs").count()
    }

    /// Sends a signal to the proxy.
    pub fn signal(&self, signal: Signal) {
        super::signal(self.pid(), signal);
    }

    /// Kills the proxy, and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until the proxy has ended, for up to 60 s. Returns its exit code.
    pub async fn ended(&mut self) -> Option<i32> {
        for _ in 0..1200 {
            if let Some(status) = self.child.try_wait().expect("its own child") {
                return status.code();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the proxy does not end: {}", self.log());
    }

    /// Waits until `/ready` is 200.
    pub async fn until_ready(&self) {
        let admin = self.admin();
        super::eventually("the proxy is ready", async || admin.get("/ready").await.status == 200).await;
    }
}

/// How many lines of a proxy's log are shown when a test fails.
const LAST_LINES: usize = 50;

impl Drop for Proxy {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
            eprintln!("what the proxy at {} said last:\n{}", self.api, last.join("\n"));
        }
    }
}

impl Settings {
    fn to_toml(&self) -> String {
        let Settings { url, store, api, sections } = self;
        let mut text = format!(
            "[store]\nurl = \"{url}\"\n{store}\n[api]\nlisten = \"127.0.0.1:0\"\n{api}\n\
             [admin]\nlisten = \"127.0.0.1:0\"\n[log]\nformat = \"json\"\n{sections}\n"
        );
        if !sections.contains("[policies") {
            text.push_str("[policies.default]\npath = \"builtin:default\"\n");
        }
        text
    }
}

/// The build under test.
pub fn lockkeeper() -> Command {
    program(Path::new(env!("CARGO_BIN_EXE_lockkeeper")))
}

/// A build of the program, without the variables of this process's environment that would affect it.
pub fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LOCKKEEPER_") {
            command.env_remove(name);
        }
    }
    command
}

/// The addresses in the proxy's log.
fn addresses(log: &Path) -> Option<(SocketAddr, SocketAddr, Vec<SocketAddr>)> {
    let log = BufReader::new(fs::File::open(log).ok()?);
    let line = log.lines().map_while(Result::ok).find(|line| line.contains("\"serving\""))?;
    let line: serde_json::Value = serde_json::from_str(&line).ok()?;
    let address = |url: &str| url.split_once("://")?.1.parse().ok();
    let guards = line["guard"].as_str()?.split(',').filter_map(address).collect();
    Some((address(line["api"].as_str()?)?, address(line["admin"].as_str()?)?, guards))
}
