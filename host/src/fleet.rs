//! The proxies of one store: which of them are alive, and the policies that all of them follow.
//!
//! | module | content |
//! | --- | --- |
//! | [`machine`] | decides what a member does next; pure |
//! | [`drive`] | joins the fleet, applies the records, and evicts members that are gone |
//! | [`change`] | replaces a policy on all members |
//! | [`canary`] | versions that decide for a share of the keys |
//! | [`relapse`] | versions that go back by themselves |
//! | [`push`] | pushes of policies by operators and files |
//! | [`naming`] | changes how guarded requests are named |
//! | [`named`] | records that all leases have the keys that the records name |
//! | [`rules`] | compares the rules of who may do what |
//! | [`status`] | the state for operators |
//! | [`host`] | identifies the process of a proxy |
//!
//! One task sends heartbeats on its own connection: a heartbeat records that this proxy is alive, and reads the
//! records. Another task does what [`machine`] decides. A proxy may write leases until [`WRITES`] heartbeat intervals
//! after its last confirmed heartbeat; the server itself checks this with every write. For the other proxies, it is
//! gone after [`LIVES`] intervals, when its row is deleted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::audit::Audit;
use crate::auth::Auth;
use crate::clock;
use crate::config::{FleetConfig, Route};
use crate::coverage::{Branch, reached};
use crate::latest;
use crate::lock::Instant;
use crate::lock::maps::HashMap;
use crate::mutex::Mutex;
use crate::policy::{Generation, Policies, Prepared};
use crate::service::Service;
use crate::store::StoreError;
use crate::store::registry::{
    Component, PeerSecret, PolicyVersion, Pulse, ROUTES, Registry, View, digest, guard_record,
};
use crate::telemetry::Metrics;
use crate::vital;

mod canary;
mod change;
mod drive;
mod host;
mod machine;
mod named;
mod naming;
mod push;
mod relapse;
mod rules;
mod status;

pub use change::{ChangeError, Changed};
pub use machine::Renaming;
pub use naming::NotNamed;
pub use push::{PushError, Pushed};
pub use status::{CanaryStatus, FleetStatus, MemberStatus, PolicyRecord};

use rules::OwnRules;

/// The number of heartbeat intervals after its last heartbeat during which a proxy may write.
const WRITES: u32 = 10;
/// The number of heartbeat intervals after its last heartbeat after which a proxy is gone. The difference to
/// [`WRITES`] is for writes that the server checked in time but that commit late.
const LIVES: u32 = 15;
/// The least difference between the two limits, however short the heartbeat interval. A proxy waits 3 s for an
/// answer of the server: if a COMMIT stalls longer, for example behind a global read lock, no client is told of
/// its grant.
const LANDING: Duration = Duration::from_secs(4);
/// The factor by which heartbeats are faster for a while after a change has begun.
const HURRY: u32 = 10;
/// How long heartbeats are faster while this proxy joins; for changes see [`machine::hurries`].
const JOIN_HURRY_US: u64 = 10_000_000;
/// How long a stopping proxy waits for its row to be deleted.
const GOODBYE: Duration = Duration::from_secs(1);

/// The parts that a [`Fleet`] is made of.
pub struct Parts {
    /// The members and records in the store.
    pub registry: Arc<dyn Registry>,
    /// A closed service: it is opened once this proxy has joined.
    pub service: Service,
    /// The policy generations of this proxy.
    pub policies: Policies,
    /// The `[[routes]]` of this proxy's configuration.
    pub routes: Vec<Route>,
    /// How the requests to each application are named: [`crate::config::naming`].
    pub naming: BTreeMap<String, String>,
    /// `[fleet]`.
    pub config: FleetConfig,
    /// The metrics to which the fleet reports.
    pub metrics: Metrics,
    /// Where the fleet writes what it does by itself.
    pub audit: Audit,
    /// The address at which other proxies notify this proxy of its waiters' turns.
    pub address: String,
    /// The rules of this proxy: who may do what.
    pub auth: Auth,
    /// For how long this proxy grants while its rules are not those of its store.
    pub grace: Duration,
    /// Where the fleet puts the secret of the proxies of this store.
    pub peer_secret: latest::Sender<Option<PeerSecret>>,
}

/// This proxy's membership among the proxies of its store. Cheap to clone.
#[derive(Clone)]
pub struct Fleet(Arc<Inner>);

