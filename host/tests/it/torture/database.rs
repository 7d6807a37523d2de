//! The servers under torture: a server with three more for a quorum, or a cluster of three.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockkeeper::config::{ManagedConfig, ServerBinary};
use lockkeeper::mysql::managed::ManagedServer;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};
use tokio::task::JoinHandle;

use crate::faults::plain_account;
use crate::harness::{self, Kind, crash, eventually};

/// The time-out of a statement that makes a fault or reads the state of a server.
const STATEMENT: Duration = Duration::from_secs(3);
/// The longest time until the members of a cluster are joined again.
const JOINS_WITHIN: Duration = Duration::from_secs(120);
const MEMBERS: usize = 3;
/// The file that fills a disk.
const FILLER: &str = "filler";
/// Keeps the binary logs small: those of an hour would fill the disk.
const FEW_LOGS: [&str; 2] = ["--loose-max-binlog-size=32M", "--loose-binlog-expire-logs-seconds=60"];
/// The name of the replication group.
const GROUP: &str = "7d1c1f4e-0b5e-4a52-9d6b-3c1b6e6f0a11";

/// The kind of servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    One(Kind),
    Galera,
    /// MySQL's group replication, with a single primary.
    Group,
}

/// The paths of programs.
pub struct Programs {
    pub server: PathBuf,
    /// The library that sets the clock of a program.
    pub faketime: PathBuf,
    /// A file system only for the data of a single server, which may become full.
    pub disk: Option<PathBuf>,
}

/// The servers.
pub struct Database {
    pub setup: Setup,
    /// The servers that all proxies use, followed by those of the quorum, if there is one.
    pub servers: Vec<Server>,
    /// How many servers all proxies use.
    pub main: usize,
}

/// A server.
pub struct Server {
    pub managed: ManagedServer,
    /// The URL with a password, for proxies.
    pub url: String,
    /// The file with the offset of the server's clock, which the library reads.
    clock: Option<PathBuf>,
    /// The file system of its data.
    disk: Option<PathBuf>,
    /// Kept open, because no new connection is possible when the server has too many.
    admin: Option<Conn>,
    /// Runs the statement that makes the server read-only, which waits for statements that write.
    turns_read_only: Option<JoinHandle<()>>,
}

impl Database {
    /// Starts the servers.
    pub async fn start(setup: Setup, programs: &Programs, dir: &Path) -> Database {
        let mut servers = match setup {
            Setup::One(_) => vec![one(programs, dir).await],
            Setup::Galera => galera(programs, dir).await,
            Setup::Group => group(programs, dir).await,
        };
        let main = servers.len();
        if main == 1 {
            for n in 0..MEMBERS {
                servers.push(of_quorum(programs, &dir.join(format!("quorum-{n}"))).await);
            }
        }
        let mut database = Database { setup, servers, main };
        database.is_whole_again().await;
        database
    }

    /// Whether the servers are a cluster.
    pub fn is_cluster(&self) -> bool {
        self.main > 1
    }

    /// Whether every server has joined the cluster. A server that stays outside is told to join.
    pub async fn is_whole(&mut self) -> bool {
        let mut is_whole = true;
        for server in &mut self.servers {
            is_whole &= match self.setup {
                Setup::One(_) => true,
                Setup::Galera => {
                    server.status("wsrep_local_state_comment").await.as_deref() == Some("Synced")
                }
                Setup::Group => server.joins_group().await,
            };
        }
        is_whole
    }

