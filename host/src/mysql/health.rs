//! Whether the store can be used, as its connections find it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::latest;
use crate::store::Health;

/// Where the lanes report. The store is ready while each lane has a connection, or has lost it
/// and not yet failed to open another.
pub struct Board {
    seats: Mutex<Vec<Seat>>,
    now: latest::Sender<Health>,
}

#[derive(Clone)]
enum Seat {
    Connecting,
    Up { server: String, warnings: Vec<String> },
    Down { why: String },
}

impl Board {
    /// `address` is what the operator knows the server by.
    pub fn new(seats: usize, address: &str) -> Board {
        let why = format!("connecting to the MySQL server at {address}");
        let now = latest::Sender::new(Health::Unavailable { why });
        Board { seats: Mutex::new(vec![Seat::Connecting; seats]), now }
    }

    pub fn up(&self, seat: usize, server: &str, warnings: &[String]) {
        self.set(seat, Seat::Up { server: server.to_owned(), warnings: warnings.to_vec() });
    }

    /// `why` tells the operator what to do.
    pub fn down(&self, seat: usize, why: String) {
        self.set(seat, Seat::Down { why });
    }

    pub fn now(&self) -> Health {
        self.now.borrow().clone()
    }

    /// Waits until the store is ready, at most `within`; what it is then.
    pub async fn ready(&self, within: Duration) -> Health {
        let mut changes = self.now.subscribe();
        let ready = changes.wait_for(|health| matches!(health, Health::Ready { .. }));
        let _ = tokio::time::timeout(within, ready).await;
        self.now()
    }

    fn set(&self, seat: usize, state: Seat) {
        let mut seats = self.lock();
        seats[seat] = state;
        let Some(health) = summary(&seats) else { return };
        if self.now() != health {
            self.now.send_replace(health);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` while nothing more is known than at the start.
fn summary(seats: &[Seat]) -> Option<Health> {
    let mut ready = None;
    let mut connecting = false;
    for seat in seats {
        match seat {
            Seat::Down { why } => return Some(Health::Unavailable { why: why.clone() }),
            Seat::Connecting => connecting = true,
            Seat::Up { server, warnings } => {
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
    fn ready_means_every_lane() {
        let board = Board::new(2, "here");
        board.up(0, "MySQL 9", &[]);
        assert!(matches!(board.now(), Health::Unavailable { why } if why.contains("here")));
        board.up(1, "MySQL 9", &["weak".to_owned()]);
        assert!(matches!(board.now(), Health::Ready { .. }));
        board.down(1, "it is gone".to_owned());
        assert_eq!(board.now(), Health::Unavailable { why: "it is gone".to_owned() });
        board.up(1, "MySQL 9", &[]);
        assert!(matches!(board.now(), Health::Ready { .. }));
    }
}
