//! Signals that do not come from a terminal.

use super::*;

/// QUIT and USR1 are passed on to the command.
#[test]
fn signals_are_passed_on_to_the_command() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let script =
            "trap 'touch usr1' USR1; trap 'exit 5' QUIT; touch begun; while true; do sleep 0.02; done";
        let child = under_lock(&fake.url, "run", dir.path(), &[], script).spawn().unwrap();
        until_file(&dir.path().join("begun")).await;
        signal(child.id(), Signal::USR1);
        until_file(&dir.path().join("usr1")).await;
        signal(child.id(), Signal::QUIT);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(5), "{}", text(&ended.stderr));
        assert_eq!(fake.count("/v1/release"), 1);
    });
}

/// As under `nohup`: a signal that was ignored stays ignored, here and in the command.
#[test]
fn an_ignored_signal_stays_ignored() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let script = "kill -HUP $$; touch begun; while [ ! -e go ]; do sleep 0.02; done; exit 7";
        let run = under_lock(&fake.url, "run", dir.path(), &[], script);
        let mut nohup = Command::new("sh");
        nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
        nohup.env("LOCKKEEPER_SERVER", &fake.url).current_dir(dir.path()).stdin(Stdio::null());
        let child = nohup.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until_file(&dir.path().join("begun")).await;
        signal(child.id(), Signal::HUP);
        std::fs::write(dir.path().join("go"), "").unwrap();
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(7), "{}", text(&ended.stderr));
    });
}

/// A stopped command does not hold its lock for ever.
#[test]
fn a_command_that_is_stopped_for_long_loses_its_lock() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(1_500), folder());
        let child = under_lock(&fake.url, "run", dir.path(), &[], STUBBORN).spawn().unwrap();
        let pid = process(&dir.path().join("pid")).await;
        signal(pid, Signal::STOP);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        assert!(text(&ended.stderr).contains("stopped for longer"), "{}", text(&ended.stderr));
    });
}

/// A command that is continued in time keeps its lock.
#[test]
fn a_command_that_is_continued_keeps_its_lock() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(600_000), folder());
        let script = "echo $$ > pid; while [ ! -e go ]; do sleep 0.02; done";
        let child = under_lock(&fake.url, "run", dir.path(), &[], script).spawn().unwrap();
        let pid = process(&dir.path().join("pid")).await;
        signal(pid, Signal::STOP);
        signal(pid, Signal::CONT);
        // Long before a renewal would be due.
        fake.until_called("/v1/renew", 1).await;
        std::fs::write(dir.path().join("go"), "").unwrap();
        assert_eq!(output(child).await.status.code(), Some(0));
    });
}
