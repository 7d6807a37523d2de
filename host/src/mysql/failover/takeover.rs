//! What a new connection must do before its server may grant leases: asks the tables and the other servers, and
//! writes the record as [`election`](super::election) decides.

use std::time::Duration;

use super::election::{Arrival, Gap, NextRecord};
use super::identity::{self, FRESH, Identity, InUseHeartbeat, create_heartbeat, read_heartbeat};
use super::prober;
use super::servers::ServerInUse;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::mysql::context::Context;
use crate::mysql::session::fault::{self, Fault};
use crate::mysql::session::preflight::Server;
use crate::mysql::session::wire::Wire;
use crate::mysql::sql::{self, META, NOW_US};

/// Raises the epoch or the token floor if another server may have been in use since the tables were last used
/// on this one. `recorded` is the record of the tables. Several proxies may run this at the same time. Returns
/// the record that is valid now.
pub async fn take_over(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    server_in_use: &ServerInUse,
    recorded: Identity,
) -> Result<Identity, Fault> {
    let mut heartbeat = None;
    if !context.servers.is_single() {
        heartbeat = Some(match read_heartbeat(wire).await? {
            Some(heartbeat) => heartbeat,
            None => create_heartbeat(wire).await?,
        });
    }
    let known = context.identity();
    let gap = arrival(context, server, &recorded, known.as_ref(), heartbeat.as_ref()).gap();
    let identity = match gap {
        None => recorded,
        Some(_) => settle(wire, server, context, server_in_use).await?,
    };
    if heartbeat.is_some() {
        let asked_at = clock::now();
        let age = read_heartbeat(wire).await?.and_then(|heartbeat| heartbeat.age());
        let left = age.map_or(Duration::ZERO, |age| FRESH.saturating_sub(age));
        context.servers.extend(server_in_use.generation, asked_at.plus_us(left.as_micros() as u64));
    }
    Ok(identity)
}

/// Probes the other servers, and decides again while the record is locked.
async fn settle(
    wire: &mut Wire,
    server: &Server,
    context: &Context,
    server_in_use: &ServerInUse,
) -> Result<Identity, Fault> {
    if !context.servers.is_single() {
        prober::probe(context, clock::now()).await;
    }
    wire.exchange("BEGIN").await?;
    let empty = || Fault::Broken { why: format!("{META} is empty"), slug: "schema" };
    let (_, recorded) = identity::read(wire, "FOR UPDATE").await?.ok_or_else(empty)?;
    let heartbeat = if context.servers.is_single() { None } else { read_heartbeat(wire).await? };
    let known = context.identity();
    let arrival = arrival(context, server, &recorded, known.as_ref(), heartbeat.as_ref());
    let maybe_ahead = context.servers.maybe_ahead(server_in_use.index, &recorded);
    let Some((gap, why)) = arrival.settle(&maybe_ahead) else {
        if heartbeat.is_some() {
            wire.exchange(InUseHeartbeat::set()).await?;
        }
        wire.exchange("COMMIT").await?;
        return Ok(recorded);
    };
    let highest = context.servers.highest();
    let now_us: Option<u64> = wire.first(format!("SELECT {NOW_US}")).await?;
    let next = arrival.next_record(gap, highest, now_us.unwrap_or_default());
    let next = next.map_err(|why| Fault::Broken { why, slug: "schema" })?;
    write(wire, server, context, next).await?;
    tell(server, context, &recorded, (gap, &why), next);
    Ok(Identity { server: server.identity.clone(), epoch: next.epoch, floor: next.floor })
}

fn arrival<'a>(
    context: &Context,
    server: &'a Server,
    recorded: &'a Identity,
    known: Option<&'a Identity>,
    heartbeat: Option<&'a InUseHeartbeat>,
) -> Arrival<'a> {
    let (is_single, longest_us) = (context.servers.is_single(), context.longest_us());
    Arrival { server: &server.identity, recorded, known, heartbeat, is_single, longest_us }
}

/// Writes the record, and ends the transaction that has locked it.
async fn write(wire: &mut Wire, server: &Server, context: &Context, next: NextRecord) -> Result<(), Fault> {
    let NextRecord { epoch, floor, wait_us } = next;
    let identity = sql::hexed(server.identity.as_bytes());
    let heartbeat = if context.servers.is_single() { String::new() } else { InUseHeartbeat::set() + ";" };
    let update = format!(
        "UPDATE {META} SET identity={identity},epoch={epoch},floor=GREATEST(floor,{floor}),\
         grants_from=GREATEST(grants_from,{NOW_US}+{wait_us}) WHERE id=1;{heartbeat}COMMIT"
    );
    fault::exchange(wire, update).await.map(drop)
}

fn tell(server: &Server, context: &Context, recorded: &Identity, (gap, why): (Gap, &str), next: NextRecord) {
    match gap {
        Gap::Leases => {
            reached(Branch::EpochRaised);
            context.metrics.store.error("identity_changed");
            tracing::warn!(
                from = (recorded.server != server.identity).then_some(&*recorded.server),
                server = server.identity,
                epoch = next.epoch,
                wait_ms = next.wait_us / 1_000,
                "the MySQL server has changed, or may have: {why}; no lease is granted until the leases of the \
                 other server have ended"
            );
        }
        Gap::Tokens => {
            reached(Branch::TokensRaised);
            tracing::info!("tokens continue above {}: {why}", next.floor);
        }
    }
}
