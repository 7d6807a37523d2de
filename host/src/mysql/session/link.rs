//! A connection that was checked and may be used, and one exchange over it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mysql_async::Row;
use mysql_async::prelude::AsQuery;

use super::fault::{self, Fault, exchange, variables};
use super::preflight::{self, Server};
use super::schema;
use super::wire::Wire;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::BatchId;
use crate::lock::{Instant, Key, ServerTime, Token};
use crate::mysql::clock_record;
use crate::mysql::clock_steps::{ClockStep, DRIFT_PER_MILLION, SetBack};
use crate::mysql::context::Context;
use crate::mysql::failover::prober;
use crate::mysql::failover::servers::{Endpoint, ServerInUse};
use crate::mysql::failover::takeover::take_over;
use crate::mysql::membership::Membership;
use crate::mysql::pipeline::backoff::OptimisticThrottle;
use crate::mysql::pipeline::cache::CacheScope;
use crate::mysql::sql::{self, LOCK_WAIT_S, META, PREPARED_ROWS, RowWrite, SESSION_TIMEOUT_S};
use crate::random;
use crate::store::registry::NO_MEMBER;

/// The longest time that a transaction may take. After that, its connection is given up.
pub const EXCHANGE_LIMIT: Duration = Duration::from_secs(3);
/// An idle lane sends a statement this often, in seconds, so that its session does not end.
pub const IDLE_S: u64 = 1;
/// Makes a Galera node apply all writes that the other nodes have committed before it answers a read, because
/// this node may be about to be used.
const READ_ALL: &str = "SET SESSION wsrep_sync_wait=1;";
/// Later reads are of this proxy's own writes on this node.
const READ_OWN: &str = "SET SESSION wsrep_sync_wait=0";

/// The longest time that opening and checking a connection may take.
const OPEN_LIMIT: Duration = Duration::from_secs(3);
/// The longest time for connecting alone, if there are other servers.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// One reading of the server's clock and of the row that all proxies share.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub now: ServerTime,
    /// Our own clock before the query.
    pub before: Instant,
    /// Our own clock after the answer.
    pub after: Instant,
    pub epoch: u64,
    pub floor: u64,
    /// The floor after keys were last renamed.
    pub renamed: u64,
    /// No token above this was given out for keys without a row.
    pub counter: u64,
    pub grants_from: ServerTime,
}

impl Sample {
    /// The earliest time that the server's clock can show at `own`, unless it is set.
    pub fn earliest(&self, own: Instant) -> ServerTime {
        let since = own.us_since(self.after);
        self.now.plus_us(since - since * DRIFT_PER_MILLION / 1_000_000)
    }
}

/// A connection that was checked and may be used.
pub struct Link {
    wire: Wire,
    server_in_use: ServerInUse,
    pub server: Server,
    pub sample: Sample,
    pub throttle: OptimisticThrottle,
    /// Whether [`sql::write_if_same`] may be used.
    pub sysdate_moves: bool,
    membership: Arc<Membership>,
    /// The id of the last batch.
    batch_id: BatchId,
}

impl Link {
    /// Opens a connection to the server in use, or looks for a server first. Takes a few seconds at most.
    pub async fn open(context: &Context) -> Result<Link, Fault> {
        let server_in_use = prober::server_in_use(context).await?;
        let opened = tokio::time::timeout(OPEN_LIMIT, Link::open_at(context, server_in_use.clone())).await;
        let opened = opened.unwrap_or_else(|_| Err(Fault::timeout("opening a connection")));
        if opened.is_err() {
            server_in_use.leave();
        }
        opened
    }

