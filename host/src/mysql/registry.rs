//! [`Registry`] in tables: a row for each proxy, a row for each policy, and a row for the policy's previous
//! version.
//!
//! A transaction locks rows of policies before rows of proxies, so that transactions cannot deadlock. A
//! heartbeat locks one row, and has a connection of its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mysql_async::Row;
use tokio::sync::Mutex;

use super::context::Context;
use super::fault::Fault;
use super::link::Link;
use super::sql::{self, NOW_US, SESSION_TIMEOUT_S};
use crate::clock;
use crate::lock::{Instant, ServerTime};
use crate::store::registry::{Component, Member, PolicyRecord, PolicyVersion, Pulse, Registry, View};
use crate::store::{StoreError, StoreFuture};

const PROXIES: &str = "lockkeeper_proxy";
const POLICIES: &str = "lockkeeper_policy";
const BEFORE: &str = "lockkeeper_policy_before";
/// A connection that was idle for longer may have been closed by the server.
const FRESH_US: u64 = (SESSION_TIMEOUT_S as u64 - 1) * 1_000_000;
/// A heartbeat that takes longer is given up with its connection. Sending a component takes longer.
const BEAT_LIMIT: Duration = Duration::from_secs(3);
const WORK_LIMIT: Duration = Duration::from_secs(10);

/// The registry on a server.
#[derive(Clone)]
pub struct MysqlRegistry(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    beats: Seat,
    work: Seat,
}

/// A connection that is opened on demand. It is taken out while it is used: a call that fails half-way does
/// not put it back, and the server rolls back its transaction.
#[derive(Default)]
struct Seat(Mutex<Option<(Link, Instant)>>);

impl Seat {
    async fn take(&self, context: &Context) -> Result<Link, Fault> {
        match self.0.lock().await.take() {
            Some((link, used)) if clock::now().us_since(used) < FRESH_US => Ok(link),
            _ => {
                let mut link = Link::open(context).await?;
                prepare(&mut link).await?;
                Ok(link)
            }
        }
    }

    async fn put(&self, link: Link) {
        *self.0.lock().await = Some((link, clock::now()));
    }
}

macro_rules! on_link {
    ($registry:expr, $seat:ident, $limit:expr, |$link:ident, $context:ident| $work:expr) => {{
        let inner = $registry.0.clone();
        Box::pin(async move {
            let work = async {
                let mut link = inner.$seat.take(&inner.context).await?;
                let ($link, $context) = (&mut link, &inner.context);
                let done = $work.await?;
                inner.$seat.put(link).await;
                Ok(done)
            };
            let done = tokio::time::timeout($limit, work).await;
            let done = done.unwrap_or_else(|_| Err(Fault::timeout("the fleet's tables")));
            done.map_err(|fault: Fault| {
                inner.context.metrics.store_error(fault.slug());
                StoreError::Unavailable { why: fault.to_string() }
            })
        })
    }};
}

impl MysqlRegistry {
    /// A registry that opens its connections on demand.
    pub(super) fn new(context: Arc<Context>) -> MysqlRegistry {
        MysqlRegistry(Arc::new(Inner { context, beats: Seat::default(), work: Seat::default() }))
    }
}

