//! A process that is killed leaves no command behind, and a process that ends leaves no command that works without
//! its lock.

use super::*;

/// After KILL (by the kernel for lack of memory, for example), the command and its processes end. A command that
/// handles TERM ends by TERM.
#[test]
fn a_command_ends_when_the_process_that_holds_its_lock_is_killed() {
    crate::harness::run(async {
        for script in
            [STUBBORN, "trap 'touch term; exit' TERM; echo $$ > pid; while true; do sleep 0.02; done"]
        {
            let (fake, dir) = (Fake::start(3_000), folder());
            let script = format!("sleep 300 & echo $! > beside; {script}");
            let mut child = under_lock(&fake.url, "run", dir.path(), &[], &script).spawn().unwrap();
            let (pid, beside) =
                (process(&dir.path().join("pid")).await, process(&dir.path().join("beside")).await);
            child.kill().unwrap();
            child.wait().unwrap();
            for pid in [pid, beside] {
                eventually("it has ended", async || !is_running(pid)).await;
            }
            assert!(dir.path().join("term").exists(), "it was killed before it was told");
        }
    });
}

/// The lock is held while any process of the command's group runs.
#[test]
fn a_run_ends_when_all_processes_of_its_command_have_ended() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(900), folder());
        let script = "(while [ ! -e go ]; do sleep 0.02; done) & exit 4";
        let child = under_lock(&fake.url, "run", dir.path(), &[], script).spawn().unwrap();
        fake.until_called("/v1/renew", 4).await;
        assert_eq!(fake.count("/v1/release"), 0);
        std::fs::write(dir.path().join("go"), "").unwrap();
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(4), "{}", text(&ended.stderr));
        assert_eq!(fake.count("/v1/release"), 1);
    });
}
