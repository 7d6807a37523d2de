//! The `lockkeeper` command: arguments → configuration → logs → [`App::build`] → run → timed drain.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use lockkeeper::app::{self, App, StartError};
use lockkeeper::cli::{self, Cli, Command, ServeArgs};
use lockkeeper::config::Config;
use lockkeeper::telemetry;

/// Bad usage, or a configuration with faults.
const EXIT_CONFIG: u8 = 2;

/// How long threads for blocking work may go on after everything else has ended.
const LAST_THREADS: Duration = Duration::from_secs(1);

/// A worker looks for what has come from the network after so many tasks at the latest. With tokio's 61 cycles on own
/// keys were 2 % fewer, and what is done once 4 %.
const EVENT_INTERVAL: u32 = 31;

/// A tenth of the proxy's time went into malloc. With this allocator cycles on own keys are 4 % more. It is
/// built without huge pages: with them 10,000 waiters took half as much memory again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return cli::bad_usage(&error),
    };
    match cli.command {
        Command::Serve(args) => serve(&args),
        Command::Client(command) => cli::run(command, &cli.options),
    }
}

fn serve(args: &ServeArgs) -> ExitCode {
    let config = match cli::config(args) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if args.check {
        return cli::checked(&config, &app::check(&config));
    }
    if let Err(error) = telemetry::init_logs(&config.log) {
        eprintln!("lockkeeper: {error}");
        return ExitCode::from(EXIT_CONFIG);
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let result = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.runtime.threads)
        .event_interval(EVENT_INTERVAL)
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let has_served = runtime.block_on(run(config))?;
            if has_served {
                // A thread may still wait for a policy to be compiled. The process that compiles it ends with this one.
                runtime.shutdown_timeout(LAST_THREADS);
            }
            Ok(())
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Errors name their causes themselves.
            eprintln!("lockkeeper: {error}");
            match error.downcast_ref::<StartError>() {
                Some(error) if error.is_fault_of_the_configuration() => ExitCode::from(EXIT_CONFIG),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Returns whether the proxy has served; if not, it was stopped during its start.
async fn run(config: Config) -> anyhow::Result<bool> {
    let stop = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let asked_to_stop = async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::pin!(asked_to_stop);
    let app = tokio::select! {
        app = App::build(config) => app?,
        () = &mut asked_to_stop => return Ok(false),
    };
    let mut serving = tokio::spawn(app.run(stop.clone()));
    tokio::select! {
        // It could not begin, or a panic ended it.
        ended = &mut serving => return Ok(ended?.map(|()| true)?),
        () = &mut asked_to_stop => {}
    }
    stop.cancel();
    Ok(serving.await?.map(|()| true)?)
}
