//! The registry of a store: its proxies, and the policies that are live.
//!
//! A proxy has a row while it is a *member* of the fleet. The row is a lease on the store's clock: the proxy
//! may write locks for several heartbeat intervals after its last heartbeat, and is considered gone several
//! intervals after that. A proxy that considers another one gone deletes its row. A proxy that finds its own
//! row deleted has to join again.
//!
//! A policy has a *record* with a sequence number, which rises with each change of the record. A member
//! acknowledges a number when nothing that it planned under an earlier number can still be granted.
//!
//! Other data that decides which keys a resource has is recorded in the same way, under a name that no policy
//! has: [`ROUTES`] or [`guard_record`].

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::{StoreError, StoreFuture};
use crate::lock::{Instant, ServerTime};
use crate::random;

/// The error text of a proxy that may not write leases.
pub const NO_MEMBER: &str =
    "this proxy's place in the fleet is not confirmed; GET /v1/fleet on its admin address says why";

/// The name of the record of `[[routes]]`. No policy has a name like this.
pub const ROUTES: &str = "[[routes]]";
/// How the names of `[[guard]]` records begin.
const GUARD: &str = "[[guard]] ";

/// The name of the record that says how requests to an application are named.
pub fn guard_record(application: &str) -> String {
    format!("{GUARD}{application}")
}

/// A digest of texts, which tells where each text ends.
pub fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Identifies a generation of a policy: two generations with equal versions are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// The digest of the component: `sha256:` and 64 hex digits.
    pub digest: String,
    /// The settings as JSON with sorted keys.
    pub settings: String,
}

/// A version of a policy with its component.
#[derive(Clone, Debug)]
pub struct Component {
    /// The digest and the settings.
    pub version: PolicyVersion,
    /// The WebAssembly component.
    pub bytes: Bytes,
}

/// A version that decides for a share of the keys, while claims take the keys of the live version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CanaryRecord {
    /// The version.
    pub version: PolicyVersion,
    /// The share and what ends the canary, in the form of the fleet.
    pub terms: String,
}

/// The record of a policy, without its components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRecord {
    /// The name of the policy, or [`ROUTES`] or a [`guard_record`].
    pub name: String,
    /// The sequence number; rises with each change.
    pub seq: u64,
    /// The version that names keys.
    pub live: PolicyVersion,
    /// Set during a change: claims take the keys of both versions.
    pub candidate: Option<PolicyVersion>,
    /// The canary, if there is one and no change is in progress.
    pub canary: Option<CanaryRecord>,
    /// The version before `live`, if it is known.
    pub previous: Option<PolicyVersion>,
    /// When the record got its current `seq`.
    pub since: ServerTime,
    /// Why the last change was cancelled, or why the proxies made it by themselves.
    pub note: Option<String>,
}

/// The row of a proxy that belongs to the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Identifies one membership of a proxy: it is new each time the proxy joins.
    pub id: u64,
    /// The address for other proxies; empty if they cannot reach this one.
    pub address: String,
    /// The machine and the process, as in [`Pulse::host`].
    pub host: String,
    /// A digest of the configuration that decides which policy a resource has.
    pub routes: String,
    /// The last heartbeat.
    pub beat: ServerTime,
    /// The member is considered gone when the store's clock has passed this moment.
    pub until: ServerTime,
    /// The acknowledged sequence number of each policy; `None` while the member joins and grants nothing.
    pub acks: Option<BTreeMap<String, u64>>,
    /// The [mark](RulesVersion::mark) of the rules of who may do what that the member goes by; `None` while it joins, and
    /// for earlier versions of the program.
    pub rules: Option<u64>,
}

/// The data that a member sends with each heartbeat.
#[derive(Clone, Debug)]
pub struct Pulse {
    /// The id of the membership; see [`Member::id`].
    pub id: u64,
    /// The address for other proxies; empty if they cannot reach this one.
    pub address: String,
    /// The machine and the process of the proxy.
    pub host: String,
    /// A digest of the configuration that decides which policy a resource has.
    pub routes: String,
    /// The acknowledged sequence number of each policy; `None` leaves the recorded ones unchanged.
    pub acks: Option<BTreeMap<String, u64>>,
    /// The [mark](RulesVersion::mark) of the rules of who may do what. It is recorded together with `acks`.
    pub rules: u64,
    /// How long after this heartbeat the others consider the member gone.
    pub lives: Duration,
}

