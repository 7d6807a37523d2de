//! How `once` handles the output of its command, and what it waits for.

use std::io::Read;

use super::*;

const TTL_MS: u32 = 900;

fn once(fake: &Fake, dir: &Path, script: &str) -> Child {
    under_lock(&fake.url, "once", dir, &[], script).spawn().unwrap()
}

/// The only outcome that was stored.
fn outcome(fake: &Fake) -> Value {
    let calls = fake.calls("/v1/once/finish");
    calls.last().expect("it was stored")["outcome"].clone()
}

/// A slow reader delays neither the renewals nor, once the command has ended, the outcome.
#[test]
fn a_slow_reader_delays_only_the_output() {
    crate::harness::run(async {
        const BYTES: usize = 600_000;
        let (fake, dir) = (Fake::start(TTL_MS), folder());
        let script = format!("head -c {BYTES} /dev/zero; touch written");
        let mut child = once(&fake, dir.path(), &script);
        let mut stdout = child.stdout.take().unwrap();
        fake.until_called("/v1/renew", 4).await;
        let reader = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            stdout.read_to_end(&mut all).map(|_| all.len())
        });
        assert_eq!(reader.await.unwrap().unwrap(), BYTES);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        let outcome = outcome(&fake);
        assert_eq!((&outcome["code"], &outcome["cut"]), (&json!(0), &json!(true)));
        assert_eq!(outcome["stdout"].as_str().unwrap().len(), 8_192);
    });
}

#[test]
fn an_outcome_does_not_wait_for_the_reader_of_the_output() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(TTL_MS), folder());
        // More than the pipe to the reader holds, and less than the read-ahead.
        let mut child = once(&fake, dir.path(), "head -c 100000 /dev/zero");
        let stdout = child.stdout.take().unwrap();
        fake.until_called("/v1/once/finish", 1).await;
        drop(stdout);
        assert_eq!(output(child).await.status.code(), Some(0));
    });
}

/// Processes that the command started belong to it: the lease is renewed until they have ended, and their output is
/// kept.
#[test]
fn a_once_ends_when_all_processes_of_its_command_have_ended() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(TTL_MS), folder());
        let script = "(while [ ! -e go ]; do sleep 0.02; done; echo late) & echo done; exit 3";
        let mut command = under_lock(&fake.url, "once", dir.path(), &["--keep-failure"], script);
        let child = command.spawn().unwrap();
        fake.until_called("/v1/renew", 4).await;
        assert_eq!(fake.count("/v1/once/finish"), 0);
        std::fs::write(dir.path().join("go"), "").unwrap();
        let ended = output(child).await;
        assert_eq!((ended.status.code(), text(&ended.stdout).as_str()), (Some(3), "done\nlate\n"));
        assert_eq!(outcome(&fake), json!({"code": 3, "stdout": "done\nlate\n"}));
    });
}

/// A daemon that has left the command's group and keeps its output open is not waited for.
#[test]
fn a_process_that_leaves_the_group_is_not_waited_for() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let script = "setsid sh -c 'echo $$ > pid; exec sleep 300' & while [ ! -s pid ]; do sleep 0.02; done; echo done";
        let mut child = once(&fake, dir.path(), script);
        fake.until_called("/v1/once/finish", 1).await;
        let daemon = process(&dir.path().join("pid")).await;
        let code = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap().code();
        let lives = is_running(daemon);
        signal(daemon, Signal::KILL);
        assert_eq!((code, lives), (Some(0), true));
        assert_eq!(outcome(&fake), json!({"code": 0, "stdout": "done\n"}));
    });
}

/// While the outcome cannot be stored, the lease is renewed, however long that takes.
#[test]
fn an_outcome_is_stored_as_soon_as_the_server_accepts_it() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(TTL_MS), folder());
        fake.answers("/v1/once/finish", Answer::Unavailable);
        let child = once(&fake, dir.path(), "echo done");
        // More than five attempts, after which an earlier version gave up.
        fake.until_called("/v1/once/finish", 7).await;
        fake.until_called("/v1/renew", 4).await;
        fake.answers("/v1/once/finish", Answer::Works);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    });
}

#[test]
fn a_signal_ends_processes_that_the_command_left_running() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let child = once(&fake, dir.path(), "sleep 300 & echo $! > pid");
        let left = process(&dir.path().join("pid")).await;
        signal(child.id(), Signal::TERM);
        let ended = output(child).await;
        let stat = || std::fs::read_to_string(format!("/proc/{left}/stat")).unwrap_or_default();
        eventually("it has ended", async || stat().is_empty() || stat().contains(") Z ")).await;
        // The command may still have been running.
        assert!(matches!(ended.status.code(), Some(0 | 143)), "{:?}", ended.status);
    });
}
