//! A server that still runs on our data folder, because its proxy was killed together with its guardian, or
//! because the guardian has not finished yet.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::command_line;
use super::error::ManagedError;
use super::folder::Folder;
use super::guardian;

const POLL: Duration = Duration::from_millis(50);
/// The number of polls before a server is killed, and before the attempt is given up.
const PATIENCE: u32 = 600;
const LAST_PATIENCE: u32 = 100;

/// Stops every server of this folder, and waits until it is gone. Blocks for 35 s at most for each server,
/// and for a few milliseconds if there is none.
pub fn stop_all(folder: &Folder) -> Result<(), ManagedError> {
    let marks = [command_line::datadir(&folder.data()), command_line::datadir(&folder.unfinished())];
    for pid in servers(&marks) {
        stop(pid, &marks).map_err(|error| ManagedError::Leftover {
            pid,
            dir: folder.dir().to_path_buf(),
            why: error.to_string(),
        })?;
    }
    Ok(())
}

fn servers(marks: &[OsString]) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| serves(*pid, marks)).collect()
}

/// Whether the command line of a process names one of the folders. A zombie's command line is empty.
fn serves(pid: u32, marks: &[OsString]) -> bool {
    let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    let args: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let has = |mark: &[u8]| args.contains(&mark);
    !has(guardian::NAME.as_bytes()) && marks.iter().any(|mark| has(mark.as_bytes()))
}

fn stop(pid: u32, marks: &[OsString]) -> io::Result<()> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(number) = number else { return Ok(()) };
    let process = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    // Checked again, so that the descriptor surely names the server, and not a process that got its number
    // since.
    if !serves(pid, marks) {
        return Ok(());
    }
    tracing::warn!(pid, "stopping a server that an earlier proxy left on the data folder");
    for (signal, patience) in [(Signal::TERM, PATIENCE), (Signal::KILL, LAST_PATIENCE)] {
        if send(&process, signal)? || gone(pid, marks, patience) {
            return Ok(());
        }
    }
    Err(io::Error::other("it survives SIGKILL"))
}

/// Sends a signal. Returns whether the process was gone already.
fn send(process: &OwnedFd, signal: Signal) -> io::Result<bool> {
    match pidfd_send_signal(process, signal) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::SRCH) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn gone(pid: u32, marks: &[OsString], polls: u32) -> bool {
    for _ in 0..polls {
        if !serves(pid, marks) {
            return true;
        }
        sleep(POLL);
    }
    false
}