    /// Waits until every server has joined the cluster.
    pub async fn is_whole_again(&mut self) {
        let began = std::time::Instant::now();
        while !self.is_whole().await {
            assert!(began.elapsed() < JOINS_WITHIN, "the cluster is not whole within {JOINS_WITHIN:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Stops all servers.
    pub async fn stop(self) {
        for server in self.servers {
            server.managed.stop().await;
        }
    }
}

impl Server {
    fn new(managed: ManagedServer, url: String) -> Server {
        Server { managed, url, clock: None, disk: None, admin: None, turns_read_only: None }
    }

    /// Kills the server, as a crash would.
    pub async fn kill(&self) {
        crash(&self.managed).await;
    }

    /// Sets the server's clock. `None` if that is not possible.
    pub fn set_clock(&self, ahead: f64) -> Option<()> {
        write_clock(self.clock.as_ref()?, ahead);
        Some(())
    }

    /// Fills the file system of the server's data. `None` if that file system is not the server's alone.
    pub fn fill_disk(&self) -> Option<()> {
        let disk = self.disk.as_ref()?;
        let filler = fs::File::create(disk.join(FILLER)).expect("a file");
        let left = rustix::fs::statvfs(disk).expect("a file system");
        // A server that writes meanwhile may take the last of the space.
        let whole = left.f_bavail * left.f_frsize;
        let _ = rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, whole);
        Some(())
    }

    /// Frees the file system again.
    pub fn empty_disk(&self) {
        if let Some(disk) = &self.disk {
            let _ = fs::remove_file(disk.join(FILLER));
        }
    }

    /// Runs a statement. `None` if the server does not answer.
    pub async fn ask(&mut self, statement: &str) -> Option<Vec<Row>> {
        let (url, kept) = (self.managed.url().to_owned(), self.admin.take());
        let asked = async {
            if let Some(mut conn) = kept
                && let Ok(rows) = conn.query(statement).await
            {
                return Ok((conn, rows));
            }
            let mut conn = Conn::from_url(url).await?;
            let rows = conn.query(statement).await?;
            Ok::<_, mysql_async::Error>((conn, rows))
        };
        let (conn, rows) = tokio::time::timeout(STATEMENT, asked).await.ok()?.ok()?;
        self.admin = Some(conn);
        Some(rows)
    }

    /// Starts to make the server read-only. Returns false if this is in progress or already done.
    pub fn turn_read_only(&mut self) -> bool {
        if self.turns_read_only.is_some() {
            return false;
        }
        let url = self.managed.url().to_owned();
        self.turns_read_only = Some(tokio::spawn(async move {
            if let Ok(mut conn) = Conn::from_url(url).await {
                let _ = conn.query_drop("SET GLOBAL read_only=1").await;
            }
        }));
        true
    }

    /// Makes the server writable, after the statement that makes it read-only was answered. Otherwise the server
    /// could run that statement later. Returns whether the server is writable.
    pub async fn turn_writable(&mut self) -> bool {
        let is_writable = self.turns_read_only.as_ref().is_none_or(JoinHandle::is_finished)
            && self.ask("SET GLOBAL read_only=0").await.is_some();
        if is_writable {
            self.turns_read_only = None;
        }
        is_writable
    }

    async fn status(&mut self, name: &str) -> Option<String> {
        let rows = self.ask(&format!("SHOW GLOBAL STATUS LIKE '{name}'")).await?;
        rows.into_iter().next()?.get(1)
    }

    /// Whether the server is a member of its group. A server that was expelled or restarted is not a member.
    async fn joins_group(&mut self) -> bool {
        let state = "SELECT MEMBER_STATE FROM performance_schema.replication_group_members \
             WHERE MEMBER_ID=@@server_uuid OR MEMBER_ID=''";
        let Some(rows) = self.ask(state).await else { return false };
        let state: Option<String> = rows.into_iter().next().and_then(|row| row.get(0));
        match state.as_deref() {
            Some("ONLINE") => return true,
            Some("RECOVERING") => {}
            _ => {
                // The statement takes as long as the join, and continues when nobody waits for it.
                let _ = self.ask("STOP GROUP_REPLICATION; START GROUP_REPLICATION").await;
            }
        }
        false
    }
}

async fn serve(program: &Path, dir: &Path, options: &[String]) -> ManagedServer {
    let config = ManagedConfig { binary: ServerBinary::Path(program.to_owned()), data_dir: dir.to_owned() };
    let started = ManagedServer::start_with(&config, options).await;
    started.unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

/// A server whose clock can be set.
async fn one(programs: &Programs, dir: &Path) -> Server {
    let clock = dir.join("clock");
    write_clock(&clock, 0.0);
    let program = dir.join("server.sh");
    // The library reads the file once a second: reading it at each clock access would take most of the machine's
    // time. The library's "fix" for waits by the monotonic clock makes them end at once, and the server's threads
    // spin.
    script(
        &program,
        &format!(
            "export FAKETIME_TIMESTAMP_FILE={clock} FAKETIME_CACHE_DURATION=1 FAKETIME_DONT_FAKE_MONOTONIC=1 \
             FAKETIME_FORCE_MONOTONIC_FIX=0\n\
             export LD_PRELOAD={library}\nexec {server} \"$@\"\n",
            clock = clock.display(),
            library = programs.faketime.display(),
            server = programs.server.display()
        ),
    );
    let data = programs.disk.as_deref().unwrap_or(dir).join("data");
    let managed = serve(&program, &data, &FEW_LOGS.map(str::to_owned)).await;
    let url = plain_account(&managed, "secret").await;
    Server { clock: Some(clock), disk: programs.disk.clone(), ..Server::new(managed, url) }
}

async fn of_quorum(programs: &Programs, dir: &Path) -> Server {
    let managed = serve(&programs.server, dir, &FEW_LOGS.map(str::to_owned)).await;
    let url = plain_account(&managed, "secret").await;
    Server::new(managed, url)
}

/// Writes the file in one step, so that the library reads either all of it or nothing.
fn write_clock(path: &Path, ahead: f64) {
    let new = path.with_extension("new");
    fs::write(&new, format!("{ahead:+.3}\n")).expect("a file");
    fs::rename(&new, path).expect("a file");
}

/// Three nodes with one history. If a node lacks writes when it joins, another node still has them.
async fn galera(programs: &Programs, dir: &Path) -> Vec<Server> {
    script(&dir.join("wsrep_sst_increments"), INCREMENTS);
    let ports = harness::free_ports(2 * MEMBERS);
    let members = ports[..MEMBERS].iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>();
    let home = |n: usize| dir.join(format!("node-{n}"));
    serve(&programs.server, &home(0), &[]).await.stop().await;
    let mut servers = Vec::new();
    for n in 0..MEMBERS {
        let program = dir.join(format!("galera-{n}.sh"));
        let text = NODE.replace("@SERVER@", &programs.server.display().to_string());
        let text = text.replace("@PATH@", &dir.display().to_string());
        script(&program, &text.replace("@HOME@", &home(n).display().to_string()));
        let options = node_options(programs, &home(n), &members, n, ports[MEMBERS + n]);
        if n == 0 {
            fs::write(home(0).join("first"), "").expect("a file");
            let first = serve(&program, &home(0), &options).await;
            plain_account(&first, "secret").await;
            first.stop().await;
            for n in 1..MEMBERS {
                copy(&home(0), &home(n));
            }
            fs::write(home(0).join("first"), "").expect("a file");
        }
        let managed = serve(&program, &home(n), &options).await;
        let url = plain_url(&managed);
        servers.push(Server::new(managed, url));
    }
    servers
}

fn node_options(programs: &Programs, home: &Path, members: &[String], n: usize, ist: u16) -> Vec<String> {
    let unpacked = programs.server.ancestors().nth(2).expect("it is in a folder of its own");
    let library = unpacked.join("root/usr/lib/galera/libgalera_smm.so");
    vec![
        "--wsrep-on=ON".to_owned(),
        format!("--wsrep-provider={}", library.display()),
        format!("--wsrep-cluster-address=gcomm://{}", members.join(",")),
        "--wsrep-cluster-name=torture".to_owned(),
        format!("--wsrep-node-name=node-{n}"),
        "--wsrep-node-address=127.0.0.1".to_owned(),
        "--wsrep-sst-method=increments".to_owned(),
        format!("--wsrep-sst-receive-address={}", home.join("received").display()),
        format!(
            "--wsrep-provider-options=gmcast.listen_addr=tcp://{};ist.recv_addr=127.0.0.1:{ist};gcache.size=256M;\
             gcache.recover=yes",
            members[n]
        ),
        "--binlog-format=ROW".to_owned(),
        "--innodb-autoinc-lock-mode=2".to_owned(),
    ]
}

/// Starts a node at the position of its data. The first start of the first node creates the cluster.
const NODE: &str = r#"export PATH="@PATH@:$PATH"
case " $* " in
*" --wsrep-on=ON "*) ;;
*) exec @SERVER@ "$@" ;;
esac
if [ -e @HOME@/first ]; then
    rm @HOME@/first
    exec @SERVER@ "$@" --wsrep-new-cluster
fi
@SERVER@ "$@" --wsrep-recover --log-error=@HOME@/recovery.log
position=$(sed -n 's/.*Recovered position: *//p' @HOME@/recovery.log | tail -n 1)
exec @SERVER@ "$@" --wsrep-start-position="$position"
"#;

/// Both nodes call this if one lacks writes that the other still has. Only those writes are transferred: a node that
/// lacks more does not join.
const INCREMENTS: &str = r#"while [ $# -gt 0 ]; do
    case $1 in
    --role) role=$2 && shift ;;
    --address) address=$2 && shift ;;
    --gtid) gtid=$2 && shift ;;
    --bypass) bypass=1 ;;
    esac
    shift
