//! One compilation at a time.

use std::sync::{Condvar, PoisonError};
use std::time::Duration;

use crate::mutex::Mutex;
use crate::policy::Rejection;

/// How many callers wait for the compiler at most. Each of them keeps a component and a thread.
const MAX_WAITING: usize = 4;

/// Gives one caller after the other a turn.
#[derive(Default)]
pub(super) struct Turns {
    queue: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    taken: bool,
    waiting: usize,
}

/// The caller's turn, until it is dropped.
pub(in crate::policy) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for a turn, for `longest` at most.
    ///
    /// # Errors
    /// [`Rejection::Busy`]: others compile all the time, or too many wait already.
    pub(super) fn take(&self, longest: Duration) -> Result<Turn<'_>, Rejection> {
        let mut state = self.queue.lock();
        if state.taken && state.waiting >= MAX_WAITING {
            return Err(Rejection::Busy);
        }
        state.waiting += 1;
        let (mut state, _) = self
            .ended
            .wait_timeout_while(state, longest, |state| state.taken)
            .unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        if state.taken {
            return Err(Rejection::Busy);
        }
        state.taken = true;
        Ok(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().taken = false;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_a_turn_has_an_end() {
        let turns = Turns::default();
        let turn = turns.take(Duration::ZERO).ok().unwrap();
        assert!(matches!(turns.take(Duration::from_millis(20)), Err(Rejection::Busy)));
        drop(turn);
        assert!(turns.take(Duration::ZERO).is_ok(), "the turn is free again");
    }

    #[test]
    fn a_turn_begins_when_the_one_before_has_ended() {
        let turns = Turns::default();
        let turn = turns.take(Duration::ZERO).ok().unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| turns.take(Duration::from_secs(60)).is_ok());
            while turns.queue.lock().waiting == 0 {
                std::thread::yield_now();
            }
            drop(turn);
            assert!(next.join().unwrap());
        });
    }

    #[test]
    fn a_bounded_number_of_callers_wait() {
        let turns = Turns::default();
        let turn = turns.take(Duration::ZERO).ok().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..MAX_WAITING {
                scope.spawn(|| turns.take(Duration::from_secs(60)).is_ok());
            }
            while turns.queue.lock().waiting < MAX_WAITING {
                std::thread::yield_now();
            }
            assert!(matches!(turns.take(Duration::from_secs(60)), Err(Rejection::Busy)));
            drop(turn);
        });
    }
}
