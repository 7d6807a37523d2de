//! Tests on both real servers. Without the servers they fail (`cargo xtask servers`).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use rustix::process::{Pid, Signal, getpgid, kill_process};

use super::{Kind, ManagedError, ManagedServer};
use crate::clock;
use crate::config::{ManagedConfig, ServerBinary};

fn config(kind: Kind, data_dir: &Path) -> ManagedConfig {
    let binary = match kind {
        Kind::Mysql => ServerBinary::Mysql,
        Kind::Mariadb => ServerBinary::Mariadb,
    };
    ManagedConfig { binary, data_dir: data_dir.to_path_buf() }
}

async fn start(config: &ManagedConfig) -> ManagedServer {
    ManagedServer::start(config).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn refused(config: &ManagedConfig) -> ManagedError {
    match ManagedServer::start(config).await {
        Ok(_) => panic!("the server must not start"),
        Err(error) => error,
    }
}

async fn query(url: &str, sql: &str) -> Result<Option<i64>, mysql_async::Error> {
    let mut conn = mysql_async::Conn::from_url(url).await?;
    let found = conn.query_first(sql).await?;
    conn.disconnect().await?;
    Ok(found)
}

async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if check().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never happened: {what}");
}

fn alive(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process number");
    kill_process(pid, signal).expect("a process of our own");
}

fn parent(pid: u32) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let after = stat.rsplit(')').next().expect("fields");
    after.split_whitespace().nth(1).and_then(|field| field.parse().ok()).expect("a parent")
}

/// The life of a folder: made, used, stopped, found again, its server killed, dropped.
async fn life_of_a_folder(kind: Kind) {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("with space/and%percent");
    let config = config(kind, &dir);
    let server = start(&config).await;
    assert_eq!(server.kind(), kind);
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&dir).expect("the folder").permissions());
    assert_eq!(mode & 0o777, 0o700);
    // Ctrl-C on the proxy's terminal does not reach it.
    let pid = server.pid().and_then(|pid| Pid::from_raw(pid as i32));
    assert_ne!(getpgid(pid).expect("a group"), getpgid(None).expect("our group"));
    query(server.url(), "CREATE TABLE kept (n INT PRIMARY KEY)").await.expect("a table");
    query(server.url(), "INSERT INTO kept VALUES (7)").await.expect("a row");
    durable(&server).await;

    let second = refused(&config).await;
    assert!(matches!(second, ManagedError::InUse { .. }), "{second}");
    let named = second.to_string();
    assert!(named.contains("and%percent"), "{named}");

    let pid = server.pid().expect("a process");
    let began = clock::now();
    server.stop().await;
    assert!(!alive(pid));
    // The server stopped when asked; it was not killed after the guardian's patience.
    assert!(clock::now().us_since(began) < 20_000_000);

    // The data is still there after a restart, and after the server was killed.
    let server = start(&config).await;
    assert_eq!(query(server.url(), "SELECT n FROM kept").await.expect("an answer"), Some(7));
    let pid = server.pid().expect("a process");
    kill(pid, Signal::KILL);
    eventually("a new server answers", async || {
        server.pid().is_some_and(|new| new != pid) && query(server.url(), "SELECT n FROM kept").await.is_ok()
    })
    .await;

    // The guardian dies and leaves a server on the folder. The supervisor stops that server first.
    let pid = server.pid().expect("a process");
    kill(parent(pid), Signal::KILL);
    eventually("a server of a new guardian answers", async || {
        server.pid().is_some_and(|new| new != pid) && query(server.url(), "SELECT n FROM kept").await.is_ok()
    })
    .await;
    assert!(!alive(pid));

    let pid = server.pid().expect("a process");
    drop(server);
    eventually("a dropped server is gone", async || !alive(pid)).await;
}

async fn durable(server: &ManagedServer) {
    let sql = "SELECT @@innodb_flush_log_at_trx_commit * 1000 + @@sync_binlog * 100 + @@skip_networking * 10 \
               + @@innodb_doublewrite";
    // On MySQL `innodb_doublewrite` is a word, which counts as 0.
    let found = query(server.url(), sql).await.expect("an answer").unwrap_or_default();
    assert!(found == 1110 || found == 1111, "{found}");
}

#[tokio::test]
async fn a_managed_mysql_server_keeps_its_data_through_restarts_and_kills() {
    life_of_a_folder(Kind::Mysql).await;
}

#[tokio::test]
async fn a_managed_mariadb_server_keeps_its_data_through_restarts_and_kills() {
    life_of_a_folder(Kind::Mariadb).await;
}

/// Run by [`killed_proxy`] in a process of its own, which is then killed.
#[test]
#[ignore = "a helper of other tests"]
fn proxy_that_will_be_killed() {
    let Some(dir) = std::env::var_os("MANAGED_TEST_DIR") else { return };
    let kind = match std::env::var("MANAGED_TEST_KIND").as_deref() {
        Ok("MariaDB") => Kind::Mariadb,
        _ => Kind::Mysql,
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let server = start(&config(kind, Path::new(&dir))).await;
        println!("serving {}", server.pid().expect("a process"));
        std::future::pending::<()>().await;
    });
}

struct Proxy {
    process: std::process::Child,
    server: u32,
}