done
if [ "$role" = joiner ]; then
    rm -f "$address"
    echo "ready $address"
    while [ ! -s "$address" ]; do sleep 0.05; done
    cat "$address"
elif [ -n "$bypass" ]; then
    echo "$gtid" > "$address.new" && mv "$address.new" "$address"
    echo "done $gtid"
else
    echo "the whole data was asked for" >&2
    exit 1
fi
"#;

async fn group(programs: &Programs, dir: &Path) -> Vec<Server> {
    let ports = harness::free_ports(2 * MEMBERS);
    let (clients, members) = ports.split_at(MEMBERS);
    let seeds = members.iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",");
    let mut servers = Vec::new();
    for n in 0..MEMBERS {
        let options = [
            "--skip-networking=0".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            "--report-host=127.0.0.1".to_owned(),
            "--performance-schema=ON".to_owned(),
            format!("--port={}", clients[n]),
            format!("--server-id={}", n + 1),
            // Until it has joined the group, the node takes no writes.
            "--read-only=ON".to_owned(),
            "--gtid-mode=ON".to_owned(),
            "--enforce-gtid-consistency=ON".to_owned(),
            "--plugin-load-add=group_replication.so".to_owned(),
            format!("--loose-group-replication-group-name={GROUP}"),
            "--loose-group-replication-start-on-boot=OFF".to_owned(),
            format!("--loose-group-replication-local-address=127.0.0.1:{}", members[n]),
            format!("--loose-group-replication-group-seeds={seeds}"),
            "--loose-group-replication-single-primary-mode=ON".to_owned(),
            "--loose-group-replication-consistency=BEFORE_ON_PRIMARY_FAILOVER".to_owned(),
            "--loose-group-replication-recovery-get-public-key=ON".to_owned(),
            "--loose-group-replication-member-expel-timeout=0".to_owned(),
        ];
        let managed = serve(&programs.server, &dir.join(format!("member-{n}")), &options).await;
        let root = managed.url().to_owned();
        harness::sql(
            &root,
            "SET SQL_LOG_BIN=0; CREATE USER 'repl'@'%' IDENTIFIED BY 'secret'; \
             GRANT REPLICATION SLAVE, GROUP_REPLICATION_STREAM, CONNECTION_ADMIN, BACKUP_ADMIN ON *.* TO 'repl'@'%'; \
             RESET BINARY LOGS AND GTIDS; SET SQL_LOG_BIN=1; \
             CHANGE REPLICATION SOURCE TO SOURCE_USER='repl',SOURCE_PASSWORD='secret' \
             FOR CHANNEL 'group_replication_recovery'",
        )
        .await;
        if n == 0 {
            harness::sql(
                &root,
                "SET GLOBAL group_replication_bootstrap_group=ON; START GROUP_REPLICATION; \
                 SET GLOBAL group_replication_bootstrap_group=OFF",
            )
            .await;
            eventually("the first member takes writes", async || {
                let read_only = harness::sql(&root, "SELECT @@super_read_only").await;
                read_only.first().and_then(|row| row.get::<u8, _>(0)) == Some(0)
            })
            .await;
            plain_account(&managed, "secret").await;
        }
        let url = plain_url(&managed);
        servers.push(Server::new(managed, url));
    }
    servers
}

/// The URL of the [`plain_account`] that another member has created.
fn plain_url(server: &ManagedServer) -> String {
    server.url().replace("root@", "lk:secret@").replace("/lockkeeper?", "/plain?")
}

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}")).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a file");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    fs::set_permissions(to, fs::Permissions::from_mode(0o700)).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().expect("a type").is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).expect("a file");
        }
    }
}
