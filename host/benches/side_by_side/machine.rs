//! Properties of the machine that affect the figures.

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::stats;
use crate::world::World;

/// The number of files that the clients of a crowd need, and that the proxy needs.
const FILES: u64 = 12_000;

/// Raises this process's limit of open files, which the proxy inherits.
pub fn raise_file_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= FILES);
    if enough(limit.current) {
        return Ok(());
    }
    let maximum = if enough(limit.maximum) { limit.maximum } else { Some(FILES) };
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .with_context(|| format!("{FILES} open files are needed: raise the hard limit (ulimit -Hn)"))
}

/// Describes the machine and the server.
pub fn describe(world: &World) -> Result<Value> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory_kib = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let date = Command::new("date").args(["-u", "+%F %R UTC"]).output();
    let date = date.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned()).unwrap_or_default();
    Ok(json!({
        "cpu": model.unwrap_or(std::env::consts::ARCH),
        "cores": std::thread::available_parallelism().map_or(0, |cores| cores.get()),
        "memory_mib": memory_kib.unwrap_or(0) / 1024,
        "kernel": kernel.trim(),
        "server": world.server(),
        "fsync_us": fsync_us(world)?,
        "date": date,
    }))
}

/// The median time of a small durable write on the disk of the server's data.
fn fsync_us(world: &World) -> Result<u64> {
    let path = world.dir().join("fsync");
    let mut file = File::create(&path)?;
    let mut times = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        file.write_all(&[0; 512])?;
        file.sync_data()?;
        times.push(began.elapsed());
    }
    fs::remove_file(&path)?;
    Ok(stats::micros(stats::median(&times)) as u64)
}
