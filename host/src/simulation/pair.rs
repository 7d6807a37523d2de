//! The two servers of one store: a primary, and a replica that applies what the primary has committed, with a delay; or two
//! nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::faults::Succession;
use super::options::Second;
use super::server::Server;
use crate::clock;
use crate::lock::Instant;

pub struct Pair {
    servers: [Arc<Server>; 2],
    /// How far behind the replica is; `None` for nodes of a cluster.
    behind: Option<Duration>,
    /// Which of the two is the primary. Locked during a fail-over.
    primary: Mutex<usize>,
}

/// How often the replica applies what its primary has committed.
const REPLICATION: Duration = Duration::from_millis(20);

impl Pair {
    /// The clock of the second server is `ahead_ms` ahead of the first one's.
    pub fn of(second: Second, first: Arc<Server>, ahead_ms: i64) -> Pair {
        let pair = match second {
            Second::Replica(behind) => Pair::new(first, behind),
            Second::Node | Second::Balanced => Pair::cluster(first),
        };
        pair.servers[1].set_clock(ahead_ms * 1_000);
        pair
    }

    /// The replica has all that the primary has, and is `behind` from now on.
    pub fn new(primary: Arc<Server>, behind: Duration) -> Pair {
        let replica = Server::new("replica");
        replica.replicate(&primary);
        Pair { servers: [primary, replica], behind: Some(behind), primary: Mutex::new(0) }
    }

    /// Each of the two has what the other one has committed.
    pub fn cluster(first: Arc<Server>) -> Pair {
        let second = Server::new("second");
        first.join(&second);
        second.join(&first);
        Pair { servers: [first, second], behind: None, primary: Mutex::new(0) }
    }

    /// Whether a sudden fail-over may lose what was committed.
    pub fn loses_writes(&self) -> bool {
        self.behind.is_some()
    }

    /// The one that is the replica at first.
    pub fn second(&self) -> Arc<Server> {
        self.servers[1].clone()
    }

    /// The replica becomes the primary, and the old primary a replica, `back_ms` after the gap. It is made anew of a copy
    /// where it may have writes that the new one lacks.
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

    /// The replica has all that the primary has: it was there before anybody used the store.
    pub async fn catch_up(&self) {
        if self.behind.is_none() {
            return;
        }
        let primary = self.primary.lock().await;
        self.servers[1 - *primary].follow(&self.servers[*primary], clock::now());
    }

    /// Has the replica follow its primary, without end.
    pub async fn replicate(&self) {
        let Some(behind) = self.behind else { return };
        loop {
            tokio::time::sleep(REPLICATION).await;
            // What was not told before a fail-over is not told during it.
            let Ok(primary) = self.primary.try_lock() else { continue };
            let until = Instant(clock::now().0.saturating_sub(behind.as_micros() as u64));
            self.servers[1 - *primary].follow(&self.servers[*primary], until);
        }
    }
}
