//! A replica, which applies the primary's commits with a delay and can replace the primary.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use super::Server;
use crate::clock;
use crate::lock::Instant;

impl Server {
    /// Makes the server read-only, or writable again.
    pub fn set_read_only(&self, is_read_only: bool) {
        let value = if is_read_only { "ON" } else { "OFF" };
        let mut state = self.state.lock();
        for name in ["read_only", "super_read_only"] {
            state.settings.insert(name.to_owned(), value.to_owned());
        }
    }

    /// Ends all sessions and refuses connections until [`Server::start`].
    pub fn stop(&self) {
        self.is_down.store(true, Relaxed);
        self.crash();
    }

    /// Starts the server after [`Server::stop`], with the same data.
    pub fn start(&self) {
        self.is_down.store(false, Relaxed);
    }

    /// Whether the server is stopped.
    pub fn is_down(&self) -> bool {
        self.is_down.load(Relaxed)
    }

    /// Becomes a replica of `primary`, with a copy of the data that is committed there now.
    pub fn replicate(&self, primary: &Server) {
        let tables = {
            let mut primary = primary.state.lock();
            primary.log = Some(VecDeque::new());
            primary.committed()
        };
        self.set_read_only(true);
        let mut state = self.state.lock();
        state.log = None;
        state.forget_contents();
        state.tables = tables;
        drop(state);
        self.start();
    }

    /// Becomes a replica that was rebuilt from a copy of `primary`. Proxies see it as a different server.
    pub fn rebuild(&self, primary: &Server) {
        self.replicate(primary);
        let uuid = format!("{}-{}", self.name, clock::now().0);
        self.state.lock().settings.insert("server_uuid".to_owned(), uuid);
    }

    /// Applies the commits of the primary until `until`.
    pub fn follow(&self, primary: &Server, until: Instant) {
        let mut source = primary.state.lock();
        let Some(log) = &mut source.log else { return };
        let mut state = self.state.lock();
        while let Some((_, change)) = log.pop_front_if(|(at, _)| *at <= until) {
            state.apply(change);
        }
    }
}