/// Rules of who may do what, as proxies compare them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RulesVersion {
    /// The number that operators raise.
    pub number: u64,
    /// A digest of what the rules decide, in plain ASCII characters without a colon.
    pub digest: String,
}

impl RulesVersion {
    /// A number that other rules do not have. It tells nothing about the rules.
    pub fn mark(&self) -> u64 {
        let hash = Sha256::digest(self.to_string());
        hash.iter().take(8).fold(0, |mark, byte| mark << 8 | u64::from(*byte))
    }

    /// The rules that [`Display`](std::fmt::Display) shows as this text.
    pub fn parse(text: &str) -> Option<RulesVersion> {
        let (number, digest) = text.split_once(':')?;
        Some(RulesVersion { number: number.parse().ok()?, digest: digest.to_owned() })
    }
}

impl std::fmt::Display for RulesVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.number, self.digest)
    }
}

/// The rules that the proxies of a store should go by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesRecord {
    /// The rules.
    pub rules: RulesVersion,
    /// When they were recorded.
    pub since: ServerTime,
}

/// The secret by which the proxies of one store recognise each other.
#[derive(Clone, PartialEq, Eq)]
pub struct PeerSecret([u8; PeerSecret::BYTES]);

impl PeerSecret {
    /// The length of a secret.
    pub const BYTES: usize = 32;

    /// A new secret.
    pub fn random() -> PeerSecret {
        PeerSecret(random::number())
    }

    /// A secret as the store has it; `None` if these bytes are none.
    pub fn from_bytes(bytes: &[u8]) -> Option<PeerSecret> {
        bytes.try_into().ok().map(PeerSecret)
    }

    /// The secret itself.
    pub fn bytes(&self) -> &[u8; PeerSecret::BYTES] {
        &self.0
    }
}

impl std::fmt::Debug for PeerSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PeerSecret")
    }
}

/// All members and records, at one moment of the store's clock.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The store's clock.
    pub now: ServerTime,
    /// The proxy's clock before the store was asked.
    pub asked_at: Instant,
    /// All members of the fleet, including those that are joining.
    pub members: Vec<Member>,
    /// The records of all policies, of the routes, and of how guarded requests are named.
    pub records: Vec<PolicyRecord>,
    /// By what the proxies of this store recognise each other, if they have agreed on it.
    pub peer_secret: Option<PeerSecret>,
    /// The rules of who may do what that the proxies should go by.
    pub rules: Option<RulesRecord>,
    /// The server that was asked, with its epoch.
    pub server: String,
    /// Under which records every lease in the store was last known to have the keys that they name: their
    /// [digest](View::names). Empty if no such records are known.
    pub named_by: String,
}

impl PolicyRecord {
    /// Whether it is the record of a policy.
    pub fn is_policy(&self) -> bool {
        self.name != ROUTES && !self.is_naming()
    }

    /// Whether there is neither a change in progress nor a canary.
    pub fn is_settled(&self) -> bool {
        self.candidate.is_none() && self.canary.is_none()
    }

    /// Whether the record says how the requests to an application are named.
    pub fn is_naming(&self) -> bool {
        self.name.starts_with(GUARD)
    }
}

impl View {
    /// The member with this id, if its row exists.
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    /// A digest of the records that decide which keys the leases of the proxy's policies have; `None` during a change. The
    /// numbers of the records, the server and its epoch are a part of it, so it comes back neither after a change nor
    /// after a fail-over. `spaces`: which kinds of keys there are.
    pub fn names(&self, has_policy: impl Fn(&str) -> bool, spaces: &str) -> Option<String> {
        // Another version of the program may name keys differently.
        let mut texts = vec![env!("CARGO_PKG_VERSION").to_owned(), self.server.clone(), spaces.to_owned()];
        for record in &self.records {
            if record.is_policy() && !has_policy(&record.name) {
                continue;
            }
            if record.candidate.is_some() {
                return None;
            }
            let PolicyVersion { digest, settings } = record.live.clone();
            texts.extend([record.name.clone(), record.seq.to_string(), digest, settings]);
        }
        Some(digest(texts.iter().map(String::as_str)))
    }

