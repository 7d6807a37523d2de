//! Commands that run while a lock is held, with real processes, signals, pipes and terminals.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{Client, Kind, Proxy, database, eventually, folder, is_running, signal};

mod fake;
mod killed;
mod losing;
mod output;
mod run;
mod servers;
mod signals;
mod terminal;

use fake::{Answer, Fake};

/// The program, as a client of the server at this address. It has its own process group, as if a shell had started
/// it.
fn program(server: &str, args: &[&str]) -> Command {
    let mut command = crate::harness::lockkeeper();
    command.args(args).env("LOCKKEEPER_SERVER", server).stdin(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command
}

fn lockkeeper(proxy: &Proxy, args: &[&str]) -> Command {
    program(&format!("http://{}", proxy.api_address()), args)
}

/// A command under a lock. `script` is run by `sh`, in its own folder.
fn under_lock(server: &str, call: &str, dir: &Path, options: &[&str], script: &str) -> Command {
    let mut command = program(server, &[&[call], options, &["job", "--", "sh", "-c", script]].concat());
    command.current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command to its end, outside the test's own thread.
async fn ended(mut command: Command) -> Output {
    let run = tokio::task::spawn_blocking(move || command.output());
    run.await.expect("no panic").expect("the command starts")
}

async fn output(child: Child) -> Output {
    tokio::task::spawn_blocking(move || child.wait_with_output()).await.unwrap().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn until_file(path: &Path) {
    eventually(&format!("{} is there", path.display()), async || path.exists()).await;
}

/// The content of a file that a script has written in one step.
async fn written(path: &Path) -> String {
    until_file(path).await;
    eventually("it is written", async || std::fs::metadata(path).is_ok_and(|file| file.len() > 0)).await;
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

/// The process whose number a script has written to a file.
async fn process(path: &Path) -> u32 {
    written(path).await.parse().expect("a process number")
}

/// A command that ignores TERM, records that TERM came, and records every 20 ms that it still runs.
const STUBBORN: &str = "trap 'touch term' TERM; echo $$ > pid; while true; do touch alive; sleep 0.02; done";

/// When the stubborn command last ran.
fn last_alive(dir: &Path) -> SystemTime {
    std::fs::metadata(dir.join("alive")).unwrap().modified().unwrap()
}
