//! Servers that replicate, with the actions of an operator.

use std::path::{Path, PathBuf};

use lockkeeper::mysql::managed::ManagedServer;
use mysql_async::prelude::Queryable;
use rustix::process::Signal;

use super::{Kind, eventually, free_ports, signal, sql, start_with};

/// A server with a network port. It is read-only after each start.
pub struct Node {
    kind: Kind,
    dir: PathBuf,
    port: u16,
    id: u32,
    /// More options of the server.
    options: Vec<String>,
    server: Option<ManagedServer>,
}

impl Node {
    /// Starts a server. `id` is its number among the servers of the test.
    pub async fn start(kind: Kind, dir: &Path, id: u32) -> Node {
        Node::start_with(kind, dir, id, Vec::new()).await
    }

    /// As [`Node::start`], with more options of the server.
    pub async fn start_with(kind: Kind, dir: &Path, id: u32, options: Vec<String>) -> Node {
        let port = free_ports(1)[0];
        let mut node = Node { kind, dir: dir.join(format!("node-{id}")), port, id, options, server: None };
        node.make().await;
        node
    }

    /// The URL for proxies, with an account that has no administrative rights.
    pub fn url(&self) -> String {
        format!("mysql://lk:secret@127.0.0.1:{}/lockkeeper", self.port)
    }

    /// The address of the server.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Creates the accounts, on the first primary.
    pub async fn make_accounts(&self) {
        self.root(
            "CREATE USER 'lk'@'%' IDENTIFIED BY 'secret';\
             GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON lockkeeper.* TO 'lk'@'%';\
             CREATE USER 'repl'@'%' IDENTIFIED BY 'secret';\
             GRANT REPLICATION SLAVE ON *.* TO 'repl'@'%'",
        )
        .await;
    }

    /// Replicates from another node, from the beginning.
    pub async fn follow(&self, source: &Node) {
        let port = source.port;
        self.root(&match self.kind {
            Kind::Mysql => format!(
                "CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1',SOURCE_PORT={port},SOURCE_USER='repl',\
                 SOURCE_PASSWORD='secret',SOURCE_AUTO_POSITION=1,GET_SOURCE_PUBLIC_KEY=1,\
                 SOURCE_CONNECT_RETRY=1; START REPLICA"
            ),
            Kind::Mariadb => format!(
                "SET GLOBAL gtid_slave_pos=''; CHANGE MASTER TO MASTER_HOST='127.0.0.1',MASTER_PORT={port},\
                 MASTER_USER='repl',MASTER_PASSWORD='secret',MASTER_USE_GTID=slave_pos,\
                 MASTER_CONNECT_RETRY=1; START SLAVE"
            ),
        })
        .await;
    }

    /// From now on this primary confirms nothing before the replica has it, however long that takes.
    pub async fn wait_for_replica(&self, replica: &Node) {
        let (source, follower, restart) = match self.kind {
            Kind::Mysql => (
                "INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so';\
                 SET GLOBAL rpl_semi_sync_source_timeout=86400000,rpl_semi_sync_source_wait_point='AFTER_SYNC',\
                 rpl_semi_sync_source_enabled=1",
                "INSTALL PLUGIN rpl_semi_sync_replica SONAME 'semisync_replica.so';\
                 SET GLOBAL rpl_semi_sync_replica_enabled=1",
                "STOP REPLICA IO_THREAD; START REPLICA IO_THREAD",
            ),
            Kind::Mariadb => (
                "SET GLOBAL rpl_semi_sync_master_timeout=86400000,rpl_semi_sync_master_wait_point='AFTER_SYNC',\
                 rpl_semi_sync_master_enabled=1",
                "SET GLOBAL rpl_semi_sync_slave_enabled=1",
                "STOP SLAVE IO_THREAD; START SLAVE IO_THREAD",
            ),
        };
        // The source comes first: it counts a replica only when the replica connects, and only if it has the plugin by then.
        self.root(source).await;
        replica.root(follower).await;
        replica.root(restart).await;
        let status = if self.kind == Kind::Mysql { "source_clients" } else { "master_clients" };
        eventually("the source knows of its replica", async || {
            let rows = self.root(&format!("SHOW GLOBAL STATUS LIKE 'rpl_semi_sync_{status}'")).await;
            rows.first().and_then(|row| row.get::<String, _>(1)).as_deref() == Some("1")
        })
        .await;
    }

    /// Receives nothing more from the other node, but applies what has already been received.
    /// [`Node::stop_following`] stops applying as well.
    pub async fn stop_receiving(&self) {
        self.stop("IO_THREAD").await;
    }