struct Inner {
    registry: Arc<dyn Registry>,
    service: Service,
    policies: Policies,
    metrics: Metrics,
    audit: Audit,
    config: FleetConfig,
    host: String,
    /// The record of `[[routes]]`.
    routes: Component,
    /// The records of how guarded requests are named. Locked while they change, and while this proxy joins with them.
    naming: tokio::sync::Mutex<Records>,
    state: Mutex<State>,
    view: latest::Sender<View>,
    peer_secret: latest::Sender<Option<PeerSecret>>,
    auth: Auth,
    grace: Duration,
    rules: Mutex<OwnRules>,
    /// Requests an immediate heartbeat.
    hurry: Notify,
    /// Generations that this proxy has checked, by policy, so that a pushed component is not compiled twice.
    prepared: Mutex<HashMap<String, Prepared>>,
    stop: CancellationToken,
}

/// Records with their names.
type Records = Vec<(String, Component)>;

fn versions(records: &Records) -> BTreeMap<String, PolicyVersion> {
    records.iter().map(|(name, component)| (name.clone(), component.version.clone())).collect()
}

#[derive(Default)]
struct State {
    /// 0 before the first registration.
    id: u64,
    stage: Stage,
    address: String,
    /// When the current stage was reached.
    since: Instant,
    /// The records that this member has acknowledged.
    acks: BTreeMap<String, u64>,
    /// For each policy, why this member does not acknowledge its record.
    held_up: BTreeMap<String, String>,
    /// What this proxy has recorded as [`View::named_by`].
    named_by: String,
    /// Why this proxy is not a member.
    trouble: Option<String>,
    /// When a heartbeat was last answered.
    heard: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// The proxy has no row.
    #[default]
    Out,
    /// The proxy has a row, but grants nothing.
    Joining,
    Member,
}

impl Fleet {
    /// Starts to join in the background. The proxy grants nothing before it has joined.
    pub fn start(parts: Parts) -> Fleet {
        let Parts {
            registry,
            service,
            policies,
            routes,
            naming,
            address,
            config,
            metrics,
            audit,
            auth,
            grace,
            peer_secret,
        } = parts;
        let view = latest::Sender::new(View::default());
        let trouble = Some("the proxy is starting".to_owned());
        let state = State { address, trouble, since: clock::now(), ..State::default() };
        let fleet = Fleet(Arc::new(Inner {
            registry,
            service,
            policies,
            metrics,
            audit,
            config,
            host: host::here(),
            routes: record_of(&routes),
            naming: tokio::sync::Mutex::new(naming_records(&naming)),
            state: Mutex::new(state),
            view,
            peer_secret,
            auth,
            grace,
            rules: Mutex::default(),
            hurry: Notify::new(),
            prepared: Mutex::default(),
            stop: CancellationToken::new(),
        }));
        fleet.0.metrics.fleet.members(0);
        vital::spawn("the heartbeat of the fleet", fleet.clone().beats());
        vital::spawn("the membership in the fleet", fleet.clone().run());
        fleet
    }

    /// Stops writing and deletes this proxy's row, so that no other proxy waits for it.
    pub async fn leave(&self) {
        self.0.stop.cancel();
        self.0.registry.allow(None);
        let id = std::mem::take(&mut *self.0.state.lock()).id;
        if id != 0 {
            let left = tokio::time::timeout(GOODBYE, self.0.registry.leave(id)).await;
            if !matches!(left, Ok(Ok(()))) {
                tracing::info!(
                    "the store did not confirm that this proxy left; other proxies wait for it for a while"
                );
            }
        }
    }

