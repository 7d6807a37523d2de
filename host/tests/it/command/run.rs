//! `lockkeeper run`: a lock for exactly as long as a command runs.

use std::time::Instant;

use super::*;
use crate::harness::own_server;

/// Runs a command under a lock; `script` is run by `sh`, in its own folder.
fn start(proxy: &Proxy, dir: &Path, options: &[&str], script: &str) -> Child {
    let server = format!("http://{}", proxy.api_address());
    under_lock(&server, "run", dir, options, script).spawn().expect("the command starts")
}

async fn released(client: &Client, lease: &Value) {
    assert_eq!(client.release(lease).await.status, 200);
}

/// The command's exit code is passed on, the command knows its lease, and a second run finds the lock held.
#[test]
fn a_run_passes_on_the_exit_code_of_its_command() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mariadb).await).await;
        proxy.until_ready().await;
        let (client, dir) = (proxy.client(), folder());
        let before = client.lease("job", 1_000).await;
        released(&client, &before).await;
        let script = "echo $LOCKKEEPER_TOKEN $LOCKKEEPER_KEY; touch begun; read wait < fifo; exit 7";
        assert!(Command::new("mkfifo").arg(dir.path().join("fifo")).status().unwrap().success());
        let first = start(&proxy, dir.path(), &["--ttl", "2s"], script);
        until_file(&dir.path().join("begun")).await;
        let second = ended(lockkeeper(&proxy, &["run", "--wait", "0", "job", "--", "true"])).await;
        assert_eq!(second.status.code(), Some(113), "{}", text(&second.stderr));
        // Longer than the ttl, so the lease is renewed.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(client.acquire(json!({"resource": "job"})).await.status, 409);
        std::fs::write(dir.path().join("fifo"), "on\n").unwrap();
        let first = output(first).await;
        assert_eq!(first.status.code(), Some(7), "{}", text(&first.stderr));
        let token = before["token"].as_u64().unwrap() + 1;
        assert_eq!(text(&first.stdout).trim(), format!("{token} job"));
        released(&client, &client.lease("job", 1_000).await).await;
        let missing = ended(lockkeeper(&proxy, &["run", "job", "--", "/nowhere/at-all"])).await;
        assert_eq!(missing.status.code(), Some(127), "{}", text(&missing.stderr));
        released(&client, &client.lease("job", 1_000).await).await;
    });
}

/// TERM goes to the command, which ends as it likes. Then the lock is free.
#[test]
fn a_signal_is_passed_on_and_handled_by_the_command() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mysql).await).await;
        proxy.until_ready().await;
        let dir = folder();
        let script = "trap 'exit 9' TERM; touch begun; while true; do sleep 0.05; done";
        let child = start(&proxy, dir.path(), &[], script);
        until_file(&dir.path().join("begun")).await;
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(9), "{}", text(&ended.stderr));
        proxy.client().lease("job", 1_000).await;
    });
}

/// An operator takes a lock away: the command receives TERM, then KILL.
#[test]
fn a_forced_release_stops_the_command() {
    crate::harness::run(async {
        let proxy = Proxy::start(&database(Kind::Mariadb).await).await;
        proxy.until_ready().await;
        let dir = folder();
        let child = start(&proxy, dir.path(), &["--ttl", "1500ms"], STUBBORN);
        until_file(&dir.path().join("alive")).await;
        let taken = proxy.admin().send("DELETE", "/v1/locks/job", "").await;
        assert_eq!((taken.status, taken.json["holders"].as_u64()), (200, Some(1)), "{}", taken.text);
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        assert!(text(&ended.stderr).contains("the command was stopped"), "{}", text(&ended.stderr));
        assert!(dir.path().join("term").exists(), "it was killed before it was told");
    });
}

on_both! {
    /// The server is gone, so the lease cannot be renewed: the command ends before the lease, by TERM and then KILL.
    async fn a_lease_that_cannot_be_renewed_outlives_its_command(kind: Kind) {
        let (data, dir) = (folder(), folder());
        let server = own_server(kind, data.path()).await;
        let proxy = Proxy::start(server.url()).await;
        proxy.until_ready().await;
        const TTL: Duration = Duration::from_secs(3);
        let child = start(&proxy, dir.path(), &["--ttl", "3s"], STUBBORN);
        until_file(&dir.path().join("alive")).await;
        let (killed, killed_wall) = (Instant::now(), SystemTime::now());
        server.stop().await;
        let ended = output(child).await;
        assert_eq!(ended.status.code(), Some(114), "{}", text(&ended.stderr));
        assert!(killed.elapsed() < TTL + Duration::from_secs(8), "{:?}", killed.elapsed());
        // The last renewal was answered before the server stopped.
        let longest = TTL + (Instant::now() - killed).min(Duration::from_millis(500));
        assert!(last_alive(dir.path()) < killed_wall + longest, "it ran on after its lease");
        assert!(dir.path().join("term").exists(), "it was killed before it was told");
    }
}
