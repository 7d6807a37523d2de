//! [`Registry`] in tables: a row for each proxy, a row for each policy, a row for the policy's previous version, and
//! a row for what all proxies share. The statements are in [`tables`].
//!
//! A transaction locks rows of policies before rows of proxies, so that transactions cannot deadlock. A
//! heartbeat locks one row, and has a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::context::Context;
use super::session::fault::Fault;
use super::session::link::Link;
use super::session::spare::SpareLink;
use crate::lock::{Instant, ServerTime};
use crate::store::registry::{Component, PeerSecret, PolicyVersion, Pulse, Registry, RulesVersion, View};
use crate::store::{StoreError, StoreFuture};

mod tables;

/// A heartbeat that takes longer is given up with its connection. Sending a component takes longer.
const BEAT_LIMIT: Duration = Duration::from_secs(3);
const WORK_LIMIT: Duration = Duration::from_secs(10);

/// The registry on a server.
#[derive(Clone)]
pub struct MysqlRegistry(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    beats: SpareLink,
    work: SpareLink,
}

impl Inner {
    /// Takes the connection, or opens one.
    async fn take(&self, spare: &SpareLink) -> Result<Link, Fault> {
        if let Some(link) = spare.take().await {
            return Ok(link);
        }
        let mut link = Link::open(&self.context).await?;
        link.create_fleet_tables().await?;
        Ok(link)
    }
}

macro_rules! on_link {
    ($registry:expr, $spare:ident, $limit:expr, |$link:ident, $context:ident| $work:expr) => {{
        let inner = $registry.0.clone();
        Box::pin(async move {
            let work = async {
                let mut link = inner.take(&inner.$spare).await?;
                let ($link, $context) = (&mut link, &inner.context);
                let done = $work.await?;
                inner.$spare.put(link).await;
                Ok(done)
            };
            let done = tokio::time::timeout($limit, work).await;
            let done = done.unwrap_or_else(|_| Err(Fault::timeout("the fleet's tables")));
            done.map_err(|fault: Fault| {
                inner.context.metrics.store.error(fault.slug());
                StoreError::Unavailable { why: fault.to_string() }
            })
        })
    }};
}

impl MysqlRegistry {
    /// A registry that opens its connections on demand.
    pub(super) fn new(context: Arc<Context>) -> MysqlRegistry {
        MysqlRegistry(Arc::new(Inner { context, beats: SpareLink::default(), work: SpareLink::default() }))
    }
}

impl Registry for MysqlRegistry {
    fn register(&self, me: Pulse) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, beats, BEAT_LIMIT, |link, _context| link.insert_member(&me))
    }

    fn beat(&self, me: Pulse) -> StoreFuture<Result<View, StoreError>> {
        on_link!(self, beats, BEAT_LIMIT, |link, context| link.beat(context, &me))
    }

    fn leave(&self, id: u64) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, work, BEAT_LIMIT, |link, _context| link.delete_member(id))
    }

    fn evict(&self, id: u64, beat: ServerTime) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.evict_member(id, beat))
    }

    fn activate(&self, me: Pulse) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| activate(link, &me))
    }

    fn initialize(&self, id: u64, own: Vec<(String, Component)>) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| initialize(link, id, &own))
    }

    fn record(&self, name: String, live: Component) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| async {
            link.insert_record(&name, &live).await.map(drop)
        })
    }

    fn component(
        &self,
        name: String,
        version: PolicyVersion,
    ) -> StoreFuture<Result<Option<Bytes>, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.component(&name, &version))
    }

    fn canary(
        &self,
        name: String,
        seq: u64,
        canary: Component,
        terms: String,
    ) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.write_canary(&name, seq, &canary, &terms))
    }

    fn canary_terms(&self, name: String, seq: u64, terms: String) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.write_canary_terms(&name, seq, &terms))
    }

    fn propose(
        &self,
        name: String,
        seq: u64,
        candidate: Component,
        why: Option<String>,
    ) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.propose(
            &name,
            seq,
            &candidate,
            why.as_deref()
        ))
    }

    fn settle(&self, name: String, seq: u64, me: Pulse) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| settle(link, &name, seq, &me))
    }

    fn call_off(&self, name: String, seq: u64, why: String) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.call_off(&name, seq, &why))
    }

    fn agree_on(&self, secret: PeerSecret) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.insert_secret(&secret))
    }

    fn record_rules(
        &self,
        before: Option<RulesVersion>,
        now: RulesVersion,
    ) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.write_rules(before.as_ref(), &now))
    }

    fn record_named_by(&self, names: String) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _context| link.write_named_by(&names))
    }

    fn allow(&self, until: Option<(ServerTime, Instant)>) {
        self.0.context.membership.allow(until);
    }
}

/// Makes the proxy a member that may grant, if it has acknowledged every record.
async fn activate(link: &mut Link, me: &Pulse) -> Result<bool, Fault> {
    let records = link.lock_records().await?;
    let acked = |name| me.acks.as_ref()?.get(name).copied();
    if records.iter().any(|(name, seq)| acked(name) != Some(*seq)) {
        link.rollback().await?;
        return Ok(false);
    }
    let joined = link.acknowledge(me).await?;
    match joined {
        true => link.commit_records(false).await?,
        false => link.rollback().await?,
    }
    Ok(joined)
}

/// Records the proxy's own policies, if no other member may grant.
async fn initialize(link: &mut Link, id: u64, own: &[(String, Component)]) -> Result<bool, Fault> {
    let is_first = link.lock_records().await?.is_empty();
    // Every transaction that locks both kinds locks records before members, and records in the order of their
    // names. Otherwise two transactions could deadlock. If there is no record yet, the others wait for the
    // first insert.
    let mut own: Vec<_> = own.iter().collect();
    own.sort_by_key(|(name, _)| name);
    let mut differs = false;
    for (name, component) in &own {
        // The locks of a policy that had no record may have had other keys before.
        differs |= link.insert_record(name, component).await? && !is_first;
    }
    // All rows are locked, so if two proxies initialize at the same time, the second sees the first.
    if !link.lock_as_only_member(id).await? {
        link.rollback().await?;
        return Ok(false);
    }
    for (name, component) in own {
        differs |= link.replace_record(name, component).await?;
    }
    link.commit_records(differs).await?;
    Ok(true)
}

/// Makes the candidate the live version, if every member that may grant has acknowledged the change.
async fn settle(link: &mut Link, name: &str, seq: u64, me: &Pulse) -> Result<bool, Fault> {
    let is_pending = link.lock_change(name, seq).await?;
    // A member that is not among them joins later, and reads the record after that.
    let members = link.lock_members(me).await?;
    if !is_pending || !members.iter().all(|member| member.has_acknowledged(name, seq)) {
        link.rollback().await?;
        return Ok(false);
    }
    link.commit_change(name, seq).await?;
    Ok(true)
}