    /// Checks the server, creates missing tables, and detects a change of the server.
    async fn open_at(context: &Context, server_in_use: ServerInUse) -> Result<Link, Fault> {
        let limit = if context.servers.is_single() { OPEN_LIMIT } else { CONNECT_LIMIT };
        let connected = tokio::time::timeout(limit, connect(server_in_use.endpoint())).await;
        let mut wire = connected.unwrap_or_else(|_| Err(Fault::timeout("connecting")))?;
        let variables = variables(&mut wire).await?;
        let mut server = preflight::check(&variables, context.config.require_durable)
            .map_err(|why| Fault::Broken { why, slug: "preflight" })?;
        let read_all = if server.galera { READ_ALL } else { "" };
        let setup = format!(
            "{read_all}SET SESSION sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',time_zone='+00:00',\
             innodb_lock_wait_timeout={LOCK_WAIT_S},wait_timeout={SESSION_TIMEOUT_S},autocommit=1;\
             SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;{}",
            sql::SYSDATE_MOVES
        );
        let moves =
            exchange(&mut wire, setup).await?.pop().and_then(|mut rows| rows.pop()?.take::<bool, _>(1));
        let sysdate_moves = moves.unwrap_or_default();
        if !sysdate_moves {
            server.warnings.push(
                "the server runs with --sysdate-is-now, so every batch of locks takes two round trips instead \
                 of one; start it without this option"
                    .to_owned(),
            );
        }
        let recorded = schema::prepare(&mut wire, &server, context, server_in_use.generation).await?;
        let identity = take_over(&mut wire, &server, context, &server_in_use, recorded).await?;
        if server.galera {
            exchange(&mut wire, READ_OWN).await?;
        }
        server_in_use.check()?;
        context.meet(&identity);
        if !context.servers.is_single() {
            server.name = format!("{} at {}", server.name, server_in_use.endpoint().address);
        }
        context.galera.store(server.galera, Ordering::Relaxed);
        let before = clock::now();
        let mut sets = exchange(&mut wire, sql::sample()).await?;
        let sample = read_sample(sets.pop(), &server, before, clock::now())?;
        note_clock(context, &sample);
        if !context.clock_steps().is_watched() {
            clock_record::begin(&mut wire, context).await?;
        }
        let membership = context.membership.clone();
        let batch_id = BatchId { writer: random::number(), at: sample.now };
        Ok(Link {
            wire,
            server_in_use,
            server,
            sample,
            throttle: OptimisticThrottle::default(),
            sysdate_moves,
            membership,
            batch_id,
        })
    }

    /// A new id for the next batch.
    pub fn next_batch_id(&mut self) -> BatchId {
        let now = self.sample.earliest(clock::now());
        self.batch_id.at = now.max(self.batch_id.at.plus_us(1));
        self.batch_id
    }

    /// The database that the tables are in.
    pub fn database(&self) -> &str {
        &self.server_in_use.endpoint().database
    }

    /// The cache scope of rows, as of the last sample.
    pub fn cache_scope(&self) -> CacheScope {
        CacheScope {
            generation: self.server_in_use.generation,
            epoch: self.sample.epoch,
            floor: self.sample.floor,
        }
    }

    /// Sends statements in one packet and waits for all answers. Returns one set of rows for each statement
    /// that returns rows.
    pub async fn exchange(&mut self, sql: impl AsQuery + 'static) -> Result<Vec<Vec<Row>>, Fault> {
        self.server_in_use.check()?;
        exchange(&mut self.wire, sql).await
    }

    /// Sends the last packet of a transaction, which ends with COMMIT, and returns the rows as
    /// [`Link::exchange`] does.
    ///
    /// A Galera node rolls back a transaction that conflicts with a write of another node. If this happens
    /// while the node runs the last packet, the COMMIT succeeds all the same. A proxy that uses another node
    /// first raises the epoch there, so the epoch tells whether this may have happened.
    ///
    /// # Errors
    /// As [`Link::exchange`]; and [`Fault::Broken`] if the transaction may have been rolled back.
    pub async fn commit(&mut self, packet: impl AsQuery + 'static) -> Result<Vec<Vec<Row>>, Fault> {
        let sets = self.exchange(packet).await?;
        if self.server.galera {
            // The transaction is over: an error of this statement does not mean that nothing was applied.
            let read = self.exchange(sql::epoch()).await.ok();
            let epoch: Option<u64> = read.and_then(|mut sets| sets.pop()?.pop()?.take(0));
            if epoch != Some(self.sample.epoch) {
                let why = "another node of the cluster may have rolled back a transaction".to_owned();
                return Err(Fault::Broken { why, slug: "undone" });
            }
        }
        Ok(sets)
    }