impl Registry for MysqlRegistry {
    fn register(&self, me: Pulse) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, beats, BEAT_LIMIT, |link, _shared| register(link, &me))
    }

    fn beat(&self, me: Pulse) -> StoreFuture<Result<View, StoreError>> {
        on_link!(self, beats, BEAT_LIMIT, |link, context| beat(link, context, &me))
    }

    fn leave(&self, id: u64) -> StoreFuture<Result<(), StoreError>> {
        let sql = format!("DELETE FROM {PROXIES} WHERE id={id}");
        on_link!(self, work, BEAT_LIMIT, |link, _shared| async { link.exchange(sql).await.map(drop) })
    }

    fn evict(&self, id: u64, beat: ServerTime) -> StoreFuture<Result<bool, StoreError>> {
        let delete = format!("DELETE FROM {PROXIES} WHERE id={id} AND beat_us={}", beat.0);
        on_link!(self, work, WORK_LIMIT, |link, _shared| changes_a_row(link, delete))
    }

    fn activate(&self, id: u64, acks: BTreeMap<String, u64>) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _shared| activate(link, id, &acks))
    }

    fn initialize(&self, id: u64, own: Vec<(String, Component)>) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _shared| initialize(link, id, &own))
    }

    fn record(&self, name: String, live: Component) -> StoreFuture<Result<(), StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _shared| async {
            link.exchange(insert_record(&name, &live)).await.map(drop)
        })
    }

    fn component(
        &self,
        name: String,
        version: PolicyVersion,
    ) -> StoreFuture<Result<Option<Bytes>, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _shared| component(link, &name, &version))
    }

    fn propose(&self, name: String, seq: u64, candidate: Component) -> StoreFuture<Result<bool, StoreError>> {
        let mut sql = format!("UPDATE {POLICIES} SET seq=seq+1,phase='both',since_us={NOW_US},note=NULL,");
        sql.push_str(&format!("candidate_digest={},", hexed(&candidate.version.digest)));
        sql.push_str(&format!("candidate_settings={},candidate=", hexed(&candidate.version.settings)));
        let mut sql = sql.into_bytes();
        sql::quote(&mut sql, &candidate.bytes);
        let condition = format!(" WHERE name={} AND seq={seq} AND phase='settled'", hexed(&name));
        sql.extend_from_slice(condition.as_bytes());
        on_link!(self, work, WORK_LIMIT, |link, _shared| changes_a_row(link, sql))
    }

    fn settle(&self, name: String, seq: u64, me: Pulse) -> StoreFuture<Result<bool, StoreError>> {
        on_link!(self, work, WORK_LIMIT, |link, _shared| settle(link, &name, seq, &me))
    }

    fn call_off(&self, name: String, seq: u64, why: String) -> StoreFuture<Result<bool, StoreError>> {
        let sql = format!(
            "UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},note={},candidate=NULL,\
             candidate_digest=NULL,candidate_settings=NULL WHERE name={} AND seq={seq} AND phase='both'",
            hexed(&why),
            hexed(&name)
        );
        on_link!(self, work, WORK_LIMIT, |link, _shared| changes_a_row(link, sql))
    }

    fn allow(&self, until: Option<(ServerTime, Instant)>) {
        self.0.context.membership.allow(until);
    }
}

