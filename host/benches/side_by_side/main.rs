//! Compares the proxy with the same SQL run directly, its guarded routes with nginx, and its delegated keys
//! with Redis: in one run, on one server,
//! with full durability.
//!
//! The two sides alternate in short rounds, so that a disturbance of the machine affects both. The load comes from
//! this process, on the same cores, so the client is as small as possible. `cargo xtask bench` runs the bench.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

mod advisory;
mod auth;
mod contended;
mod costs;
mod crowd;
mod cycles;
mod decision;
mod delegated;
mod direct;
mod guard;
mod held;
mod http;
mod languages;
mod machine;
mod nginx;
mod once;
mod recording;
mod redis;
mod report;
mod rounds;
mod shadow;
mod single;
mod stats;
mod stripes;
mod threads;
mod upstream;
mod world;

use report::{Report, Row};
use serde_json::json;
use world::World;

// What is measured in this process is measured with the allocator of the proxy.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures the proxy against the same SQL run directly.
#[derive(Parser)]
struct Args {
    /// Exit with code 1 if a target is missed
    #[arg(long)]
    check: bool,
    /// Run shorter rounds, to try the bench itself; the figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Write the figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Run only the measurements whose name contains this text
    #[arg(value_name = "NAME")]
    only: Option<String>,
    /// The nginx program to compare guarded routes with; without it, this comparison is skipped
    #[arg(long, value_name = "FILE")]
    nginx: Option<PathBuf>,
    /// The redis-server program to compare delegated keys with; without it, this comparison is skipped
    #[arg(long, value_name = "FILE")]
    redis: Option<PathBuf>,
    /// Serve as the application behind the guarded routes, until standard input ends
    #[arg(long, hide = true)]
    upstream: bool,
    /// Ignored: Cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = if args.upstream { upstream::serve().map(|()| true) } else { run(&args) };
    match done {
        Ok(met) if met || !args.check => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the measurements. Returns whether every measured target is met.
fn run(args: &Args) -> Result<bool> {
    machine::raise_file_limit()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let world = World::start().await?;
        let mut report = Report::new(machine::describe(&world)?);
        let measured = measure(args, &world, &mut report).await;
        world.stop().await;
        measured?;
        print!("{}", report.table());
        if let Some(out) = &args.out {
            let text = serde_json::to_string_pretty(&report.json())?;
            std::fs::write(out, text + "\n").with_context(|| format!("cannot write {}", out.display()))?;
            println!("\nwritten to {}", out.display());
        }
        Ok(report.met())
    })
}

async fn measure(args: &Args, world: &World, report: &mut Report) -> Result<()> {
    let wanted = |name: &str| {
        let wanted = args.only.as_deref().is_none_or(|only| name.contains(only));
        if wanted {
            eprintln!("measuring {name} …");
        }
        wanted
    };
    // This measurement comes first, because it needs a server that is otherwise idle.
    if wanted("single") {
        single::measure(world, args.quick, report).await.context("single")?;
    }
    if wanted("cycles") {
        cycles::measure(world, args.quick, report).await.context("cycles")?;
    }
    if wanted("rights") {
        auth::rights(report).context("rights")?;
    }
    if wanted("encrypted") {
        auth::encrypted(world, args.quick, report).await.context("encrypted")?;
    }
    if wanted("recording") {
        recording::measure(world, args.quick, report).await.context("recording")?;
    }
    if wanted("shadow") {
        shadow::measure(world, args.quick, report).await.context("shadow")?;
    }
    if wanted("contended") {
        contended::measure(world, args.quick, report).await.context("contended")?;
    }
    if wanted("fleet") {
        contended::fleet(world, args.quick, report).await.context("fleet")?;
    }
    if wanted("delegated") {
        delegated::measure(world, args.redis.as_deref(), args.quick, report).await.context("delegated")?;
    }
    if wanted("advisory") {
        advisory::measure(world, args.quick, report).await.context("advisory")?;
    }
    if wanted("decision") {
        decision::measure(report).context("decision")?;
    }
    if wanted("crowd") {
        crowd::measure(world, args.quick, report).await.context("crowd")?;
    }
    if wanted("once") {
        once::measure(world, args.quick, report).await.context("once")?;
    }
    if wanted("stripes") {
        stripes::measure(world, args.quick, report).await.context("stripes")?;
    }
    if wanted("threads") {
        threads::measure(world, args.quick, report).await.context("threads")?;
    }
    if wanted("guard") {
        guard::measure(world, args.nginx.as_deref(), args.quick, report).await.context("guard")?;
    }
    if wanted("held") {
        held::measure(args.quick, report).await.context("held")?;
    }
    let deadlocks = direct::deadlocks(world.url()).await?;
    report.add(Row {
        name: "deadlocks (1213) over the whole bench",
        target: "0",
        figure: deadlocks.to_string(),
        note: String::new(),
        met: Some(deadlocks == 0),
        details: json!({ "deadlocks": deadlocks }),
    });
    Ok(())
}