    /// Locks the rows of these keys in a transaction, and reads them; then takes a sample.
    pub async fn lock_rows<'a>(
        &mut self,
        context: &Context,
        keys: impl Iterator<Item = &'a Key>,
    ) -> Result<Vec<Row>, Fault> {
        let before = clock::now();
        let mut sets = self.exchange(sql::lock_rows(keys)).await?;
        self.learn(context, sets.pop(), before)?;
        Ok(sets.pop().unwrap_or_default())
    }

    /// Writes these rows, all or none, if they are as remembered since the last sample and the server's clock is
    /// within the bounds; see [`sql::write_if_same`]. The connection prepares a short statement on first use.
    pub async fn write_if_same(
        &mut self,
        rows: Vec<RowWrite>,
        bounds: (ServerTime, ServerTime),
    ) -> Result<(), Fault> {
        let (count, sql) = (rows.len(), sql::write_if_same(rows.len()));
        let params = sql::write_if_same_params(rows, self.sample.floor, bounds);
        if count > PREPARED_ROWS {
            return self.exchange(sql::fill_in(&sql, &params)).await.map(drop);
        }
        let statement = self.wire.prepare(sql).await?;
        self.server_in_use.check()?;
        Ok(self.wire.execute(statement, params).await?)
    }

    /// Raises the token floor at least to `least`. Without it, raises the floor above every token that was given
    /// out. Returns the floor.
    pub async fn raise_tokens(&mut self, least: Option<Token>) -> Result<Token, Fault> {
        let raise = least.map_or_else(sql::raise_above_all, |least| sql::raise_floor(least.0));
        let raise = format!("BEGIN;{raise};SELECT floor FROM {META} WHERE id=1;COMMIT");
        let floor = self.commit(raise).await?.pop().and_then(|mut rows| rows.pop()?.take(0));
        floor.map(Token).ok_or_else(|| Fault::Broken { why: format!("{META} is empty"), slug: "schema" })
    }

    /// Makes the server keep the session for this long while it is idle, in seconds.
    pub async fn keep_idle(&mut self, session_s: u32) -> Result<(), Fault> {
        self.exchange(format!("SET SESSION wait_timeout={session_s}")).await.map(drop)
    }

    /// Records that this proxy has watched the server's clock up to the last sample; see [`clock_record::watched`].
    pub async fn record_clock(
        &mut self,
        by_us: u64,
        set_back: SetBack,
        longest_us: u64,
    ) -> Result<(), Fault> {
        self.exchange(clock_record::watched(self.sample.now, by_us, set_back, longest_us)).await.map(drop)
    }

    /// Makes the tables refuse proxies of earlier versions; see [`schema::claim_version`].
    pub async fn claim_version(&mut self) -> Result<(), Fault> {
        self.exchange(schema::claim_version()).await.map(drop)
    }

    /// The latest time at which a decision of now may be written: the caller waits until `deadline`, and this
    /// proxy is a member of its fleet until then.
    pub fn latest(&self, deadline: Instant) -> ServerTime {
        self.sample.earliest(deadline).min(self.membership.until())
    }

    /// Runs [`check_member`] at the time of the last sample.
    pub fn check_member(&self) -> Result<(), Fault> {
        check_member(self.sample.now, self.membership.until())
    }

    /// Rolls back the transaction after a fault that left the connection usable.
    pub async fn rollback(&mut self) -> Result<(), Fault> {
        self.exchange("ROLLBACK").await.map(drop)
    }

    /// Runs [`check_use`]. The last of the sets is the answer to [`sql::used_on`].
    pub fn check_used(&self, sets: &mut Vec<Vec<Row>>) -> Result<(), Fault> {
        let used_on: Option<Vec<u8>> = sets.pop().and_then(|mut rows| rows.pop()?.take(0));
        check_use(&self.server, &used_on.unwrap_or_default())
    }

    /// Takes the sample that ends an exchange.
    pub fn learn(&mut self, context: &Context, set: Option<Vec<Row>>, before: Instant) -> Result<(), Fault> {
        self.sample = read_sample(set, &self.server, before, clock::now())?;
        // The clock of another server says nothing about this server's clock.
        self.server_in_use.check()?;
        note_clock(context, &self.sample);
        Ok(())
    }

    /// Keeps the session alive, and reads the clock.
    pub async fn refresh(&mut self, context: &Context) -> Result<(), Fault> {
        let before = clock::now();
        let mut sets = self.exchange(sql::sample()).await?;
        self.learn(context, sets.pop(), before)
    }

    /// Takes over what other proxies have recorded about the clock.
    pub async fn begin(&mut self, context: &Context) -> Result<(), Fault> {
        clock_record::begin(&mut self.wire, context).await
    }

    /// Disconnects, within a second.
    pub async fn close(self) {
        let goodbye = self.wire.disconnect();
        let _ = tokio::time::timeout(Duration::from_secs(1), goodbye).await;
    }
}

