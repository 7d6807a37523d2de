//! Probes all servers of `store.url` at the same time, on connections of its own. A new connection gets its server
//! here: the server in use, or else the server that is chosen after a round of probes.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::election::{Probe, ServerStatus};
use super::identity::{self, FRESH, InUseHeartbeat};
use super::servers::{ROUND, ServerInUse};
use crate::clock;
use crate::lock::Instant;
use crate::mysql::context::Context;
use crate::mysql::session::fault::{self, Fault};
use crate::mysql::session::preflight;
use crate::mysql::session::wire::{Target, Wire};
use crate::mysql::sql::{LOCK_WAIT_S, SESSION_TIMEOUT_S};
use crate::vital;

/// The longest time to wait for one server.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// The server to connect to. Looks for one if none is known.
pub async fn server_in_use(context: &Context) -> Result<ServerInUse, Fault> {
    let servers = &context.servers;
    if let Some(server_in_use) = servers.current() {
        return Ok(server_in_use);
    }
    probe(context, clock::now()).await;
    servers.elect(context.identity().as_ref())?;
    servers.current().ok_or_else(|| Fault::timeout("looking for the primary"))
}

/// Probes every server, unless a round began after `after`. Takes [`LOOK_LIMIT`] at most.
pub async fn probe(context: &Context, after: Instant) {
    let mut round = context.servers.round.lock().await;
    if round.began > after {
        return;
    }
    let began = clock::now();
    let in_use = context.servers.in_use();
    let mut probes = JoinSet::new();
    for (index, wire) in round.wires.iter_mut().enumerate() {
        let target = context.servers.endpoints()[index].target.clone();
        let is_in_use = in_use.is_some_and(|(used, _)| used == index);
        let probe = look_at(target, wire.take(), context.config.require_durable, is_in_use);
        probes.spawn(vital::watched("a probe of a server", async move {
            let probed = tokio::time::timeout(LOOK_LIMIT, probe).await;
            (index, probed.unwrap_or_else(|_| Err(Fault::timeout("looking for the primary"))))
        }));
    }
    let mut found: Vec<Probe> = round.wires.iter().map(|_| Err("the probe failed".to_owned())).collect();
    while let Some(probed) = probes.join_next().await {
        let Ok((index, probed)) = probed else { continue };
        found[index] = probed.map_err(|fault| fault.to_string()).map(|(wire, status, heartbeat_left)| {
            round.wires[index] = wire;
            if let (Some(left), Some((_, generation))) = (heartbeat_left, in_use) {
                context.servers.extend(generation, began.plus_us(left.as_micros() as u64));
            }
            status
        });
    }
    context.servers.note(found);
    round.began = began;
}

/// Closes the connections.
async fn close(context: &Context) {
    for wire in context.servers.round.lock().await.wires.iter_mut().filter_map(Option::take) {
        let _ = tokio::time::timeout(LOOK_LIMIT, wire.disconnect()).await;
    }
}

/// Probes the servers again and again until the store is closed.
pub async fn run(context: Arc<Context>) {
    loop {
        tokio::select! {
            biased;
            () = context.stop.cancelled() => break,
            () = tokio::time::sleep(ROUND) => {}
        }
        probe(&context, clock::now()).await;
        context.servers.reconsider();
    }
    close(&context).await;
}

/// Probes one server. If it is in use and its heartbeat is fresh, also tells for how long the heartbeat stays
/// fresh.
async fn look_at(
    target: Target,
    wire: Option<Wire>,
    require_durable: bool,
    is_in_use: bool,
) -> Result<(Option<Wire>, ServerStatus, Option<Duration>), Fault> {
    let (mut wire, has_database) = match wire {
        Some(wire) => (wire, true),
        None => connect(&target).await?,
    };
    let variables = fault::variables(&mut wire).await?;
    let identity = preflight::check(&variables, require_durable).map(|server| server.identity);
    let record = if has_database { identity::read(&mut wire, "").await? } else { None };
    let record = record.map(|(_, identity)| identity);
    let named = matches!((&identity, &record), (Ok(identity), Some(record)) if record.server == *identity);
    let mut left = None;
    if is_in_use && named {
        left = keep_marked(&mut wire).await?;
    }
    Ok((Some(wire).filter(|_| has_database), ServerStatus { identity, record }, left))
}

/// Renews the heartbeat only if it is still fresh. Returns for how long it is fresh.
async fn keep_marked(wire: &mut Wire) -> Result<Option<Duration>, Fault> {
    let Some(heartbeat) = identity::read_heartbeat(wire).await? else { return Ok(None) };
    match heartbeat.age() {
        Some(age) if age < ROUND / 2 => Ok(Some(FRESH - age)),
        Some(age) if age < FRESH => {
            fault::exchange(wire, InUseHeartbeat::renew()).await?;
            Ok(identity::read_heartbeat(wire)
                .await?
                .and_then(|heartbeat| Some(FRESH.saturating_sub(heartbeat.age()?))))
        }
        _ => Ok(None),
    }
}

/// Also tells whether the database exists; a server that was never used has none.
async fn connect(target: &Target) -> Result<(Wire, bool), Fault> {
    let (mut wire, has_database) = match Wire::connect(target).await {
        Err(error) if fault::is_missing_database(&error) => (Wire::connect_plain(target).await?, false),
        wire => (wire?, true),
    };
    let setup = format!(
        "SET SESSION innodb_lock_wait_timeout={LOCK_WAIT_S},wait_timeout={SESSION_TIMEOUT_S},autocommit=1;\
         SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    );
    fault::exchange(&mut wire, setup).await?;
    Ok((wire, has_database))
}
