//! A mutex whose value stays in use after a panic.
//!
//! A task that panics while it holds a [`Mutex`] does not make the other tasks fail. No code here leaves a value half
//! changed between two steps that can panic, and a panic of a task that the proxy needs ends the process anyway.

use std::sync::PoisonError;

pub use std::sync::MutexGuard;

/// As [`std::sync::Mutex`], but not poisoned by a panic.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes a mutex that nobody holds.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Waits until nobody else holds the mutex.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panicked_holder_does_not_poison_the_mutex() {
        let mutex = std::sync::Arc::new(Mutex::new(1));
        let held = mutex.clone();
        let panicked = std::thread::spawn(move || {
            let _held = held.lock();
            panic!("while it holds the mutex");
        });
        assert!(panicked.join().is_err());
        assert_eq!(*mutex.lock(), 1);
    }
}