fn note_clock(context: &Context, sample: &Sample) {
    let mut steps = context.clock_steps();
    steps.note_wait(sample.grants_from, sample.now, sample.before);
    let step = steps.observe(sample.now, sample.before, sample.after);
    drop(steps);
    match step {
        ClockStep::None => {}
        ClockStep::Forward { at_least_us, .. } => {
            reached(Branch::ClockForward);
            context.metrics.store.error("clock_forward");
            tracing::warn!(
                by_ms = at_least_us / 1_000,
                "the MySQL server's clock was set forward; expired leases are not taken over for a while"
            );
        }
        ClockStep::Back(by) => {
            reached(Branch::ClockBack);
            context.metrics.store.error("clock_back");
            tracing::warn!(
                by_ms = by / 1_000,
                "the MySQL server's clock was set back; leases last that much longer"
            );
        }
    }
}

/// Opens the connection. Creates the database if it is missing and the account has the privilege.
async fn connect(endpoint: &Endpoint) -> Result<Wire, Fault> {
    match Wire::connect(&endpoint.target).await {
        Err(error) if fault::is_missing_database(&error) => {
            let mut plain = Wire::connect_plain(&endpoint.target).await?;
            let name = endpoint.database.replace('`', "``");
            exchange(&mut plain, format!("CREATE DATABASE IF NOT EXISTS `{name}`")).await?;
            plain.disconnect().await?;
            Ok(Wire::connect(&endpoint.target).await?)
        }
        wire => Ok(wire?),
    }
}

fn read_sample(
    set: Option<Vec<Row>>,
    server: &Server,
    before: Instant,
    after: Instant,
) -> Result<Sample, Fault> {
    type Columns = (u64, u64, u64, u64, u64, u64, String, Vec<u8>);
    let row = set.and_then(|mut rows| rows.pop());
    let read = row.and_then(|row| mysql_async::from_row_opt::<Columns>(row).ok());
    let Some((now, epoch, floor, renamed, counter, grants_from, read_only, used_on)) = read else {
        let why = format!("the row in {META} is missing: were its tables dropped?");
        return Err(Fault::Broken { why, slug: "schema" });
    };
    if preflight::is_read_only(&read_only) {
        return Err(Fault::Broken { why: preflight::READ_ONLY.to_owned(), slug: "read_only" });
    }
    check_use(server, &used_on)?;
    let grants_from = ServerTime(grants_from);
    Ok(Sample { now: ServerTime(now), before, after, epoch, floor, renamed, counter, grants_from })
}

/// Fails if the membership of this proxy, which ends at `until`, is over at `now`. Other proxies may then use
/// other keys, so nothing may be decided or answered: the version of an old key would look like one of a new
/// key.
pub fn check_member(now: ServerTime, until: ServerTime) -> Result<(), Fault> {
    if now > until {
        return Err(Fault::Conflict { why: NO_MEMBER.to_owned() });
    }
    Ok(())
}

/// Fails if the record names another server than this one. That happens if another proxy has taken another
/// node of a Galera cluster into use.
pub fn check_use(server: &Server, used_on: &[u8]) -> Result<(), Fault> {
    if used_on == server.identity.as_bytes() {
        return Ok(());
    }
    let why = format!(
        "the tables are in use on another server, {}: give all proxies the same store.url, and do not let a load balancer \
         spread their connections",
        String::from_utf8_lossy(used_on)
    );
    Err(Fault::Broken { why, slug: "moved" })
}
