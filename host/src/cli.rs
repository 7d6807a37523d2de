//! The command line.
//!
//! The application runs `serve` itself. Every other command is a client of a running proxy; [`run`] runs it.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, process_env};
use crate::policy::{COMPILER_COMMAND, CompileArgs, run_compiler};

mod args;
mod client;
mod command;
mod failure;
mod fleet;
mod locks;
mod output;
mod policy;
mod servers;
mod show;
pub(crate) mod stream;
mod tls;
mod token;
mod unix;
mod versions;

pub use args::{AcquireArgs, Mode};
pub use policy::PolicyCommand;
pub use token::TokenCommand;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  any other failure
  2  bad usage, or a configuration with faults
  3  contended: the lock is held, too many wait for it, or somebody else has committed first
  4  lost: the lease has ended or was taken away
  5  unavailable: no proxy answers, it cannot reach its store, or you have sent too many requests; or no registry answers
  6  refused: the policy said no, a proxy would not load it, or the proxy does not let you (see --credentials-file);
     or a registry does not let you, or has something else
  7  a condition of `lockkeeper policy replay --fail-on` is met
  `lockkeeper run` and `once` exit as their command does (128 + n where signal n ended it); their own failures
  are 110 + the code above (114: the lease was lost, and the command was stopped), 126 where the command cannot
  be run and 127 where it is not found. A signal that ends the wait for the lock gives 128 + n.

Several servers (--server http://a:7070,http://b:7070) are proxies of one store. One that is gone, that stops or that
cannot reach its store is passed over for the next one: a wait goes on with the same request id, and a lease
is kept alive by any of them. A release is not repeated once it may have arrived.";

/// A lock proxy: MySQL's locking primitives, governed by WebAssembly policies.
#[derive(Parser, Debug)]
#[command(name = "lockkeeper", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub struct Cli {
    /// The options of every client command.
    #[command(flatten)]
    pub options: Options,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The options of every command that talks to a proxy.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// URL of the proxy's API, or its Unix socket as unix:PATH. For several proxies of one store, separate URLs with
    /// commas or repeat the option: if one proxy cannot be used, the next one is tried
    #[arg(
        long,
        global = true,
        env = "LOCKKEEPER_SERVER",
        default_value = "http://127.0.0.1:7070",
        value_delimiter = ',',
        value_name = "URL"
    )]
    pub server: Vec<String>,
    /// URL of the proxy's admin API, or its Unix socket as unix:PATH. `force`, `policy` and `fleet` use it
    #[arg(
        long,
        global = true,
        env = "LOCKKEEPER_ADMIN",
        default_value = "http://127.0.0.1:7071",
        value_name = "URL"
    )]
    pub admin: String,
    /// File with the token that proves who you are to the proxy, and nothing else. Nobody else may be able to read it
    #[arg(long, global = true, env = "LOCKKEEPER_CREDENTIALS_FILE", value_name = "FILE")]
    pub credentials_file: Option<PathBuf>,
    /// File with the certificates (PEM) of the authorities that sign the proxy's certificate [default: the system's]
    #[arg(long, global = true, env = "LOCKKEEPER_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// File with a certificate (PEM) that proves who you are to the proxy
    #[arg(long, global = true, env = "LOCKKEEPER_CERT_FILE", value_name = "FILE")]
    pub cert_file: Option<PathBuf>,
    /// File with the private key (PEM) of the certificate, if it is another file
    #[arg(long, global = true, env = "LOCKKEEPER_KEY_FILE", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Send the token to another machine without TLS, and do not warn of it
    #[arg(long, global = true, env = "LOCKKEEPER_ALLOW_PLAINTEXT")]
    pub allow_plaintext: bool,
    /// Print answers and failures as JSON. For the logs of `serve`, set `log.format` in config.toml
    #[arg(long, global = true)]
    pub json: bool,
}

/// A command of `lockkeeper`.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the proxy
    ///
    /// Reads config.toml in the working directory, or the file that --config names. Without a file, the defaults apply:
    /// a private MySQL server is started.
    ///
    /// Example: lockkeeper serve --config /etc/lockkeeper/config.toml
    Serve(ServeArgs),
    /// A command that talks to a running proxy, or works on policy files.
    #[command(flatten)]
    Client(ClientCommand),
}

/// The arguments of `serve`.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration, the policies and their settings, report every fault, and exit
    #[arg(long)]
    pub check: bool,
}

