//! What this proxy knows of the peers that it has notified, and which of them have ended.
//!
//! The waiters of a peer that has ended are passed over at once. A refused or reset connection proves that the
//! peer has ended only if its address is known to lead to it: the peer was reached there before, or the address
//! is this machine's own. Otherwise the peer may be running at an address that this machine cannot reach, and
//! its waiters poll.

use std::io;
use std::net::SocketAddr;

use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::lock::Key;
use crate::lock::maps::HashMap;
use crate::mutex::Mutex;

/// How many peers are remembered.
const MAX_PEERS: usize = 1_024;
/// How many notifications wait for one peer. The rest is dropped, and the peer's waiters poll.
const QUEUED: usize = 1_024;

/// Called if the notified peer has ended.
pub type Gone = Box<dyn FnOnce() + Send>;

/// A notification on its way to a peer.
pub struct Notification {
    pub key: Key,
    pub gone: Gone,
}

/// The peers that this proxy has notified.
pub struct KnownPeers {
    /// Identifies this machine and its network; empty if the system does not tell.
    place: String,
    known: Mutex<HashMap<Box<str>, KnownPeer>>,
}

#[derive(Default)]
struct KnownPeer {
    /// The channel to the task that calls the peer, if there is one.
    notifications: Option<Sender<Notification>>,
    /// Whether the peer was reached at its address.
    reached: bool,
    /// Whether a warning about the peer was logged.
    warned: bool,
}

impl KnownPeers {
    /// No peers yet, for a proxy at this place.
    pub fn new(place: String) -> KnownPeers {
        KnownPeers { place, known: Mutex::default() }
    }

    /// Queues a notification for the task that calls the peer. If there is no such task, returns the notifications
    /// for a new task.
    pub fn queue(&self, peer: &str, notification: Notification) -> Option<Receiver<Notification>> {
        let mut known = self.known.lock();
        if known.len() >= MAX_PEERS && !known.contains_key(peer) {
            known.retain(|_, peer| peer.notifications.is_some());
        }
        let state = known.entry(peer.into()).or_default();
        if let Some(notifications) = &state.notifications {
            let _ = notifications.try_send(notification);
            return None;
        }
        let (sender, notifications) = channel(QUEUED);
        let _ = sender.try_send(notification);
        state.notifications = Some(sender);
        Some(notifications)
    }

    /// Records that the task that calls the peer ends: the next notification needs a new task.
    pub fn task_ends(&self, peer: &str) {
        if let Some(peer) = self.known.lock().get_mut(peer) {
            peer.notifications = None;
        }
    }

    /// Records that the peer was reached at its address.
    pub fn reached(&self, peer: &str) {
        if let Some(peer) = self.known.lock().get_mut(peer) {
            (peer.reached, peer.warned) = (true, false);
        }
    }

    /// Whether a peer that could not be notified is known to have ended. If not, a warning is logged, once.
    pub fn has_ended(&self, name: &str, error: &io::Error) -> bool {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof,
        };
        let mut known = self.known.lock();
        let Some(peer) = known.get_mut(name) else { return false };
        let refused = matches!(
            error.kind(),
            ConnectionRefused | ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof
        );
        if refused && (peer.reached || is_here(name, &self.place)) {
            tracing::debug!(peer = name, "the proxy of the next waiter has ended");
            known.remove(name);
            return true;
        }
        if !std::mem::replace(&mut peer.warned, true) {
            tracing::warn!(
                peer = name,
                %error,
                "a proxy cannot be told that its waiter is next, so the waiter polls: check that this machine \
                 reaches the proxy at its fleet.listen and fleet.advertise addresses"
            );
        }
        false
    }
}

/// Identifies the machine and the network namespace, in 8 hex digits.
pub fn place() -> String {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = std::fs::read_link("/proc/self/ns/net");
    let (Ok(machine), Ok(network)) = (machine, network) else { return String::new() };
    let digest = Sha256::digest(format!("{machine}{}", network.display()));
    digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the peer's address is a loopback address of this machine.
pub fn is_here(name: &str, place: &str) -> bool {
    let address = |text: &str| text.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
    let here = |run: &str| !place.is_empty() && run.starts_with(place);
    name.split_once('/').is_some_and(|(text, run)| address(text) && here(run))
}