    /// Waits until everything received from the other node is applied, even if that node is gone.
    pub async fn apply_all(&self) {
        let (status, received, wait) = match self.kind {
            Kind::Mysql => ("SHOW REPLICA STATUS", "Retrieved_Gtid_Set", "WAIT_FOR_EXECUTED_GTID_SET"),
            Kind::Mariadb => ("SHOW SLAVE STATUS", "Gtid_IO_Pos", "MASTER_GTID_WAIT"),
        };
        let all: String = self.root(status).await[0].get(received).expect("a position");
        let waited = self.root(&format!("SELECT {wait}('{all}',20)")).await;
        assert_eq!(waited[0].get(0), Some(0), "the replica does not apply {all}");
    }

    /// Receives and applies nothing more from the other node.
    pub async fn stop_following(&self) {
        self.stop("").await;
    }

    /// Stops one of the replication threads, or both.
    async fn stop(&self, thread: &str) {
        let replica = if self.kind == Kind::Mysql { "REPLICA" } else { "SLAVE" };
        self.root(&format!("STOP {replica} {thread}")).await;
    }

    /// Makes the node a writable primary.
    pub async fn promote(&self) {
        self.root(match self.kind {
            Kind::Mysql => "STOP REPLICA; RESET REPLICA ALL; SET GLOBAL read_only=0",
            Kind::Mariadb => "STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only=0",
        })
        .await;
    }

    /// Makes the node read-only or writable.
    pub async fn set_read_only(&self, on: bool) {
        self.root(&format!("SET GLOBAL read_only={}", u8::from(on))).await;
    }

    /// Waits until this node has everything that the other node has committed so far.
    pub async fn catch_up(&self, source: &Node) {
        let (position, wait, status) = match self.kind {
            Kind::Mysql => ("@@GLOBAL.gtid_executed", "WAIT_FOR_EXECUTED_GTID_SET", "SHOW REPLICA STATUS"),
            Kind::Mariadb => ("@@GLOBAL.gtid_binlog_pos", "MASTER_GTID_WAIT", "SHOW SLAVE STATUS"),
        };
        let there: String = source.root(&format!("SELECT {position}")).await[0].get(0).expect("a position");
        let waited = self.root(&format!("SELECT {wait}('{there}',20)")).await;
        let is_there = waited[0].get(0) == Some(0);
        assert!(is_there, "the replica does not get {there}: {:?}", self.root(status).await);
    }

    /// Kills the server, as a crash would. Its guardian starts it again, read-only.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal to the server.
    pub fn signal(&self, which: Signal) {
        signal(self.server().pid().expect("the server runs"), which);
    }

    /// Kills the server, as a crash would, and keeps it stopped.
    pub async fn kill_for_good(&mut self) {
        self.kill();
        self.server.take().expect("it runs").stop().await;
    }

    /// Starts the server again with its data.
    pub async fn revive(&mut self) {
        self.serve().await;
    }

    /// Discards the data of this node, and replicates from another node.
    pub async fn rebuild(&mut self, source: &Node) {
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
        std::fs::remove_dir_all(&self.dir).expect("its data");
        // Under its old number it would skip the changes that it logged itself before.
        self.id += 2;
        self.make().await;
        self.follow(source).await;
        self.catch_up(source).await;
    }

    /// Ends all sessions of proxies.
    pub async fn end_sessions(&self) {
        for row in self.root("SELECT id FROM information_schema.processlist WHERE user='lk'").await {
            let id: u64 = mysql_async::from_row(row);
            let mut conn =
                mysql_async::Conn::from_url(self.server().url()).await.expect("the server answers");
            // The session may have ended by itself.
            let _ = conn.query_drop(format!("KILL {id}")).await;
            conn.disconnect().await.expect("the server says goodbye");
        }
    }

    /// Runs statements as an administrator.
    pub async fn root(&self, statements: &str) -> Vec<mysql_async::Row> {
        sql(self.server().url(), statements).await
    }

    async fn make(&mut self) {
        self.serve().await;
        // Other servers must not receive what the start itself has logged.
        self.root(match self.kind {
            Kind::Mysql => "RESET BINARY LOGS AND GTIDS",
            Kind::Mariadb => "RESET MASTER",
        })
        .await;
    }

    async fn serve(&mut self) {
        let (port, id) = (self.port, self.id);
        let mut options = vec![
            "--skip-networking=0".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--port={port}"),
            format!("--server-id={id}"),
            "--read-only=1".to_owned(),
        ];
        options.extend(
            match self.kind {
                Kind::Mysql => ["--gtid-mode=ON", "--enforce-gtid-consistency=ON"],
                Kind::Mariadb => ["--log-bin=binlog", "--log-slave-updates=1"],
            }
            .map(str::to_owned),
        );
        options.extend(self.options.iter().cloned());
        self.server = Some(start_with(self.kind, &self.dir, &options).await);
    }

    fn server(&self) -> &ManagedServer {
        self.server.as_ref().expect("the node runs")
    }
}
