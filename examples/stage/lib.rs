//! What the examples share, so that each of them shows its application and nothing else.
//!
//! An example is a program that plays one scene twice, without the proxy and with it. It starts
//! `lockkeeper serve` on a private server ([`house`]), and itself again as the processes of the
//! application ([`workers`]), which call the proxy or are guarded by one ([`serving`]); what came of both
//! goes into a table ([`report`]). An example that tells a story instead has a proxy for all of it ([`scene`]).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

mod house;
mod proxy;
mod report;
mod scene;
mod serving;
mod workers;

pub use anyhow::{Context, Result, bail, ensure};
pub use proxy::Proxy;
pub use report::Numbers;
pub use scene::{Rows, Scene};
pub use serving::Guard;
pub use workers::{LISTENING, Process, Server, Worker};

use house::House;
use serving::Guards;

/// Shows what goes wrong without the proxy, and that it does not with it.
///
/// Exit code 0: the fault was there without the proxy, and was not there with it.
#[derive(Parser)]
struct Args {
    /// The private server: mysql, mariadb, or the first that is found
    #[arg(long, default_value = "auto", value_parser = ["auto", "mysql", "mariadb"])]
    server: String,
    /// A server that runs already; the databases that are made on it are dropped at the end
    #[arg(long, value_name = "mysql://USER:PASS@HOST:PORT/")]
    url: Option<String>,
    /// The proxy's program [default: beside this one]
    #[arg(long, value_name = "FILE")]
    lockkeeper: Option<PathBuf>,
    /// Print the numbers as JSON, too, in the last line
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// What the example starts itself as.
    #[command(hide = true)]
    Worker(workers::Args),
}

/// One of the two times that the scene is played, on a database of its own.
pub struct Stage {
    database: String,
    proxy: Option<String>,
    guards: Guards,
}

impl Stage {
    /// Runs statements on the application's database.
    pub async fn sql(&self, statements: &str) -> Result<()> {
        Ok(self.db().await?.query_drop(statements).await?)
    }

    /// The one number that a query answers with.
    pub async fn number(&self, query: &str) -> Result<u64> {
        let number: Option<Option<u64>> = self.db().await?.query_first(query).await?;
        Ok(number.flatten().unwrap_or(0))
    }

    pub async fn db(&self) -> Result<Conn> {
        Ok(Conn::from_url(&self.database).await?)
    }

    /// The URL of the application's database.
    pub fn database(&self) -> &str {
        &self.database
    }

    pub fn has_proxy(&self) -> bool {
        self.proxy.is_some()
    }

    /// Starts a proxy that stands in front of the application: a second one, with this configuration.
    pub async fn guard(&self, config: &str) -> Result<Guard> {
        self.guards.start(config).await
    }

    /// Starts `count` worker processes, lets them begin together, and waits for all of them.
    pub async fn run_workers(&self, count: u32) -> Result<()> {
        let mut processes = Vec::new();
        for number in 0..count {
            processes.push(self.prepare(number).await?);
        }
        for process in &mut processes {
            process.go().await?;
        }
        for process in processes {
            process.ended().await?;
        }
        Ok(())
    }

    /// Starts a worker process that has begun when this returns.
    pub async fn start(&self, number: u32) -> Result<Process> {
        let mut process = self.prepare(number).await?;
        process.go().await?;
        Ok(process)
    }

    async fn prepare(&self, number: u32) -> Result<Process> {
        Process::start(&self.database, self.proxy.as_deref(), number).await
    }
}

/// The main function of an example. `settings` are those of the proxy's default policy; `play` is the
/// scene, and `work` what each worker process does in it.
pub async fn main(
    name: &str,
    settings: &str,
    play: impl AsyncFn(&Stage) -> Result<Numbers>,
    work: impl AsyncFn(Worker) -> Result<()>,
) -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.role {
        Some(Role::Worker(role)) => workers::run(role, work).await.map(|()| true),
        None => perform(name, settings, &args, play).await,
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The main function of an example that tells a story. `settings` are those of the proxy's default policy, and may go on
/// with other sections. The story fails if something does not happen as it should.
pub async fn tell(name: &str, settings: &str, story: impl AsyncFn(&Scene) -> Result<Rows>) -> ExitCode {
    match told(name, settings, &Args::parse(), story).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn told(
    name: &str,
    settings: &str,
    args: &Args,
    story: impl AsyncFn(&Scene) -> Result<Rows>,
) -> Result<()> {
    let house = unless_interrupted(House::open(name, settings, args)).await?;
    println!("{name} on {}", house.server);
    let rows = unless_interrupted(story(&house.scene())).await;
    let server = house.server.clone();
    house.close().await;
    let rows = rows?;
    for (what, number) in &rows {
        println!("  {what:<40} {number:>10}");
    }
    if args.json {
        println!("{}", scene::json(name, &server, &rows));
    }
    Ok(())
}

/// Whether the fault was there without the proxy, and was not there with it.
async fn perform(
    name: &str,
    settings: &str,
    args: &Args,
    play: impl AsyncFn(&Stage) -> Result<Numbers>,
) -> Result<bool> {
    let house = unless_interrupted(House::open(name, settings, args)).await?;
    let played = unless_interrupted(play_both(&house, play)).await;
    let server = house.server.clone();
    house.close().await;
    let (without, with) = played?;
    let report = report::Report { name, server: &server, without, with };
    println!("{report}");
    if args.json {
        println!("{}", report.json());
    }
    Ok(report.is_good())
}

/// Ctrl-C leaves nothing behind.
async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    }
}

async fn play_both(
    house: &House,
    play: impl AsyncFn(&Stage) -> Result<Numbers>,
) -> Result<(Numbers, Numbers)> {
    let without = Stage { database: house.database("without").await?, proxy: None, guards: house.guards() };
    let without = play(&without).await.context("without the proxy")?;
    let proxy = Some(house.proxy.clone());
    let with = Stage { database: house.database("with").await?, proxy, guards: house.guards() };
    Ok((without, play(&with).await.context("with the proxy")?))
}