fn proxy(kind: Kind, dir: &Path) -> Proxy {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "--ignored", "--nocapture"]);
    command.arg("mysql::managed::tests::proxy_that_will_be_killed");
    command.env("MANAGED_TEST_DIR", dir).env("MANAGED_TEST_KIND", kind.to_string());
    let mut process = command.stdout(Stdio::piped()).spawn().expect("a process");
    let stdout = BufReader::new(process.stdout.take().expect("its output"));
    let lines = stdout.lines().map_while(Result::ok);
    let pid = lines.filter_map(|line| line.split("serving ").nth(1)?.trim().parse().ok()).next();
    Proxy { process, server: pid.expect("the proxy starts a server") }
}

async fn killed_proxy(kind: Kind) {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("data");

    let mut first = proxy(kind, &dir);
    assert!(alive(first.server));
    first.process.kill().expect("SIGKILL");
    first.process.wait().expect("its end");
    eventually("the server of a killed proxy is gone", async || !alive(first.server)).await;

    // Killed together with its guardian: the next proxy finds the server and stops it.
    let mut second = proxy(kind, &dir);
    let guardian = parent(second.server);
    kill(guardian, Signal::KILL);
    second.process.kill().expect("SIGKILL");
    second.process.wait().expect("its end");
    let server = start(&config(kind, &dir)).await;
    assert!(!alive(second.server));
    server.stop().await;
}

#[tokio::test]
async fn the_mysql_server_of_a_killed_proxy_is_stopped() {
    killed_proxy(Kind::Mysql).await;
}

#[tokio::test]
async fn the_mariadb_server_of_a_killed_proxy_is_stopped() {
    killed_proxy(Kind::Mariadb).await;
}

#[tokio::test]
async fn data_of_the_other_kind_is_refused_and_auto_starts_the_kind_of_the_data() {
    let temp = tempfile::tempdir().expect("a folder");
    start(&config(Kind::Mariadb, temp.path())).await.stop().await;
    let error = refused(&config(Kind::Mysql, temp.path())).await;
    assert!(matches!(error, ManagedError::OtherKind { made_by: Kind::Mariadb, .. }), "{error}");

    let auto = ManagedConfig { binary: ServerBinary::Auto, data_dir: temp.path().to_path_buf() };
    let server = start(&auto).await;
    assert_eq!(server.kind(), Kind::Mariadb);
    server.stop().await;
}

#[tokio::test]
async fn auto_prefers_mysql_and_a_long_path_gets_a_short_socket() {
    let temp = tempfile::tempdir().expect("a folder");
    let deep = temp.path().join("d".repeat(100));
    let auto = ManagedConfig { binary: ServerBinary::Auto, data_dir: deep };
    let server = start(&auto).await;
    assert_eq!(server.kind(), Kind::Mysql);
    assert_eq!(query(server.url(), "SELECT 1").await.expect("an answer"), Some(1));
    let socket = server.folder.socket().to_path_buf();
    assert!(socket.as_os_str().len() <= 107);
    server.stop().await;
    fs::remove_dir_all(socket.parent().expect("its folder")).expect("cleaned up");
}

#[tokio::test]
async fn an_interrupted_initialisation_is_started_again() {
    let temp = tempfile::tempdir().expect("a folder");
    let config = config(Kind::Mysql, temp.path());
    fs::write(temp.path().join("lockkeeper.lock"), "").expect("a lock file");
    fs::create_dir(temp.path().join("data.new")).expect("a half data folder");
    fs::write(temp.path().join("data.new/ibdata1"), "half").expect("a half file");
    let server = start(&config).await;
    assert!(!temp.path().join("data.new").exists());
    server.stop().await;
}

#[tokio::test]
async fn a_folder_of_another_program_is_refused_and_left_unchanged() {
    let temp = tempfile::tempdir().expect("a folder");
    fs::write(temp.path().join("ibdata1"), "precious").expect("a file");
    let error = refused(&config(Kind::Mysql, temp.path())).await;
    assert!(matches!(error, ManagedError::Foreign { .. }), "{error}");
    assert_eq!(fs::read_dir(temp.path()).expect("the folder").count(), 1);
}

#[tokio::test]
async fn a_folder_of_another_user_is_refused() {
    let temp = tempfile::tempdir().expect("a folder");
    // Root can give a folder away, and for any other user `/` is another user's.
    let is_root = std::os::unix::fs::chown(temp.path(), Some(12_345), None).is_ok();
    let folder = if is_root { temp.path() } else { Path::new("/") };
    let error = refused(&config(Kind::Mysql, folder)).await;
    assert!(matches!(error, ManagedError::Owner { .. }), "{error}");
}

#[tokio::test]
async fn a_program_that_is_no_server_is_refused() {
    for (program, says) in [("/bin/cat", "no MySQL or MariaDB"), ("/nowhere/mysqld", "cannot be run")] {
        let temp = tempfile::tempdir().expect("a folder");
        let binary = ServerBinary::Path(PathBuf::from(program));
        let config = ManagedConfig { binary, data_dir: temp.path().join("data") };
        let error = refused(&config).await.to_string();
        assert!(error.contains(program) && error.contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let temp = tempfile::tempdir().expect("a folder");
    let config = config(Kind::Mysql, temp.path());
    start(&config).await.stop().await;
    fs::remove_file(temp.path().join("data/mysql.ibd")).expect("a broken folder");
    let error = refused(&config).await.to_string();
    assert!(error.contains("error.log ends with"), "{error}");
}
