//! A lease is lost: the command ends before the lease ends, whatever happens.

use std::io::Write as _;
use std::os::fd::OwnedFd;

use super::*;

const TTL: Duration = Duration::from_millis(1_500);

/// Checks that the command was seen running before the end of the lease that a call of `path` last granted, and never
/// after that.
async fn ended_in_time(fake: &Fake, path: &str, dir: &Path) {
    let pid = process(&dir.join("pid")).await;
    eventually("the command has ended", async || !is_running(pid)).await;
    assert!(last_alive(dir) < fake.last_grant(path) + TTL, "the command outlived its lease");
}

#[test]
fn a_lease_is_renewed_for_as_long_as_its_command_runs() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(900), folder());
        let script =
            "while [ ! -e go ]; do sleep 0.02; done; test $LOCKKEEPER_LEASE_ID = the-lease && exit 9";
        let child = under_lock(&fake.url, "run", dir.path(), &[], script).spawn().unwrap();
        fake.until_called("/v1/renew", 4).await;
        assert_eq!(fake.count("/v1/release"), 0);
        std::fs::write(dir.path().join("go"), "").unwrap();
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(9), "{}", text(&ended.stderr));
        assert_eq!(fake.count("/v1/release"), 1);
    });
}

#[test]
fn a_command_is_stopped_before_a_lease_that_cannot_be_renewed_ends() {
    crate::harness::run(async {
        for answer in [Answer::Unavailable, Answer::Hangs] {
            let (fake, dir) = (Fake::start(TTL.as_millis() as u32), folder());
            fake.answers("/v1/renew", answer);
            let child = under_lock(&fake.url, "run", dir.path(), &[], STUBBORN).spawn().unwrap();
            ended_in_time(&fake, "/v1/acquire", dir.path()).await;
            let ended = output(child).await;
            assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
            assert!(dir.path().join("term").exists(), "it was killed before it was told");
        }
    });
}

#[test]
fn a_command_is_stopped_when_its_lease_is_found_lost() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(600_000), folder());
        fake.answers("/v1/renew", Answer::Lost);
        let child = under_lock(&fake.url, "run", dir.path(), &[], STUBBORN).spawn().unwrap();
        // When the stopped command is continued, the lease is renewed, and the loss is noticed.
        let pid = process(&dir.path().join("pid")).await;
        signal(pid, Signal::STOP);
        signal(pid, Signal::CONT);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        assert_eq!(fake.count("/v1/release"), 0);
    });
}

/// Standard error is closed, or is a full pipe that nobody reads. Neither keeps the command running.
#[test]
fn a_blocked_standard_error_does_not_delay_the_stop_of_the_command() {
    crate::harness::run(async {
        for is_full in [false, true] {
            let (fake, dir) = (Fake::start(TTL.as_millis() as u32), folder());
            fake.answers("/v1/renew", Answer::Unavailable);
            let (reader, mut writer) = std::io::pipe().unwrap();
            let _unread = is_full.then_some(reader);
            if is_full {
                rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
                while writer.write(b"x").is_ok() {}
                rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
            }
            let mut command = under_lock(&fake.url, "run", dir.path(), &[], STUBBORN);
            let mut child = command.stderr(OwnedFd::from(writer)).spawn().unwrap();
            drop(command);
            ended_in_time(&fake, "/v1/acquire", dir.path()).await;
            let _ = child.kill();
            let _ = child.wait();
        }
    });
}

/// A process that was stopped renews nothing and stops nothing, but its guard does. The guard also ends a command
/// whose lease was renewed while the process could not tell the guard.
#[test]
fn a_command_ends_with_its_lease_when_the_lockkeeper_process_hangs() {
    crate::harness::run(async {
        for renewal in [Answer::Works, Answer::WorksAfter(Duration::from_millis(300))] {
            let (fake, dir) = (Fake::start(TTL.as_millis() as u32), folder());
            fake.answers("/v1/renew", renewal);
            let child = under_lock(&fake.url, "run", dir.path(), &[], STUBBORN).spawn().unwrap();
            fake.until_called("/v1/renew", 1).await;
            until_file(&dir.path().join("alive")).await;
            signal(child.id(), Signal::STOP);
            ended_in_time(&fake, "/v1/renew", dir.path()).await;
            signal(child.id(), Signal::CONT);
            let ended = output(child).await;
            assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        }
    });
}
