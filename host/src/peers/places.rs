//! A bounded number of connections.

use std::collections::VecDeque;

use tokio_util::sync::CancellationToken;

use crate::mutex::Mutex;

/// Places for connections. When all are taken, the next connection gets the place of the one that came first: a
/// connection that needs its place for a moment only gets one, however many others keep theirs.
pub struct Places {
    count: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    /// The number of the next place.
    next: u64,
    /// In the order in which they were taken.
    places: VecDeque<(u64, CancellationToken)>,
}

/// The place of a connection, until it is dropped or [lost](Place::lost).
pub struct Place<'a> {
    places: &'a Places,
    number: u64,
    ends: CancellationToken,
}

impl Places {
    /// This many places, all of them free.
    pub fn new(count: usize) -> Places {
        Places { count, taken: Mutex::default() }
    }

    /// Takes a place.
    pub fn take(&self) -> Place<'_> {
        let mut taken = self.taken.lock();
        while taken.places.len() >= self.count
            && let Some((_, ends)) = taken.places.pop_front()
        {
            ends.cancel();
        }
        let (number, ends) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.places.push_back((number, ends.clone()));
        Place { places: self, number, ends }
    }
}

impl Place<'_> {
    /// Waits until another connection has the place.
    pub async fn lost(&self) {
        self.ends.cancelled().await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.places.taken.lock().places.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_too_many_connections_loses_its_place() {
        let places = Places::new(2);
        let first = places.take();
        let second = places.take();
        drop(places.take());
        assert!(first.ends.is_cancelled() && !second.ends.is_cancelled());
        drop(first);
        let last = places.take();
        assert!(!second.ends.is_cancelled() && !last.ends.is_cancelled(), "one had left");
        drop((second, last));
        assert!(places.taken.lock().places.is_empty());
    }
}
