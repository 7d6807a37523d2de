//! Which process a proxy is, and whether another one on this machine still runs.
//!
//! A member that was killed is seen to be gone at once where it ran on the same machine and in the same
//! process namespace: nothing more can come from a process that has ended.

/// Machine, process namespace, process and its start; empty where the system does not tell.
pub fn here() -> String {
    of(std::process::id()).unwrap_or_default()
}

/// Whether the process is known to have ended. `false` where it cannot be told from here.
pub fn has_ended(host: &str, here: &str) -> bool {
    let Some((place, process)) = split(host) else { return false };
    if split(here).is_none_or(|(own, _)| own != place) {
        return false;
    }
    match process.split_once('/').and_then(|(pid, start)| Some((pid.parse::<u32>().ok()?, start))) {
        Some((pid, start)) => started(pid).is_none_or(|now| now != start),
        None => false,
    }
}

/// Machine and namespace; process and start.
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

/// When the process was started, in ticks since the machine was; `None` where it has ended.
fn started(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything; what follows it does not.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let start = fields.nth(18)?;
    (!matches!(state, "Z" | "X")).then(|| start.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_one_that_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it starts");
        let (child_host, own) = (of(child.id()).expect("it runs"), here());
        assert!(!has_ended(&child_host, &own));
        assert!(!has_ended(&own, &own));
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert!(has_ended(&child_host, &own));
        let reused =
            child_host.replacen(&format!("/{}/", child.id()), &format!("/{}/", std::process::id()), 1);
        assert!(has_ended(&reused, &own), "another process has its number: {reused}");
        assert!(!has_ended(&child_host, &format!("elsewhere/{own}")), "it may run there");
        assert!(!has_ended("", &own) && !has_ended(&child_host, ""));
    }
}
