//! A proxy that runs: `lockkeeper serve`, and what its log tells of it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::Proxy;

const POLL: Duration = Duration::from_millis(20);
/// A private server is made and started within a few seconds; a busy machine takes longer.
const POLLS: u32 = 6_000;

/// Killed when it is dropped.
pub struct Serving {
    pub api: String,
    pub admin: String,
    /// Where it stands in front of an application.
    pub guard: Option<String>,
    /// That of the private server, where there is one.
    pub socket: Option<String>,
    child: Child,
}

impl Serving {
    /// Starts one, and waits until it is ready. `settings` are environment variables.
    pub async fn start(
        program: &Path,
        config: &Path,
        log: &Path,
        settings: &[(&str, &str)],
    ) -> Result<Serving> {
        let child = serve(program, config, log, settings)?;
        let serving = served(child, log).await?;
        until_ready(&serving.admin).await?;
        Ok(serving)
    }

    /// Stops it, which stops its private server.
    pub async fn stop(mut self) {
        if let Some(pid) = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait().await;
    }
}

/// What a proxy in front of an application is started with.
pub struct Guards {
    pub program: PathBuf,
    pub folder: PathBuf,
    /// The URL of its store.
    pub store: String,
}

/// A proxy in front of an application.
pub struct Guard {
    /// What it guards is reached here.
    pub address: String,
    /// The operators' API.
    pub admin: Proxy,
    serving: Serving,
}

impl Guards {
    /// Starts one with a configuration that is as a user has it, but for its addresses: those are free ports.
    pub async fn start(&self, config: &str) -> Result<Guard> {
        let file = self.folder.join("guard.toml");
        fs::write(&file, config)?;
        let settings = [
            ("LOCKKEEPER_STORE_URL", &*self.store),
            ("LOCKKEEPER_API_LISTEN", "127.0.0.1:0"),
            ("LOCKKEEPER_ADMIN_LISTEN", "127.0.0.1:0"),
            ("LOCKKEEPER_LOG_FORMAT", "json"),
        ];
        let log = self.folder.join("guard.log");
        let serving = Serving::start(&self.program, &file, &log, &settings).await?;
        let Some(address) = serving.guard.clone() else {
            bail!("the proxy does not say where its guard listens: {}", fs::read_to_string(log)?.trim());
        };
        Ok(Guard { address, admin: Proxy::new(&serving.admin), serving })
    }
}

impl Guard {
    pub async fn stop(self) {
        self.serving.stop().await;
    }
}

fn serve(program: &Path, config: &Path, log: &Path, settings: &[(&str, &str)]) -> Result<Child> {
    let mut command = Command::new(program);
    command.arg("serve").arg("--config").arg(config).stdin(Stdio::null()).kill_on_drop(true);
    let log = File::create(log)?;
    command.stdout(log.try_clone()?).stderr(log);
    // What the user sets for a proxy of theirs is not for this one.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LOCKKEEPER_") {
            command.env_remove(name);
        }
    }
    command.envs(settings.iter().copied());
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

async fn served(mut child: Child, log: &Path) -> Result<Serving> {
    for _ in 0..POLLS {
        let text = fs::read_to_string(log)?;
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let told = |name: &str| lines.iter().find_map(|line| line[name].as_str()).map(str::to_owned);
        if let (Some(api), Some(admin)) = (told("api"), told("admin")) {
            let (guard, socket) = (told("guard"), told("socket"));
            return Ok(Serving { api, admin, guard, socket, child });
        }
        if let Some(status) = child.try_wait()? {
            bail!("the proxy ended with {status}: {}", text.trim());
        }
        sleep(POLL).await;
    }
    bail!("the proxy does not serve: {}", fs::read_to_string(log)?.trim())
}

async fn until_ready(admin: &str) -> Result<()> {
    let admin = Proxy::new(admin);
    for _ in 0..POLLS {
        if admin.get("/ready").await?.0 == 200 {
            return Ok(());
        }
        sleep(POLL).await;
    }
    bail!("the proxy's store is not ready: {}", admin.get("/ready").await?.1)
}