/// Creates missing tables.
async fn prepare(link: &mut Link) -> Result<(), Fault> {
    let there = format!(
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema=DATABASE() \
         AND table_name IN ('{PROXIES}','{POLICIES}','{BEFORE}')"
    );
    if count(&link.exchange(there).await?) == 3 {
        return Ok(());
    }
    let proxies = format!(
        "CREATE TABLE IF NOT EXISTS {PROXIES} (\
         id BIGINT UNSIGNED NOT NULL PRIMARY KEY COMMENT 'one life of a proxy',\
         address VARBINARY(255) NOT NULL COMMENT 'where other proxies reach it, or empty',\
         host VARBINARY(255) NOT NULL COMMENT 'machine and process',\
         routes VARBINARY(64) NOT NULL COMMENT 'digest of the routes to policies',\
         beat_us BIGINT UNSIGNED NOT NULL COMMENT 'the last sign of life: microseconds since 1970',\
         until_us BIGINT UNSIGNED NOT NULL COMMENT 'it is gone after this: microseconds since 1970',\
         acks MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'what it has acknowledged \
         of each policy, as JSON; NULL while it joins'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    let policies = format!(
        "CREATE TABLE IF NOT EXISTS {POLICIES} (\
         name VARBINARY(64) NOT NULL PRIMARY KEY,\
         seq BIGINT UNSIGNED NOT NULL COMMENT 'rises with every change of the row',\
         phase VARBINARY(16) NOT NULL COMMENT 'settled, or both while a change is under way',\
         live_digest VARBINARY(80) NOT NULL,\
         live_settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,\
         live LONGBLOB NOT NULL,\
         candidate_digest VARBINARY(80) NULL,\
         candidate_settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,\
         candidate LONGBLOB NULL,\
         since_us BIGINT UNSIGNED NOT NULL COMMENT 'when the row was changed: microseconds since 1970',\
         note TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'why the last change was called off'\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    // A table of its own, because a new column would need ALTER, a privilege that the account may lack.
    let before = format!(
        "CREATE TABLE IF NOT EXISTS {BEFORE} (\
         name VARBINARY(64) NOT NULL PRIMARY KEY,\
         successor VARBINARY(80) NOT NULL COMMENT 'the digest of what took its place: where another one is live, \
         this row says nothing',\
         digest VARBINARY(80) NOT NULL,\
         settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,\
         component LONGBLOB NOT NULL\
         ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
    );
    for table in [proxies, policies, before] {
        link.exchange(table).await?;
    }
    Ok(())
}

async fn register(link: &mut Link, me: &Pulse) -> Result<(), Fault> {
    let sql = format!(
        "SET @b={NOW_US};INSERT INTO {PROXIES} (id,address,host,routes,beat_us,until_us) \
         VALUES ({},{},{},{},@b,@b+{})",
        me.id,
        hexed(&me.address),
        hexed(&me.host),
        hexed(&me.routes),
        me.lives.as_micros()
    );
    link.exchange(sql).await.map(drop)
}

async fn beat(link: &mut Link, context: &Context, me: &Pulse) -> Result<View, Fault> {
    let acks = me.acks.as_ref().map(|acks| format!(",acks={}", hexed(&to_json(acks)))).unwrap_or_default();
    // The time is read first, so a wait for the lock of the row does not make it later.
    let sql = format!(
        "SET @b={NOW_US};UPDATE {PROXIES} SET beat_us=@b,until_us=@b+{},address={}{acks} WHERE id={};{};\
         SELECT id,address,host,routes,beat_us,until_us,acks FROM {PROXIES} ORDER BY id;\
         SELECT p.name,seq,live_digest,live_settings,candidate_digest,candidate_settings,since_us,note,\
         digest,settings FROM {POLICIES} p LEFT JOIN {BEFORE} b ON b.name=p.name AND successor=live_digest \
         ORDER BY p.name",
        me.lives.as_micros(),
        hexed(&me.address),
        me.id,
        sql::sample(),
    );
    let asked_at = clock::now();
    let mut sets = link.exchange(sql).await?.into_iter();
    // The sample also tells whether the server has become read-only.
    link.learn(context, sets.next(), asked_at)?;
    let members = sets.next().unwrap_or_default().into_iter().map(read_member);
    let members = members.collect::<Option<Vec<_>>>().ok_or_else(|| foreign(PROXIES))?;
    let records = sets.next().unwrap_or_default().into_iter().map(read_record);
    let records = records.collect::<Option<Vec<_>>>().ok_or_else(|| foreign(POLICIES))?;
    Ok(View { now: link.sample.now, asked_at, members, records })
}

async fn activate(link: &mut Link, id: u64, acks: &BTreeMap<String, u64>) -> Result<bool, Fault> {
    let records =
        format!("BEGIN;SELECT name,seq FROM {POLICIES} FORCE INDEX (PRIMARY) ORDER BY name FOR UPDATE");
    let records = rows(link.exchange(records).await?.pop(), POLICIES)?;
    let mut records: Vec<(Vec<u8>, u64)> = records;
    records.retain(|(name, seq)| acks.get(&*String::from_utf8_lossy(name)) != Some(seq));
    if !records.is_empty() {
        link.rollback().await?;
        return Ok(false);
    }
    let joined = join_sql(link, id, acks).await?;
    end(link, joined).await?;
    Ok(joined)
}

/// Runs within a transaction. Tells whether the member still has its row.
async fn join_sql(link: &mut Link, id: u64, acks: &BTreeMap<String, u64>) -> Result<bool, Fault> {
    let update = format!("UPDATE {PROXIES} SET acks={} WHERE id={id}", hexed(&to_json(acks)));
    link.exchange(update).await?;
    let there = format!("SELECT COUNT(*) FROM {PROXIES} WHERE id={id}");
    Ok(count(&link.exchange(there).await?) == 1)
}

async fn initialize(link: &mut Link, id: u64, own: &[(String, Component)]) -> Result<bool, Fault> {
    let records =
        format!("BEGIN;SELECT name,seq FROM {POLICIES} FORCE INDEX (PRIMARY) ORDER BY name FOR UPDATE");
    let is_first = link.exchange(records).await?.pop().is_none_or(|records| records.is_empty());
    // Every transaction that locks both kinds locks records before members, and records in the order of their
    // names. Otherwise two transactions could deadlock. If there is no record yet, the others wait for the
    // first insert.
    let mut own: Vec<_> = own.iter().collect();
    own.sort_by_key(|(name, _)| name);
    let mut differs = false;
    for (name, component) in &own {
        // The locks of a policy that had no record may have had other keys before.
        differs |= changes_a_row(link, insert_record(name, component)).await? && !is_first;
    }
    // All rows are locked, so if two proxies initialize at the same time, the second sees the first.
    let all = format!(
        "SELECT id FROM {PROXIES} FORCE INDEX (PRIMARY) ORDER BY id FOR UPDATE;\
         SELECT CONCAT(COALESCE(SUM(id={id}),0),COALESCE(SUM(id<>{id} AND acks IS NOT NULL),0)) FROM {PROXIES}"
    );
    // 10: this proxy has its row, and no other member may grant.
    if count(&link.exchange(all).await?) != 10 {
        link.rollback().await?;
        return Ok(false);
    }
    for (name, component) in own {
        link.exchange(keep_replaced(name, component)).await?;
        differs |= changes_a_row(link, replace_record(name, component)).await?;
    }
    let raise = if differs { sql::raise_above_all() + ";" } else { String::new() };
    link.commit(raise + "COMMIT").await?;
    Ok(true)
}

async fn end(link: &mut Link, keep: bool) -> Result<(), Fault> {
    match keep {
        true => link.commit("COMMIT").await.map(drop),
        false => link.rollback().await,
    }
}

/// Leaves an existing record unchanged, and locks it exclusively. `INSERT IGNORE` would take a shared lock,
/// and of two transactions with shared locks neither could change the record.
fn insert_record(name: &str, live: &Component) -> Vec<u8> {
    let head = format!(
        "INSERT INTO {POLICIES} (name,seq,phase,live_digest,live_settings,since_us,live) \
         VALUES ({},1,'settled',{},{},{NOW_US},",
        hexed(name),
        hexed(&live.version.digest),
        hexed(&live.version.settings)
    );
    let mut sql = head.into_bytes();
    sql::quote(&mut sql, &live.bytes);
    sql.extend_from_slice(b") ON DUPLICATE KEY UPDATE seq=seq");
    sql
}

/// Keeps the version that [`replace_record`] replaces as the previous version, if it differs.
fn keep_replaced(name: &str, live: &Component) -> String {
    let (digest, settings) = (hexed(&live.version.digest), hexed(&live.version.settings));
    let condition =
        format!("name={} AND (live_digest<>{digest} OR BINARY live_settings<>{settings})", hexed(name));
    keep_live(&digest, &condition)
}

/// Keeps the live version of a record as the version before `successor`.
fn keep_live(successor: &str, condition: &str) -> String {
    format!(
        "REPLACE INTO {BEFORE} (name,successor,digest,settings,component) \
         SELECT name,{successor},live_digest,live_settings,live FROM {POLICIES} WHERE {condition}"
    )
}

/// Leaves a record with the same content unchanged.
fn replace_record(name: &str, live: &Component) -> Vec<u8> {
    let (digest, settings) = (hexed(&live.version.digest), hexed(&live.version.settings));
    let mut sql = format!(
        "UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},note=NULL,candidate=NULL,\
         candidate_digest=NULL,candidate_settings=NULL,live_digest={digest},live_settings={settings},live="
    )
    .into_bytes();
    sql::quote(&mut sql, &live.bytes);
    let condition = format!(
        " WHERE name={} AND (phase<>'settled' OR live_digest<>{digest} OR \
         BINARY live_settings<>{settings})",
        hexed(name)
    );
    sql.extend_from_slice(condition.as_bytes());
    sql
}

async fn component(link: &mut Link, name: &str, version: &PolicyVersion) -> Result<Option<Bytes>, Fault> {
    // Settings are not compared: the component does not depend on them.
    let (name, digest) = (hexed(name), hexed(&version.digest));
    let sql = format!(
        "SELECT IF(live_digest={digest},live,candidate) FROM {POLICIES} \
         WHERE name={name} AND (live_digest={digest} OR candidate_digest={digest}) \
         UNION ALL SELECT component FROM {BEFORE} WHERE name={name} AND digest={digest}"
    );
    let found: Vec<(Vec<u8>,)> = rows(link.exchange(sql).await?.pop(), POLICIES)?;
    Ok(found.into_iter().next().map(|(bytes,)| bytes.into()))
}

async fn settle(link: &mut Link, name: &str, seq: u64, me: &Pulse) -> Result<bool, Fault> {
    let condition = format!("name={} AND seq={seq} AND phase='both'", hexed(name));
    let record = format!("BEGIN;SELECT seq FROM {POLICIES} WHERE {condition} FOR UPDATE");
    let known = link.exchange(record).await?.pop().is_some_and(|rows| !rows.is_empty());
    let acks = to_json(me.acks.as_ref().unwrap_or(&BTreeMap::new()));
    let acknowledge =
        format!("UPDATE {PROXIES} SET acks={} WHERE id={} AND acks IS NOT NULL", hexed(&acks), me.id);
    // The rows are locked, so that they do not change before this commits. A member that is not among them
    // joins later, and reads the record after that.
    let members = format!(
        "SELECT id,address,host,routes,beat_us,until_us,acks FROM {PROXIES} FORCE INDEX (PRIMARY) \
         ORDER BY id FOR UPDATE;{acknowledge};SELECT id,address,host,routes,beat_us,until_us,acks FROM {PROXIES}"
    );
    let members = link.exchange(members).await?.pop().unwrap_or_default().into_iter().map(read_member);
    let members = members.collect::<Option<Vec<_>>>().ok_or_else(|| foreign(PROXIES))?;
    if !known || !members.iter().all(|member| member.has_acknowledged(name, seq)) {
        link.rollback().await?;
        return Ok(false);
    }
    // The floor is raised last, because the writes of all proxies read it.
    let sql = format!(
        "{};UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},note=NULL,live=candidate,\
         live_digest=candidate_digest,live_settings=candidate_settings,candidate=NULL,\
         candidate_digest=NULL,candidate_settings=NULL WHERE {condition};{};COMMIT",
        keep_live("candidate_digest", &condition),
        sql::raise_above_all(),
    );
    link.commit(sql).await?;
    Ok(true)
}

/// Runs one statement. Tells whether it changed a row.
async fn changes_a_row(link: &mut Link, statement: impl Into<Vec<u8>>) -> Result<bool, Fault> {
    let mut sql: Vec<u8> = statement.into();
    sql.extend_from_slice(b";SELECT ROW_COUNT()");
    let counts: Vec<(i64,)> = rows(link.exchange(sql).await?.pop(), POLICIES)?;
    Ok(counts.first().is_some_and(|(count,)| *count > 0))
}

fn read_member(row: Row) -> Option<Member> {
    type Columns = (u64, Vec<u8>, Vec<u8>, Vec<u8>, u64, u64, Option<Vec<u8>>);
    let (id, address, host, routes, beat, until, acks) = mysql_async::from_row_opt::<Columns>(row).ok()?;
    let acks = match acks {
        Some(acks) => Some(serde_json::from_slice(&acks).ok()?),
        None => None,
    };
    Some(Member {
        id,
        address: text(&address),
        host: text(&host),
        routes: text(&routes),
        beat: ServerTime(beat),
        until: ServerTime(until),
        acks,
    })
}

fn read_record(row: Row) -> Option<PolicyRecord> {
    type Bytes = Vec<u8>;
    type Other = Option<Bytes>;
    type Columns = (Bytes, u64, Bytes, Bytes, Other, Other, u64, Other, Other, Other);
    let (name, seq, digest, settings, next_digest, next_settings, since, note, last_digest, last_settings) =
        mysql_async::from_row_opt::<Columns>(row).ok()?;
    let version =
        |digest: &[u8], settings: &[u8]| PolicyVersion { digest: text(digest), settings: text(settings) };
    let other = |digest: Other, settings: Other| Some(version(&digest?, &settings?));
    Some(PolicyRecord {
        name: text(&name),
        seq,
        live: version(&digest, &settings),
        candidate: other(next_digest, next_settings),
        previous: other(last_digest, last_settings),
        since: ServerTime(since),
        note: note.as_deref().map(text),
    })
}

fn rows<T: mysql_async::prelude::FromRow>(set: Option<Vec<Row>>, table: &str) -> Result<Vec<T>, Fault> {
    let rows = set.unwrap_or_default().into_iter().map(|row| mysql_async::from_row_opt(row).ok());
    rows.collect::<Option<Vec<T>>>().ok_or_else(|| foreign(table))
}

fn count(sets: &[Vec<Row>]) -> u64 {
    sets.last().and_then(|rows| rows.first()).and_then(|row| row.get(0)).unwrap_or(0)
}

fn foreign(table: &str) -> Fault {
    Fault::Rejected { why: format!("a row of {table} has unknown content: was it changed by hand?") }
}

fn to_json(acks: &BTreeMap<String, u64>) -> String {
    serde_json::to_string(acks).unwrap_or_default()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn hexed(text: &str) -> String {
    let mut sql = String::new();
    sql::hex(&mut sql, text.as_bytes());
    sql
}