/// A command that is a client of a proxy.
#[derive(Subcommand, Debug)]
pub enum ClientCommand {
    /// Hold a lock while a command runs
    ///
    /// Takes the lock, runs the command, keeps the lease alive, and releases the lock when the command has ended. If
    /// the lease cannot be renewed, the command and its process group are stopped (TERM, then KILL) before the lease
    /// ends. The command's environment has LOCKKEEPER_TOKEN, LOCKKEEPER_KEY and LOCKKEEPER_LEASE_ID.
    ///
    /// The lock is held until all processes in the command's process group have ended. A process that leaves the
    /// group (a daemon, setsid) is neither waited for nor stopped.
    ///
    /// INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to the group, unless the signal was already ignored (nohup).
    /// At a terminal the command is the foreground job: it can read the terminal, and it receives Ctrl-C and Ctrl-Z
    /// instead of lockkeeper. A stopped command (Ctrl-Z, STOP) keeps its lock until the lease ends. The lease is not
    /// renewed meanwhile, and the command is killed before the lease ends unless it is continued in time.
    ///
    /// If lockkeeper is killed, a guard process ends the command at once; if lockkeeper hangs, the guard ends the
    /// command before the lease ends. If the guard is killed as well, the command may outlive its lease: then only
    /// fencing tokens protect what the command writes to.
    ///
    /// Example: lockkeeper run --ttl 10s --wait 1m backups/db -- pg_dump shop
    Run(command::RunArgs),
    /// Run a command once; later calls print its outcome
    ///
    /// The resource's policy must use the primitive `once`. The first call runs the command and stores its exit code
    /// and the first 8 KiB of its standard output. All other calls, including those made while it runs, print that
    /// output and exit with that code. A command that fails may be run again. For signals, terminals and lost leases
    /// see `lockkeeper run --help`. lockkeeper tries to store the outcome for as long as the lease lasts, or for 2 s
    /// after a signal.
    ///
    /// Example: lockkeeper once invoices/2026-11 -- ./send-invoices
    Once(command::OnceArgs),
    /// Read a version, or commit a change that is based on it
    ///
    /// The resource's policy must use the primitive `version`. A commit succeeds only if nobody has committed since
    /// the read.
    #[command(subcommand)]
    Version(VersionCommand),
    /// Take a lock and print its lease
    ///
    /// The lease ends after its ttl (time to live) unless `renew` extends it.
    ///
    /// Example: lockkeeper acquire orders/42 --wait 5s --ttl 30s
    Acquire(AcquireArgs),
    /// Extend a lease
    ///
    /// Example: lockkeeper renew "$LEASE" --ttl 1m
    Renew {
        /// The lease's id, which `acquire` printed
        lease_id: String,
        /// New time until the lease ends, e.g. 500ms, 10s, 2m [default: the policy's]
        #[arg(long, value_parser = args::duration_ms, value_name = "TIME")]
        ttl: Option<u32>,
    },
    /// Release a lease
    ///
    /// Example: lockkeeper release "$LEASE"
    Release {
        /// The lease's id, which `acquire` printed
        lease_id: String,
    },
    /// Hold a lock until this command is stopped
    ///
    /// The proxy renews the lease while the connection is open. Each event of the lease is printed. If the proxy
    /// stops or fails, another --server takes the lease over.
    ///
    /// Example: lockkeeper hold orders/42
    Hold(AcquireArgs),
    /// List held locks
    ///
    /// Example: lockkeeper ls orders/
    Ls {
        /// Only list keys with this prefix
        prefix: Option<String>,
        /// The most locks to list
        #[arg(long, default_value_t = 1000, value_name = "N")]
        limit: usize,
    },
    /// Show a lock: who holds it, why each waiter waits and about how long, and recent decisions about it
    ///
    /// The queue is that of the proxy that is asked. An estimate is the median of the key's recent holds, with the 10th
    /// and the 90th percentile.
    ///
    /// Example: lockkeeper show orders/42
    Show {
        /// The key of the lock, e.g. orders/42
        name: String,
        /// Only show the waiters of this owner
        #[arg(long)]
        owner: Option<String>,
    },
    /// Take a lock away from its holders
    ///
    /// For a holder that hangs, or that will not release the lock in time. The holders learn of the loss at their next
    /// renewal, and the next waiter gets the lock at once. A holder that goes on with its work is only stopped by what
    /// compares fencing tokens. With `[auth]`, this needs the right `force`.
    ///
    /// Example: lockkeeper force orders/42
    Force {
        /// The key of the lock, as `lockkeeper ls` prints it
        key: String,
    },
    /// Print the events of locks until stopped
    ///
    /// Example: lockkeeper watch orders/
    Watch {
        /// Only watch keys with this prefix
        prefix: Option<String>,
    },
    /// List the proxies of the store, and the policy versions that each has acknowledged
    ///
    /// Example: lockkeeper fleet
    Fleet,
    /// Make a token that proves who a client is
    #[command(subcommand)]
    Token(TokenCommand),
    /// Write, check and replace policies
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// End a command whose parent process is gone
    #[command(name = command::guard::COMMAND, hide = true)]
    Guard,
    /// Compile the component on standard input
    #[command(name = COMPILER_COMMAND, hide = true)]
    Compile(CompileArgs),
}

