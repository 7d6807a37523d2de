//! The interface for notifying other proxies of their waiters.

use crate::lock::Key;

/// How proxies notify each other's waiters. A lost notification costs time only, because waiters also poll.
pub trait Peers: Send + Sync + 'static {
    /// The name by which other proxies find this one. It is unique: neither another proxy nor an earlier run of
    /// this one has it.
    fn name(&self) -> &str;

    /// Tells a proxy that one of its waiters is next. `gone` is called if that proxy is known to have ended; it
    /// must not block.
    fn notify(&self, peer: &str, key: &Key, gone: Box<dyn FnOnce() + Send>);
}

/// For a proxy without peers.
pub struct NoPeers;

impl Peers for NoPeers {
    fn name(&self) -> &str {
        "alone"
    }

    fn notify(&self, _peer: &str, _key: &Key, gone: Box<dyn FnOnce() + Send>) {
        gone();
    }
}
