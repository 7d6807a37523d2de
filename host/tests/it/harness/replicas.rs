//! Servers that replicate from one another, handled as an operator would.

use std::path::{Path, PathBuf};

use lockkeeper::mysql::managed::ManagedServer;
use rustix::process::Signal;

use super::{Kind, eventually, free_ports, signal, sql, start_with};

/// A server with a network port, which is read-only whenever it starts.
pub struct Node {
    kind: Kind,
    dir: PathBuf,
    port: u16,
    id: u32,
    server: Option<ManagedServer>,
}

impl Node {
    /// `id` is the server's number among those of the test.
    pub async fn start(kind: Kind, dir: &Path, id: u32) -> Node {
        let port = free_ports(1)[0];
        let mut node = Node { kind, dir: dir.join(format!("node-{id}")), port, id, server: None };
        node.make().await;
        node
    }

    /// What a proxy connects to: an account that is no administrator.
    pub fn url(&self) -> String {
        format!("mysql://lk:secret@127.0.0.1:{}/lockkeeper", self.port)
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Makes the accounts, on the first primary.
    pub async fn make_accounts(&self) {
        self.root(
            "CREATE USER 'lk'@'%' IDENTIFIED BY 'secret';\
             GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON lockkeeper.* TO 'lk'@'%';\
             CREATE USER 'repl'@'%' IDENTIFIED BY 'secret';\
             GRANT REPLICATION SLAVE ON *.* TO 'repl'@'%'",
        )
        .await;
    }

    /// Replicates from another node, all from the beginning.
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

    /// From now on this primary confirms nothing before its replica has it, however long that takes.
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
        replica.root(follower).await;
        replica.root(restart).await;
        self.root(source).await;
        let status = if self.kind == Kind::Mysql { "source_clients" } else { "master_clients" };
        eventually("the source knows of its replica", async || {
            let rows = self.root(&format!("SHOW GLOBAL STATUS LIKE 'rpl_semi_sync_{status}'")).await;
            rows.first().and_then(|row| row.get::<String, _>(1)).as_deref() == Some("1")
        })
        .await;
    }

    /// From now on nothing more comes from the other node. What has come before is applied, which it is not after
    /// [`Node::stop_following`].
    pub async fn stop_receiving(&self) {
        self.stop("IO_THREAD").await;
    }

    /// Waits until all that has come from the other node is applied, also where that one is gone.
    pub async fn apply_all(&self) {
        let (status, received, wait) = match self.kind {
            Kind::Mysql => ("SHOW REPLICA STATUS", "Retrieved_Gtid_Set", "WAIT_FOR_EXECUTED_GTID_SET"),
            Kind::Mariadb => ("SHOW SLAVE STATUS", "Gtid_IO_Pos", "MASTER_GTID_WAIT"),
        };
        let all: String = self.root(status).await[0].get(received).expect("a position");
        let waited = self.root(&format!("SELECT {wait}('{all}',20)")).await;
        assert_eq!(waited[0].get(0), Some(0), "the replica does not apply {all}");
    }

    /// From now on nothing more comes from the other node.
    pub async fn stop_following(&self) {
        self.stop("").await;
    }

    /// Stops one of the threads that replicate, or both.
    async fn stop(&self, thread: &str) {
        let replica = if self.kind == Kind::Mysql { "REPLICA" } else { "SLAVE" };
        self.root(&format!("STOP {replica} {thread}")).await;
    }

    pub async fn promote(&self) {
        self.root(match self.kind {
            Kind::Mysql => "STOP REPLICA; RESET REPLICA ALL; SET GLOBAL read_only=0",
            Kind::Mariadb => "STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only=0",
        })
        .await;
    }

    pub async fn set_read_only(&self, on: bool) {
        self.root(&format!("SET GLOBAL read_only={}", u8::from(on))).await;
    }

    /// Waits until it has all that the other one has committed by now.
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

    /// As a crash does; it is started again by itself, and read-only.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    pub fn signal(&self, which: Signal) {
        signal(self.server().pid().expect("the server runs"), which);
    }

    /// As a crash does, and it stays down.
    pub async fn kill_for_good(&mut self) {
        self.kill();
        self.server.take().expect("it runs").stop().await;
    }

    /// Starts it again with its data.
    pub async fn revive(&mut self) {
        self.serve().await;
    }

    /// Throws its data away and replicates from another node.
    pub async fn rebuild(&mut self, source: &Node) {
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
        std::fs::remove_dir_all(&self.dir).expect("its data");
        // Under its old number it would leave out what it logged itself before.
        self.id += 2;
        self.make().await;
        self.follow(source).await;
        self.catch_up(source).await;
    }

    pub async fn root(&self, statements: &str) -> Vec<mysql_async::Row> {
        sql(self.server().url(), statements).await
    }

    async fn make(&mut self) {
        self.serve().await;
        // What the start itself has logged is no other server's business.
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
        self.server = Some(start_with(self.kind, &self.dir, &options).await);
    }

    fn server(&self) -> &ManagedServer {
        self.server.as_ref().expect("the node runs")
    }
}