    /// Sends heartbeats periodically.
    async fn beats(self) {
        let stop = self.0.stop.clone();
        loop {
            let pulse = self.0.pulse();
            let heard = tokio::select! {
                biased;
                heard = self.0.registry.beat(pulse.clone()) => heard,
                () = stop.cancelled() => return,
            };
            match heard {
                Ok(view) => self.0.heard(&pulse, view),
                Err(error) => self.0.unheard(&error),
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(self.0.pause()) => {}
                () = self.0.hurry.notified() => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

impl Inner {
    fn pulse(&self) -> Pulse {
        let state = self.state.lock();
        Pulse {
            id: state.id,
            address: state.address.clone(),
            host: self.host.clone(),
            routes: self.fingerprint(),
            acks: (state.stage == Stage::Member).then(|| state.acks.clone()),
            rules: rules::of(&self.auth).mark(),
            lives: (self.config.beat * LIVES).max(self.config.beat * WRITES + LANDING),
        }
    }

    /// The time until the next heartbeat.
    fn pause(&self) -> Duration {
        let state = self.state.lock();
        let hurries = match state.stage {
            Stage::Member => machine::hurries(&self.view.borrow()),
            Stage::Out | Stage::Joining => clock::now().us_since(state.since) < JOIN_HURRY_US,
        };
        if hurries { self.config.beat / HURRY } else { self.config.beat }
    }

    fn heard(&self, pulse: &Pulse, view: View) {
        let mut state = self.state.lock();
        if state.id != pulse.id {
            return;
        }
        state.heard = Some(view.asked_at);
        let forgotten = machine::has_forgotten(&view, pulse.acks.as_ref());
        match (state.stage, view.member(pulse.id).filter(|_| !forgotten)) {
            (Stage::Member, Some(me)) => {
                let writes = u64::try_from((self.config.beat * WRITES).as_micros()).unwrap_or(u64::MAX);
                self.registry.allow(Some((me.beat.plus_us(writes), view.asked_at.plus_us(writes))));
            }
            (Stage::Joining | Stage::Member, None) => {
                let why = match forgotten {
                    true => "the store has lost what was recorded of the policies",
                    false => "the other proxies have counted this one as gone: it was silent for too long",
                };
                self.step_out(&mut state, why);
            }
            _ => {}
        }
        drop(state);
        self.see_rules(&view, pulse.id);
        self.metrics.fleet.members(view.members.len());
        self.peer_secret.send_replace(view.peer_secret.clone());
        self.view.send_replace(view);
    }

    fn unheard(&self, error: &StoreError) {
        let mut state = self.state.lock();
        tracing::debug!(%error, "a heartbeat was not answered");
        if state.stage != Stage::Member {
            state.trouble = Some(error.to_string());
        }
    }

    /// The live generation of each policy on this proxy.
    fn own(&self) -> BTreeMap<String, PolicyVersion> {
        let version = |name: &str| Some((name.to_owned(), version_of(&*self.policies.get(name)?)));
        self.policies.names().filter_map(version).collect()
    }

    /// The records that this proxy would initialize.
    fn own_records(&self, naming: &Records) -> Records {
        let own = |name: &str| Some((name.to_owned(), component_of(&*self.policies.get(name)?)));
        let policies = self.policies.names().filter_map(own);
        policies.chain([(ROUTES.to_owned(), self.routes.clone())]).chain(naming.iter().cloned()).collect()
    }

    fn fingerprint(&self) -> String {
        machine::fingerprint(&self.routes.version.digest)
    }

    /// Stops granting until this proxy has joined again.
    fn step_out(&self, state: &mut State, why: &str) {
        reached(Branch::CountedAsGone);
        self.registry.allow(None);
        self.service.close();
        (state.stage, state.since) = (Stage::Out, clock::now());
        state.trouble = Some(format!("{why}; it joins again"));
        tracing::warn!("{why}; joining again");
    }

    /// Requests an immediate heartbeat, and waits for a view that was read after this call.
    async fn fresh_view(&self, views: &mut latest::Receiver<View>) {
        let now = clock::now();
        self.hurry.notify_one();
        let _ = views.wait_for(|view| view.asked_at >= now).await;
    }
}

fn version_of(generation: &Generation) -> PolicyVersion {
    PolicyVersion {
        digest: generation.digest().to_string(),
        settings: serde_json::to_string(generation.settings()).unwrap_or_default(),
    }
}

fn component_of(generation: &Generation) -> Component {
    Component { version: version_of(generation), bytes: generation.component() }
}

fn record_of(routes: &[Route]) -> Component {
    let pairs: Vec<(&str, &str)> =
        routes.iter().map(|route| (route.resource.as_str(), route.policy.as_str())).collect();
    let texts = pairs.iter().flat_map(|(resource, policy)| [*resource, *policy]);
    recorded(texts, serde_json::to_vec(&pairs).unwrap_or_default())
}

fn naming_records(naming: &BTreeMap<String, String>) -> Records {
    let record = |(application, naming): (&String, &String)| {
        (guard_record(application), recorded([naming.as_str()], naming.clone().into_bytes()))
    };
    naming.iter().map(record).collect()
}

/// A record other than a policy: a digest of texts, and content for people to read.
fn recorded<'a>(texts: impl IntoIterator<Item = &'a str>, shown: Vec<u8>) -> Component {
    Component {
        version: PolicyVersion { digest: digest(texts), settings: "{}".to_owned() },
        bytes: shown.into(),
    }
}
