//! `cargo xtask torture`: real proxies, servers and clients, with faults at random.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::steps::{self, Progress};
use crate::{paths, servers, wasm};

/// Of the file system for the data of a single server.
const DISK: &str = "2g";

/// Breaks real servers, real proxies and the connections between them at random, under load, and checks each grant.
///
/// Proxies and servers are killed, paused and stopped in order; connections are cut, stalled, killed, or lose an answer;
/// a server is read-only, has too few connections, its clock is set, or its disk is full; a policy is replaced. Ends with exit code 0 if no
/// lock had two holders, each token was above the ones before, no lease was lost before its end, locks were granted again
/// after each round of faults, and nothing was held in the end.
#[derive(clap::Args)]
pub struct Args {
    /// For how long.
    #[arg(long, value_name = "M", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// The database: one server, or a cluster of three.
    #[arg(long, value_enum, default_value = "mysql")]
    server: Server,
    /// Which faults, in which order; what they meet differs from run to run. Without it, another seed each time.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// When proxies grant the keys of `lease` from their memory.
    #[arg(long, value_name = "WHEN", default_value = "never", value_parser = ["never", "contended", "always"])]
    delegate: String,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Server {
    Mysql,
    Mariadb,
    /// MariaDB of Debian's sid.
    MariadbNext,
    /// Three nodes of MariaDB.
    Galera,
    /// Three members of MySQL, one of which is the primary.
    GroupReplication,
}

impl Server {
    fn program(self) -> servers::Kind {
        match self {
            Server::Mysql | Server::GroupReplication => servers::Kind::Mysql,
            Server::Mariadb => servers::Kind::Mariadb,
            Server::MariadbNext => servers::Kind::MariadbNext,
            Server::Galera => servers::Kind::Galera,
        }
    }

    /// As the test knows it.
    fn name(self) -> &'static str {
        match self {
            Server::Mysql => "mysql",
            Server::Mariadb | Server::MariadbNext => "mariadb",
            Server::Galera => "galera",
            Server::GroupReplication => "group-replication",
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut progress = Progress::new(2);
    progress.next("getting the database server");
    wasm::ensure()?;
    let program = servers::ensure(args.server.program(), false)?;
    servers::ensure(servers::Kind::Faketime, false)?;
    let seed = args.seed.unwrap_or_else(|| std::process::id().into());
    progress.next(&format!("{} minutes of faults, with the seed {seed}", args.minutes));
    let mut test = steps::cargo(&["test", "--workspace", "--test", "it", "--"]);
    test.args(["--ignored", "--nocapture", "--exact", "torture::no_promise_is_broken_by_faults"]);
    let disk = paths::target().join("torture-disk");
    fs::create_dir_all(&disk).with_context(|| format!("cannot make {}", disk.display()))?;
    let mut test = match on_own_disk(&disk, &Command::new("true")).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => {
            let mut test = on_own_disk(&disk, &test);
            test.env("LOCKKEEPER_TORTURE_DISK", &disk);
            test
        }
        _ => {
            println!("no disk will be full: `unshare` cannot mount one here");
            test
        }
    };
    test.env("LOCKKEEPER_TORTURE_SERVER", args.server.name());
    test.env("LOCKKEEPER_TORTURE_PROGRAM", program);
    test.env("LOCKKEEPER_TORTURE_FAKETIME", servers::faketime()?);
    test.env("LOCKKEEPER_TORTURE_MINUTES", args.minutes.to_string());
    test.env("LOCKKEEPER_TORTURE_SEED", seed.to_string());
    test.env("LOCKKEEPER_TORTURE_DELEGATE", &args.delegate);
    Ok(ExitCode::from(steps::code(steps::status(&mut test)?)))
}

/// The command with a file system of its own in this folder, which nothing else sees.
fn on_own_disk(disk: &Path, command: &Command) -> Command {
    let mut own = Command::new("unshare");
    own.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
    own.arg(format!("mount -t tmpfs -o size={DISK} torture \"$0\" && exec \"$@\""));
    own.arg(disk).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => own.env(name, value),
            None => own.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        own.current_dir(dir);
    }
    own.stdin(Stdio::null());
    own
}

fn minutes(text: &str) -> Result<f64, String> {
    let bound = || "a number of minutes above 0, 10,000 at most".to_owned();
    text.parse().ok().filter(|minutes| 0.0 < *minutes && *minutes <= 10_000.0).ok_or_else(bound)
}
