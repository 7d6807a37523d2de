//! The two servers of one store: a primary, and a replica that applies what the primary has committed, with a delay.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::server::Server;
use crate::clock;
use crate::lock::Instant;

pub struct Pair {
    servers: [Arc<Server>; 2],
    /// How far behind the replica is.
    behind: Duration,
    /// Which of the two is the primary. Locked during a fail-over.
    primary: Mutex<usize>,
}

/// How often the replica applies what its primary has committed.
const REPLICATION: Duration = Duration::from_millis(20);

impl Pair {
    /// The replica has all that the primary has, and is `behind` from now on.
    pub fn new(primary: Arc<Server>, behind: Duration) -> Pair {
        let replica = Server::new("replica");
        replica.replicate(&primary);
        Pair { servers: [primary, replica], behind, primary: Mutex::new(0) }
    }

    /// The one that is the replica at first.
    pub fn second(&self) -> Arc<Server> {
        self.servers[1].clone()
    }

    /// The replica becomes the primary `gap_ms` later, and the primary the replica, `back_ms` after that. Where that was
    /// not planned, the primary stops first, what the replica had not heard of is lost, and the primary is made anew.
    pub async fn fail_over(&self, is_planned: bool, (gap_ms, back_ms): (u32, u32)) {
        let mut primary = self.primary.lock().await;
        let (old, new) = (&self.servers[*primary], &self.servers[1 - *primary]);
        if is_planned {
            old.set_read_only(true);
        } else {
            old.stop();
        }
        tokio::time::sleep(Duration::from_millis(gap_ms.into())).await;
        if is_planned {
            new.follow(old, clock::now());
        }
        *primary = 1 - *primary;
        new.set_read_only(false);
        tokio::time::sleep(Duration::from_millis(back_ms.into())).await;
        match is_planned {
            true => old.replicate(new),
            false => old.rebuild(new),
        }
    }

    /// The replica has all that the primary has: it was there before anybody used the store.
    pub async fn catch_up(&self) {
        let primary = self.primary.lock().await;
        self.servers[1 - *primary].follow(&self.servers[*primary], clock::now());
    }

    /// Has the replica follow its primary, without end.
    pub async fn replicate(&self) {
        loop {
            tokio::time::sleep(REPLICATION).await;
            // What was not told before a fail-over is not told during it.
            let Ok(primary) = self.primary.try_lock() else { continue };
            let until = Instant(clock::now().0.saturating_sub(self.behind.as_micros() as u64));
            self.servers[1 - *primary].follow(&self.servers[*primary], until);
        }
    }
}