    /// The record with this name.
    pub fn record(&self, name: &str) -> Option<&PolicyRecord> {
        self.records.iter().find(|record| record.name == name)
    }
}

impl Member {
    /// Whether the member has acknowledged the record. A member that is joining grants nothing and need not
    /// acknowledge.
    pub fn has_acknowledged(&self, name: &str, seq: u64) -> bool {
        self.acks.as_ref().is_none_or(|acks| acks.get(name).is_some_and(|acked| *acked >= seq))
    }
}

/// The registry of the members and the policy records. A change is made only if the record is still as the
/// caller knows it; otherwise nothing is changed, and the answer is `false`.
///
/// # Errors
/// All futures fail if the store does not answer.
pub trait Registry: Send + Sync + 'static {
    /// Adds the row of a member that joins.
    fn register(&self, me: Pulse) -> StoreFuture<Result<(), StoreError>>;

    /// Records a heartbeat, if the member still has its row, and reads everything.
    fn beat(&self, me: Pulse) -> StoreFuture<Result<View, StoreError>>;

    /// Deletes the row of a member.
    fn leave(&self, id: u64) -> StoreFuture<Result<(), StoreError>>;

    /// Deletes the row of a member that has had no heartbeat since `beat`.
    fn evict(&self, id: u64, beat: ServerTime) -> StoreFuture<Result<bool, StoreError>>;

    /// Lets a joining member grant locks, if its `acks` acknowledge the current state of all records.
    fn activate(&self, me: Pulse) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes `own` the recorded versions, if no other member may grant. If a recorded version was different,
    /// later tokens are above all earlier ones.
    fn initialize(&self, id: u64, own: Vec<(String, Component)>) -> StoreFuture<Result<bool, StoreError>>;

    /// Adds the record of a policy that has none.
    fn record(&self, name: String, live: Component) -> StoreFuture<Result<(), StoreError>>;

    /// The component of a recorded version: live, candidate, canary or previous; `None` if the version is no longer
    /// recorded.
    fn component(
        &self,
        name: String,
        version: PolicyVersion,
    ) -> StoreFuture<Result<Option<Bytes>, StoreError>>;

    /// Makes a version the canary of a policy, or changes the terms of its canary, if no change is in progress.
    fn canary(
        &self,
        name: String,
        seq: u64,
        canary: Component,
        terms: String,
    ) -> StoreFuture<Result<bool, StoreError>>;

    /// Changes the terms of a canary.
    fn canary_terms(&self, name: String, seq: u64, terms: String) -> StoreFuture<Result<bool, StoreError>>;

    /// Begins a change of a policy, if no change is in progress. A canary ends with it. `why`: why the proxies begin it by
    /// themselves.
    fn propose(
        &self,
        name: String,
        seq: u64,
        candidate: Component,
        why: Option<String>,
    ) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes the candidate live, if every member that may grant has acknowledged `seq`; this call acknowledges
    /// it for `me`. Later tokens are above all earlier ones, because the keys of a resource may get other names
    /// and its tokens must still rise.
    fn settle(&self, name: String, seq: u64, me: Pulse) -> StoreFuture<Result<bool, StoreError>>;

    /// Cancels the change or the canary: drops the candidate and records why.
    fn call_off(&self, name: String, seq: u64, why: String) -> StoreFuture<Result<bool, StoreError>>;

    /// Makes `secret` the [secret of the proxies](View::peer_secret), if they have none.
    fn agree_on(&self, secret: PeerSecret) -> StoreFuture<Result<(), StoreError>>;

    /// Records rules of who may do what, if the recorded ones are still those `before`. Tells whether they were.
    fn record_rules(
        &self,
        before: Option<RulesVersion>,
        now: RulesVersion,
    ) -> StoreFuture<Result<bool, StoreError>>;

    /// Records that every lease in the store has the keys that the records with this [digest](View::names) name. With an
    /// empty text: that no such records are known.
    fn record_named_by(&self, names: String) -> StoreFuture<Result<(), StoreError>>;

    /// Limits until when leases may be written, by the store's clock and by the proxy's own clock. `None`: no
    /// leases are written, and claims that wait to be written fail.
    fn allow(&self, until: Option<(ServerTime, Instant)>);
}