/// A command about versions.
#[derive(Subcommand, Debug)]
pub enum VersionCommand {
    /// Print a version, and the value that was committed with it
    ///
    /// Example: lockkeeper version read stock/17
    Read {
        /// The resource whose version is read, e.g. stock/17
        resource: String,
        /// A label for the policy; may be given several times
        #[arg(long = "label", value_parser = args::label, value_name = "NAME=VALUE")]
        labels: Vec<(String, String)>,
    },
    /// Commit a new version, unless somebody has committed since the read
    ///
    /// Prints the new version. Exits with 3 if somebody else has committed first.
    ///
    /// Example: lockkeeper version commit stock/17 42 '{"left": 9}'
    Commit {
        /// The resource whose version changes, e.g. stock/17
        resource: String,
        /// The version that was read
        version: u64,
        /// JSON value to store with the new version
        value: Option<String>,
        /// A label for the policy; may be given several times
        #[arg(long = "label", value_parser = args::label, value_name = "NAME=VALUE")]
        labels: Vec<(String, String)>,
        /// Id that makes this call safe to repeat: the same id commits once
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
}

/// Runs a client command and returns its exit code.
pub fn run(command: ClientCommand, options: &Options) -> ExitCode {
    if matches!(command, ClientCommand::Guard) {
        return command::guard::run();
    }
    if let ClientCommand::Compile(args) = &command {
        return run_compiler(args);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::complain(&format!("cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let is_run = matches!(command, ClientCommand::Run(_) | ClientCommand::Once(_));
    let outcome = runtime.block_on(dispatch(command, options));
    // A name lookup may still block a thread of its own.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.report(options.json);
            ExitCode::from(if is_run { failure.code_of_run() } else { failure.code() })
        }
    }
}

/// Reports bad arguments, or prints the help, and returns the exit code.
pub fn bad_usage(error: &clap::Error) -> ExitCode {
    let as_json = std::env::args().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if as_json && error.use_stderr() {
        let failure = failure::Failure::Usage(error.render().to_string().trim_end().to_owned());
        failure.report(true);
        return ExitCode::from(failure.code());
    }
    error.exit()
}

/// Loads the configuration of `serve`. If it has faults, prints all of them on standard error and returns the exit
/// code.
pub fn config(args: &ServeArgs) -> Result<Config, ExitCode> {
    match Config::load(args.config.as_deref(), &process_env()) {
        Ok(config) => Ok(config),
        Err(faults) => Err(in_configuration(&faults)),
    }
}

/// Reports the result of `serve --check` for a configuration that could be read; `faults` are the faults found later.
pub fn checked(config: &Config, faults: &[impl Display]) -> ExitCode {
    for warning in &config.warnings {
        eprintln!("warning: {warning}");
    }
    if faults.is_empty() {
        println!("the configuration is fine");
        return ExitCode::SUCCESS;
    }
    in_configuration(faults)
}

fn in_configuration(faults: &[impl Display]) -> ExitCode {
    for fault in faults {
        eprintln!("{fault}");
    }
    let s = if faults.len() == 1 { "" } else { "s" };
    eprintln!("lockkeeper: {} fault{s} in the configuration", faults.len());
    ExitCode::from(2)
}

/// Runs the command and returns its exit code if it succeeds.
async fn dispatch(command: ClientCommand, options: &Options) -> Result<u8, failure::Failure> {
    match command {
        ClientCommand::Run(args) => return command::run(args, options).await,
        ClientCommand::Once(args) => return command::once(args, options).await,
        ClientCommand::Version(command) => versions::run(command, options).await,
        ClientCommand::Acquire(args) => locks::acquire(&args, options).await,
        ClientCommand::Renew { lease_id, ttl } => locks::renew(&lease_id, ttl, options).await,
        ClientCommand::Release { lease_id } => locks::release(&lease_id, options).await,
        ClientCommand::Hold(args) => stream::hold(&args, options).await,
        ClientCommand::Ls { prefix, limit } => locks::list(prefix.as_deref(), limit, options).await,
        ClientCommand::Show { name, owner } => show::show(&name, owner.as_deref(), options).await,
        ClientCommand::Force { key } => locks::force(&key, options).await,
        ClientCommand::Watch { prefix } => stream::watch(prefix.as_deref(), options).await,
        ClientCommand::Fleet => fleet::show(options).await,
        ClientCommand::Policy(command) => policy::run(command, options).await,
        ClientCommand::Token(command) => token::run(command, options),
        ClientCommand::Guard | ClientCommand::Compile(_) => Ok(()),
    }
    .map(|()| 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn run_takes_a_command_with_its_own_options() {
        let cli =
            Cli::try_parse_from(["lockkeeper", "run", "--ttl", "10s", "r", "--", "sh", "-c", "x", "--json"]);
        let Command::Client(ClientCommand::Run(args)) = cli.unwrap().command else { panic!("run") };
        assert_eq!(args.acquire.ttl, Some(10_000));
        assert_eq!(args.command, ["sh", "-c", "x", "--json"]);
    }

    #[test]
    fn bad_usage_is_refused() {
        for bad in [
            &["acquire"][..],
            &["acquire", "r", "--ttl", "soon"],
            &["acquire", "r", "--mode", "upsert"],
            &["run", "r"],
            &["frobnicate"],
        ] {
            let args = ["lockkeeper"].iter().chain(bad);
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
    }
}
