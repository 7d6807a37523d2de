//! Whether the store can be used, as reported by its lanes.

use std::time::Duration;

use crate::latest;
use crate::mutex::Mutex;
use crate::store::Health;

/// Collects the states of the lanes. The store is ready while each lane has a connection, or has lost it and
/// has not yet failed to open another.
pub struct LaneHealth {
    lanes: Mutex<Vec<LaneState>>,
    now: latest::Sender<Health>,
}

#[derive(Clone)]
enum LaneState {
    Connecting,
    Up { server: String, warnings: Vec<String> },
    Down { why: String },
}

impl LaneHealth {
    /// `address` is the name that operators know the server by.
    pub fn new(lanes: usize, address: &str) -> LaneHealth {
        let why = format!("connecting to the MySQL server at {address}");
        let now = latest::Sender::new(Health::Unavailable { why });
        LaneHealth { lanes: Mutex::new(vec![LaneState::Connecting; lanes]), now }
    }

    /// The lane has a connection.
    pub fn up(&self, lane_index: usize, server: &str, warnings: &[String]) {
        self.set(lane_index, LaneState::Up { server: server.to_owned(), warnings: warnings.to_vec() });
    }

    /// The lane could not open a connection; `why` tells operators what to do.
    pub fn down(&self, lane_index: usize, why: String) {
        self.set(lane_index, LaneState::Down { why });
    }

    /// The store's health.
    pub fn now(&self) -> Health {
        self.now.borrow().clone()
    }

    /// Waits until the store is ready, but no longer than `within`. Returns the store's health.
    pub async fn ready(&self, within: Duration) -> Health {
        let mut changes = self.now.subscribe();
        let ready = changes.wait_for(|health| matches!(health, Health::Ready { .. }));
        let _ = tokio::time::timeout(within, ready).await;
        self.now()
    }

    fn set(&self, lane_index: usize, state: LaneState) {
        let mut lanes = self.lanes.lock();
        lanes[lane_index] = state;
        let Some(health) = summary(&lanes) else { return };
        if self.now() != health {
            self.now.send_replace(health);
        }
    }
}

/// `None` while a lane connects for the first time and no lane is down.
fn summary(lanes: &[LaneState]) -> Option<Health> {
    let mut ready = None;
    let mut connecting = false;
    for lane_index in lanes {
        match lane_index {
            LaneState::Down { why } => return Some(Health::Unavailable { why: why.clone() }),
            LaneState::Connecting => connecting = true,
            LaneState::Up { server, warnings } => {
                ready.get_or_insert(Health::Ready { server: server.clone(), warnings: warnings.clone() });
            }
        }
    }
    ready.filter(|_| !connecting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_ready_when_every_lane_is_up() {
        let health = LaneHealth::new(2, "here");
        health.up(0, "MySQL 9", &[]);
        assert!(matches!(health.now(), Health::Unavailable { why } if why.contains("here")));
        health.up(1, "MySQL 9", &["weak".to_owned()]);
        assert!(matches!(health.now(), Health::Ready { .. }));
        health.down(1, "it is gone".to_owned());
        assert_eq!(health.now(), Health::Unavailable { why: "it is gone".to_owned() });
        health.up(1, "MySQL 9", &[]);
        assert!(matches!(health.now(), Health::Ready { .. }));
    }
}
