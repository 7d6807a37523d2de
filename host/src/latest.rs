//! A value that changes, for readers that wait for changes and need only the latest value.
//!
//! It works like `tokio::sync::watch`, except that readers are woken in the order in which they began to wait.
//! Tokio wakes them in random order, but a simulation can repeat a run only if each random choice follows from
//! its seed.

use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use tokio::sync::Notify;

/// The sender is gone, so the value does not change any more.
#[derive(Debug, thiserror::Error)]
#[error("the value does not change any more")]
pub struct Closed;

struct Shared<T> {
    state: RwLock<State<T>>,
    changed: Notify,
}

struct State<T> {
    value: T,
    /// How often the value was changed.
    version: u64,
    is_closed: bool,
}

impl<T> Shared<T> {
    fn borrow(&self) -> Ref<'_, T> {
        Ref(self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn update(&self, update: impl FnOnce(&mut State<T>)) {
        update(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_waiters();
    }
}

/// A borrowed value. The sender cannot change it meanwhile and waits, so do not hold the borrow for long.
pub struct Ref<'a, T>(RwLockReadGuard<'a, State<T>>);

impl<T> Deref for Ref<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

/// Changes the value. Each value has one sender.
pub struct Sender<T>(Arc<Shared<T>>);

impl<T> Sender<T> {
    /// The sender of a new value, which has no readers yet.
    pub fn new(value: T) -> Sender<T> {
        let state = State { value, version: 0, is_closed: false };
        Sender(Arc::new(Shared { state: RwLock::new(state), changed: Notify::new() }))
    }

    /// The current value.
    pub fn borrow(&self) -> Ref<'_, T> {
        self.0.borrow()
    }

    /// A reader that has seen the current value.
    pub fn subscribe(&self) -> Receiver<T> {
        Receiver { seen: self.borrow().0.version, shared: self.0.clone() }
    }

    /// Replaces the value and returns the previous one.
    pub fn send_replace(&self, mut value: T) -> T {
        self.send_modify(|old| std::mem::swap(old, &mut value));
        value
    }

    /// Changes the value in place. This counts as a change even if `modify` leaves the value as it was.
    pub fn send_modify(&self, modify: impl FnOnce(&mut T)) {
        self.0.update(|state| {
            modify(&mut state.value);
            state.version += 1;
        });
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.update(|state| state.is_closed = true);
    }
}

/// Reads the value, and waits for changes. A clone has seen what the original had seen.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    /// The version that was seen last.
    seen: u64,
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver { shared: self.shared.clone(), seen: self.seen }
    }
}

impl<T> Receiver<T> {
    /// The current value. It does not count as seen.
    pub fn borrow(&self) -> Ref<'_, T> {
        self.shared.borrow()
    }

    /// The current value. It counts as seen.
    pub fn borrow_and_update(&mut self) -> Ref<'_, T> {
        let now = self.shared.borrow();
        self.seen = now.0.version;
        now
    }

    /// Waits for a value that this reader has not seen, and counts it as seen.
    ///
    /// # Errors
    /// [`Closed`] if the reader has seen the last value and the sender is gone.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        let mut changed = std::pin::pin!(self.shared.changed.notified());
        loop {
            // A change after this line is not missed.
            changed.as_mut().enable();
            {
                let Ref(now) = self.shared.borrow();
                if now.version != self.seen {
                    self.seen = now.version;
                    return Ok(());
                }
                if now.is_closed {
                    return Err(Closed);
                }
            }
            changed.as_mut().await;
            changed.set(self.shared.changed.notified());
        }
    }

    /// Waits until `is_wanted` holds for the value. The value may have changed again when this returns.
    ///
    /// # Errors
    /// [`Closed`] if it does not hold for the last value and the sender is gone.
    pub async fn wait_for(&mut self, mut is_wanted: impl FnMut(&T) -> bool) -> Result<(), Closed> {
        while !is_wanted(&self.borrow_and_update()) {
            self.changed().await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn a_reader_sees_the_latest_value_and_each_change_once() {
        let sender = Sender::new(0);
        let mut reader = sender.subscribe();
        assert!(futures_util::poll!(Box::pin(reader.changed())).is_pending(), "nothing has changed yet");
        sender.send_modify(|value| *value += 1);
        assert_eq!(sender.send_replace(7), 1);
        let mut copy = reader.clone();
        reader.changed().await.unwrap();
        assert_eq!(*reader.borrow(), 7);
        assert!(futures_util::poll!(Box::pin(reader.changed())).is_pending(), "it was seen");
        copy.changed().await.unwrap();
        assert!(futures_util::poll!(Box::pin(sender.subscribe().changed())).is_pending());
    }

    #[tokio::test]
    async fn the_last_value_is_seen_after_the_sender_is_dropped() {
        let sender = Sender::new(0);
        let mut reader = sender.subscribe();
        let mut waits = tokio::spawn({
            let mut reader = reader.clone();
            async move { reader.wait_for(|value| *value == 2).await.is_err() }
        });
        assert!(futures_util::poll!(&mut waits).is_pending());
        sender.send_replace(1);
        drop(sender);
        reader.changed().await.unwrap();
        assert!(reader.changed().await.is_err());
        assert!(waits.await.unwrap(), "it waits for a value that cannot come");
        assert!(reader.wait_for(|value| *value == 1).await.is_ok());
    }

    #[tokio::test]
    async fn readers_continue_in_the_order_in_which_they_began_to_wait() {
        let sender = Sender::new(0);
        let woken = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for n in 0..50 {
            let (mut reader, woken) = (sender.subscribe(), woken.clone());
            tasks.push(tokio::spawn(async move {
                reader.changed().await.unwrap();
                woken.lock().unwrap().push(n);
            }));
        }
        tokio::task::yield_now().await;
        sender.send_replace(1);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*woken.lock().unwrap(), (0..50).collect::<Vec<_>>());
    }
}
