//! The application's processes: the example's own program, started again in another role.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mysql_async::Conn;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::Proxy;

const READY: &str = "ready";
/// What a server says first, before its address.
pub const LISTENING: &str = "listening on ";

#[derive(clap::Args)]
pub struct Args {
    number: u32,
    #[arg(long)]
    database: String,
    #[arg(long)]
    proxy: Option<String>,
}

/// What a worker process has.
pub struct Worker {
    /// From 0.
    pub number: u32,
    pub db: Conn,
    /// There is none where the scene is played without it.
    pub proxy: Option<Proxy>,
}

impl Worker {
    /// Tells the example's main process something, which waits for it with [`Process::until`].
    pub fn say(&self, word: &str) -> Result<()> {
        let mut out = std::io::stdout();
        writeln!(out, "{word}")?;
        Ok(out.flush()?)
    }
}

/// What a worker process does from its start to its end.
pub async fn run(args: &Args, work: impl AsyncFn(Worker) -> Result<()>) -> Result<()> {
    let db = Conn::from_url(&args.database).await?;
    let worker = Worker { number: args.number, db, proxy: args.proxy.as_deref().map(Proxy::new) };
    worker.say(READY)?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    ensure!(!line.is_empty(), "the example has ended");
    work(worker).await
}

/// A worker process, as the example's main process sees it.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts one, and waits until it is connected and ready to go.
    pub async fn start(database: &str, proxy: Option<&str>, number: u32) -> Result<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["worker", &number.to_string(), "--database", database]);
        command.args(proxy.map(|proxy| format!("--proxy={proxy}")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start a worker")?;
        let input = child.stdin.take().context("a worker without input")?;
        let output = child.stdout.take().context("a worker without output")?;
        let mut process = Process { child, input, output: BufReader::new(output).lines() };
        process.until(READY).await?;
        Ok(process)
    }

    pub(crate) async fn go(&mut self) -> Result<()> {
        Ok(self.input.write_all(b"go\n").await?)
    }

    /// Waits until the worker says this.
    pub async fn until(&mut self, word: &str) -> Result<()> {
        while let Some(line) = self.output.next_line().await? {
            if line == word {
                return Ok(());
            }
        }
        anyhow::bail!("a worker ended and never said `{word}`")
    }

    /// Stops the process where it is (`SIGSTOP`), and returns when it stands still.
    pub async fn pause(&self) -> Result<()> {
        let pid = self.signal(Signal::STOP)?;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
            if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Lets it go on (`SIGCONT`).
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT).map(|_| ())
    }

    fn signal(&self, signal: Signal) -> Result<u32> {
        let id = self.child.id().context("the worker has ended")?;
        let pid = Pid::from_raw(id.cast_signed()).context("no process number")?;
        kill_process(pid, signal)?;
        Ok(id)
    }

    /// Waits until it has ended, and well.
    pub async fn ended(mut self) -> Result<()> {
        let status = self.child.wait().await?;
        ensure!(status.success(), "a worker ended with {status}");
        Ok(())
    }
}

/// A server of the application, in a process of its own. Killed when it is dropped.
pub struct Server {
    /// As `http://` and an address.
    pub address: String,
    _child: Child,
}

impl Server {
    /// Starts it, and waits until it has said where it listens.
    pub async fn start(mut command: Command) -> Result<Server> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let program = command.as_std().get_program().to_owned();
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut lines = BufReader::new(child.stdout.take().context("a server without output")?).lines();
        let line = lines.next_line().await?.unwrap_or_default();
        let address = line.strip_prefix(LISTENING).map(str::to_owned);
        let address =
            address.with_context(|| format!("{} does not say where it listens", program.display()))?;
        Ok(Server { address, _child: child })
    }
}
