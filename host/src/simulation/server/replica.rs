//! A replica: it applies what its primary has committed, with a delay, and can take its place.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use super::Server;
use crate::clock;
use crate::lock::Instant;

impl Server {
    /// Takes no writes from now on, or takes them again.
    pub fn set_read_only(&self, is_read_only: bool) {
        let value = if is_read_only { "ON" } else { "OFF" };
        let mut state = self.state();
        for name in ["read_only", "super_read_only"] {
            state.settings.insert(name.to_owned(), value.to_owned());
        }
    }

    /// Ends all sessions, and nobody can connect until it is started again.
    pub fn stop(&self) {
        self.is_down.store(true, Relaxed);
        self.crash();
    }

    /// Starts the server again after [`Server::stop`], with the same data.
    pub fn start(&self) {
        self.is_down.store(false, Relaxed);
    }

    pub fn is_down(&self) -> bool {
        self.is_down.load(Relaxed)
    }

    /// Becomes a replica of `primary`, as a copy of what is committed there now.
    pub fn replicate(&self, primary: &Server) {
        let tables = {
            let mut primary = primary.state();
            primary.log = Some(VecDeque::new());
            primary.committed()
        };
        self.set_read_only(true);
        let mut state = self.state();
        state.log = None;
        state.forget_contents();
        state.tables = tables;
        drop(state);
        self.start();
    }

    /// Becomes a replica that was made anew of a copy of `primary`: to proxies it is another server than before.
    pub fn rebuild(&self, primary: &Server) {
        self.replicate(primary);
        let uuid = format!("{}-{}", self.name, clock::now().0);
        self.state().settings.insert("server_uuid".to_owned(), uuid);
    }

    /// Applies what the primary had committed by `until`.
    pub fn follow(&self, primary: &Server, until: Instant) {
        let mut source = primary.state();
        let Some(log) = &mut source.log else { return };
        let mut state = self.state();
        while let Some((_, change)) = log.pop_front_if(|(at, _)| *at <= until) {
            state.apply(change);
        }
    }
}
