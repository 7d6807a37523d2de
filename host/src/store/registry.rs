//! Where the proxies of one store know of each other, and record which policies are live.
//!
//! A proxy has a row while it is a *member*. Its row is a lease on the store's clock: it may write
//! locks for some beats after its last beat, and is counted as gone some beats after that. Whoever
//! counts it as gone deletes its row, and a proxy that finds its row deleted has to join anew.
//!
//! A policy has a *record* with a sequence number, which rises with each change of the record. A member
//! acknowledges a number once nothing that it planned under an earlier one can still be granted.
//!
//! What else decides which keys a resource has is recorded in the same way, under a name that no policy has:
//! [`ROUTES`] or [`guard_record`].

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::{StoreError, StoreFuture};
use crate::lock::{Instant, ServerTime};

/// Why a proxy writes no leases.
pub const NO_MEMBER: &str =
    "this proxy's place in the fleet is not confirmed; GET /v1/fleet on its admin address says why";

/// The record of `[[routes]]`: not a policy, for no policy has a name like this.
pub const ROUTES: &str = "[[routes]]";
/// What the records of `[[guard]]` begin with.
const GUARD: &str = "[[guard]] ";

/// The record of how requests to an application are named.
pub fn guard_record(application: &str) -> String {
    format!("{GUARD}{application}")
}

/// What makes two generations of a policy the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// `sha256:` and 64 hex digits, of the component.
    pub digest: String,
    /// JSON, with its keys in order.
    pub settings: String,
}

#[derive(Clone, Debug)]
pub struct Component {
    pub version: PolicyVersion,
    pub bytes: Bytes,
}

/// What is recorded of a policy, without its components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRecord {
    pub name: String,
    pub seq: u64,
    pub live: PolicyVersion,
    /// Set while a change is under way: claims take the keys of both.
    pub candidate: Option<PolicyVersion>,
    /// What was live before `live`, where that is known.
    pub previous: Option<PolicyVersion>,
    /// When `seq` was reached.
    pub since: ServerTime,
    /// Why the last change was called off, where it was.
    pub note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// One life of a proxy: made anew whenever it joins.
    pub id: u64,
    /// Where peers reach it; empty where they cannot.
    pub address: String,
    /// Machine and process, as [`Pulse::host`].
    pub host: String,
    /// A digest of what decides which policy a resource goes to.
    pub routes: String,
    pub beat: ServerTime,
    /// It is gone when the store's clock has passed this.
    pub until: ServerTime,
    /// By policy, what it has acknowledged; `None` while it joins and grants nothing.
    pub acks: Option<BTreeMap<String, u64>>,
}

/// What a member says of itself with each beat.
#[derive(Clone, Debug)]
pub struct Pulse {
    pub id: u64,
    pub address: String,
    pub host: String,
    pub routes: String,
    /// `None` leaves what is recorded.
    pub acks: Option<BTreeMap<String, u64>>,
    /// How long after its beat the others count it as gone.
    pub lives: Duration,
}

/// Everything that is recorded, at one moment of the store's clock.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub now: ServerTime,
    /// The proxy's clock before the store was asked.
    pub asked_at: Instant,
    pub members: Vec<Member>,
    pub records: Vec<PolicyRecord>,
}

impl PolicyRecord {
    pub fn is_policy(&self) -> bool {
        self.name != ROUTES && !self.is_naming()
    }

    /// Whether it says how the requests to an application are named.
    pub fn is_naming(&self) -> bool {
        self.name.starts_with(GUARD)
    }
}

impl View {
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    pub fn record(&self, name: &str) -> Option<&PolicyRecord> {
        self.records.iter().find(|record| record.name == name)
    }
}

impl Member {
    /// Whether it has acknowledged the record; a member that joins grants nothing, and need not.
    pub fn has_acknowledged(&self, name: &str, seq: u64) -> bool {
        self.acks.as_ref().is_none_or(|acks| acks.get(name).is_some_and(|acked| *acked >= seq))
    }
}

/// Each change is made only if the record is still the one that the caller knows: `false` says that it
/// is not, and nothing was changed.
pub trait Registry: Send + Sync + 'static {
    /// A new row, of a member that joins.
    fn register(&self, me: Pulse) -> StoreFuture<Result<(), StoreError>>;

    /// Says that the member lives, if it has its row still, and reads everything.
    fn beat(&self, me: Pulse) -> StoreFuture<Result<View, StoreError>>;

    fn leave(&self, id: u64) -> StoreFuture<Result<(), StoreError>>;

    /// Deletes the row of a member that has not beaten since `beat`.
    fn evict(&self, id: u64, beat: ServerTime) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes a member that joins one that may grant, if it acknowledges all records as they are.
    fn activate(&self, id: u64, acks: BTreeMap<String, u64>) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes `own` the recorded versions, where no other member may grant. Tokens that are given from then
    /// on are above all that were given before, if a recorded version was another one.
    fn initialize(&self, id: u64, own: Vec<(String, Component)>) -> StoreFuture<Result<bool, StoreError>>;

    /// Records a policy that has no record.
    fn record(&self, name: String, live: Component) -> StoreFuture<Result<(), StoreError>>;

    /// The component of a recorded version: live, candidate or previous; `None` where it is not recorded any
    /// more.
    fn component(
        &self,
        name: String,
        version: PolicyVersion,
    ) -> StoreFuture<Result<Option<Bytes>, StoreError>>;

    /// Begins a change of a policy that has none under way.
    fn propose(&self, name: String, seq: u64, candidate: Component) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes the candidate the live one, if every member that may grant has acknowledged `seq`; `me` does
    /// so with this. Tokens that are given from then on are above all that were given before: the keys of a
    /// resource may have other names, and its tokens rise all the same.
    fn settle(&self, name: String, seq: u64, me: Pulse) -> StoreFuture<Result<bool, StoreError>>;

    /// Drops the candidate.
    fn call_off(&self, name: String, seq: u64, why: String) -> StoreFuture<Result<bool, StoreError>>;

    /// From now on leases are written only until then, by the store's clock and by the proxy's own;
    /// `None`: not at all, and claims that wait to be written are given up.
    fn allow(&self, until: Option<(ServerTime, Instant)>);
}
