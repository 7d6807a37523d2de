//! The two servers of one store: a primary, and a replica that applies the primary's commits with a delay; or two
//! nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::faults::Succession;
use super::options::Second;
use super::server::Server;
use crate::clock;
use crate::lock::Instant;

/// The two servers.
pub struct Pair {
    servers: [Arc<Server>; 2],
    /// The replication delay; `None` for nodes of a cluster.
    behind: Option<Duration>,
    /// The index of the primary. Locked during a fail-over.
    primary: Mutex<usize>,
}

/// How often the replica applies the primary's commits.
const REPLICATION: Duration = Duration::from_millis(20);

impl Pair {
    /// The pair for `second`. The second server's clock is `ahead_ms` ahead of the first server's.
    pub fn of(second: Second, first: Arc<Server>, ahead_ms: i64) -> Pair {
        let pair = match second {
            Second::Replica(behind) => Pair::new(first, behind),
            Second::Node | Second::Balanced => Pair::cluster(first),
        };
        pair.servers[1].set_clock(ahead_ms * 1_000);
        pair
    }

    /// A primary and a replica, which has the primary's data now and is `behind` from now on.
    pub fn new(primary: Arc<Server>, behind: Duration) -> Pair {
        let replica = Server::new("replica");
        replica.replicate(&primary);
        Pair { servers: [primary, replica], behind: Some(behind), primary: Mutex::new(0) }
    }

    /// Two nodes, each of which has the other's commits.
    pub fn cluster(first: Arc<Server>) -> Pair {
        let second = Server::new("second");
        first.join(&second);
        second.join(&first);
        Pair { servers: [first, second], behind: None, primary: Mutex::new(0) }
    }

    /// Whether a sudden fail-over may lose commits.
    pub fn loses_writes(&self) -> bool {
        self.behind.is_some()
    }

    /// The server that is the replica at first.
    pub fn second(&self) -> Arc<Server> {
        self.servers[1].clone()
    }

    /// Makes the replica the primary. The old primary becomes a replica `back_ms` after the gap. If the old primary
    /// may have writes that the new one lacks, it is rebuilt from a copy.
    pub async fn fail_over(&self, how: Succession, (gap_ms, back_ms): (u32, u32)) {
        let mut primary = self.primary.lock().await;
        let (old, new) = (&self.servers[*primary], &self.servers[1 - *primary]);
        let gap = tokio::time::sleep(Duration::from_millis(gap_ms.into()));
        *primary = 1 - *primary;
        if self.behind.is_none() {
            match how {
                Succession::Planned => old.hide(true),
                Succession::Sudden | Succession::Split => old.stop(),
            }
            gap.await;
            old.start();
            old.hide(false);
            return;
        }
        match how {
            Succession::Planned => {
                old.set_read_only(true);
                gap.await;
                new.follow(old, clock::now());
                new.set_read_only(false);
            }
            Succession::Sudden => {
                old.stop();
                gap.await;
                new.set_read_only(false);
            }
            Succession::Split => {
                old.stop();
                new.set_read_only(false);
                gap.await;
                old.start();
            }
        }
        tokio::time::sleep(Duration::from_millis(back_ms.into())).await;
        match how {
            Succession::Planned => old.replicate(new),
            Succession::Sudden => old.rebuild(new),
            Succession::Split => {
                old.stop();
                old.rebuild(new);
            }
        }
    }

    /// Waits until the replica has all data of the primary. It was there before anybody used the store.
    pub async fn catch_up(&self) {
        if self.behind.is_none() {
            return;
        }
        let primary = self.primary.lock().await;
        self.servers[1 - *primary].follow(&self.servers[*primary], clock::now());
    }

    /// Makes the replica follow its primary, without end.
    pub async fn replicate(&self) {
        let Some(behind) = self.behind else { return };
        loop {
            tokio::time::sleep(REPLICATION).await;
            // Commits that were not replicated before a fail-over are not replicated during it.
            let Ok(primary) = self.primary.try_lock() else { continue };
            let until = Instant(clock::now().0.saturating_sub(behind.as_micros() as u64));
            self.servers[1 - *primary].follow(&self.servers[*primary], until);
        }
    }
}
