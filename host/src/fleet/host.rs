//! Identifies the process of a proxy, and tells whether another process on this machine still runs.
//!
//! A killed member is detected at once if it ran on the same machine and in the same process namespace, because a
//! process that has ended cannot write any more. A process that this one may not inspect (`hidepid`, `ProtectProc`,
//! another user) counts as running.

use std::io::{self, ErrorKind};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// The machine, process namespace, process id and start time of this process. Empty if the system does not tell, and
/// in a simulation, where all proxies are one process.
pub fn here() -> String {
    #[cfg(any(test, feature = "simulation"))]
    if crate::clock::simulated::now().is_some() {
        return String::new();
    }
    of(std::process::id()).unwrap_or_default()
}

/// Whether the process is known to have ended. `false` if this process cannot tell.
pub fn has_ended(host: &str, here: &str) -> bool {
    let Some((place, process)) = split(host) else { return false };
    if split(here).is_none_or(|(own, _)| own != place) {
        return false;
    }
    match process.split_once('/').and_then(|(pid, start)| Some((pid.parse::<u32>().ok()?, start))) {
        Some((pid, start)) => ended(read_stat(pid), start, || is_absent(pid)),
        None => false,
    }
}

/// Whether the process that started at `start` has ended, judged by the current `/proc` entry of its process id.
fn ended(stat: io::Result<String>, start: &str, is_absent: impl FnOnce() -> bool) -> bool {
    match stat {
        Ok(stat) => match state_and_start(&stat) {
            Some((state, now)) => matches!(state, "Z" | "X") || now != start,
            None => false,
        },
        // The entry of a hidden process is not found either, but a signal test detects the process.
        Err(error) if error.kind() == ErrorKind::NotFound => is_absent(),
        Err(_) => false,
    }
}

fn is_absent(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return false };
    matches!(test_kill_process(pid), Err(Errno::SRCH))
}

/// Splits into machine and namespace, and process id and start time.
fn split(host: &str) -> Option<(&str, &str)> {
    let (rest, start) = host.rsplit_once('/')?;
    let (place, pid) = rest.rsplit_once('/')?;
    Some((place, host.get(host.len() - pid.len() - start.len() - 1..)?))
}

fn of(pid: u32) -> Option<String> {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{}/{}/{pid}/{}", machine.trim(), namespace.display(), started(pid)?))
}

/// The start time of a running process, in ticks since the machine started.
fn started(pid: u32) -> Option<String> {
    let stat = read_stat(pid).ok()?;
    state_and_start(&stat).map(|(_, start)| start.to_owned())
}

fn read_stat(pid: u32) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
}

fn state_and_start(stat: &str) -> Option<(&str, &str)> {
    // The process name may contain any characters; the fields after it do not.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((fields.next()?, fields.nth(18)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_is_distinguished_from_an_ended_process() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it starts");
        let (child_host, own) = (of(child.id()).expect("it runs"), here());
        assert!(!has_ended(&child_host, &own));
        assert!(!has_ended(&own, &own));
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert!(has_ended(&child_host, &own));
        let reused = format!("{own}0");
        assert!(has_ended(&reused, &own), "another process has its number: {reused}");
        assert!(!has_ended(&child_host, &format!("elsewhere/{own}")), "it may run there");
        assert!(!has_ended("", &own) && !has_ended(&child_host, ""));
    }

    #[test]
    fn a_process_that_cannot_be_inspected_counts_as_running() {
        let stat = |state: &str| format!("7 (a) b) {state} {} 4242 0", ["0"; 18].join(" "));
        let seen = |stat: io::Result<String>, absent: bool| ended(stat, "4242", || absent);
        assert!(!seen(Ok(stat("S")), true));
        assert!(seen(Ok(stat("Z")), false), "it has ended, and its parent has not looked yet");
        assert!(ended(Ok(stat("S")), "4241", || false), "its number has gone to another process");
        assert!(!seen(Ok(String::new()), true), "nothing can be told from that");
        assert!(!seen(Err(ErrorKind::PermissionDenied.into()), true), "it may be running");
        assert!(!seen(Err(ErrorKind::NotFound.into()), false), "it is hidden");
        assert!(seen(Err(ErrorKind::NotFound.into()), true));
        assert!(!is_absent(std::process::id()) && !is_absent(1), "another user's as well");
    }
}
