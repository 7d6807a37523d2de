//! Conditions that must hold at the end of a run, when nothing goes wrong any more and no client makes requests.

use std::time::Duration;

use super::application::GUARDED;
use super::check::Violation;
use super::clients::request;
use super::options::{Options, POLICIES};
use super::world::{Proxy, Shared};
use crate::clock;
use crate::service::{AcquireError, Request};
use crate::store::{Store, Stored};

/// The longest time until proxies take back grants to clients that are gone.
const TAKEN_BACK: Duration = Duration::from_secs(30);
/// The time by which all leases have ended, even on servers whose clocks were set back several times.
const ALL_ENDED_MS: u32 = 600_000;

/// Checks that leases whose clients got no answer or have released them are taken back, however long they would last.
/// Ends all other leases by force, so that the run ends sooner.
pub async fn no_lease_is_left_behind(shared: &Shared, options: &Options) {
    if !options.has_long_leases() {
        return;
    }
    tokio::time::sleep(TAKEN_BACK).await;
    let proxies = shared.all();
    let lives: Vec<(usize, u64)> = proxies.iter().map(|proxy| (proxy.index, proxy.life)).collect();
    let Some(proxy) = proxies.first() else { return };
    let page = match proxy.stores[0].list(String::new(), None, usize::MAX).await {
        Ok(page) => page,
        Err(error) => {
            return shared.broken(Violation(format!("the leases cannot be listed: {error}")));
        }
    };
    for Stored { key, record, now, .. } in page.items {
        for holder in record.holders.iter().filter(|holder| holder.until > now) {
            let checked = shared.checks.lock().is_left(key.as_str(), holder, &lives);
            if let Err(violation) = checked {
                return shared.broken(violation);
            }
            // The application has finished all requests.
            if options.is_calm() && key.as_str().starts_with(GUARDED) {
                let why = format!(
                    "left behind: {} has {}, and no guarded request is under way",
                    holder.owner,
                    key.as_str()
                );
                return shared.broken(Violation(why));
            }
        }
        let _ = proxy.service.force_release(key).await;
    }
}

/// Checks that in the end nobody holds anything, every request is granted, and all proxies use the same policies.
pub async fn nothing_is_left(shared: &Shared, options: &Options) {
    let latest = clock::now().plus_ms(ALL_ENDED_MS);
    while let Err(why) = all_has_ended(shared, options).await {
        if clock::now() >= latest {
            let locked: Vec<String> = shared.servers.iter().map(|server| server.locked()).collect();
            shared.note(format!("locked on the servers: {}", locked.join("; ")));
            return shared.broken(Violation(why));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn all_has_ended(shared: &Shared, options: &Options) -> Result<(), String> {
    let proxies = shared.all();
    for policy in POLICIES {
        let settings = |proxy: &Proxy| proxy.policies.get(policy).map(|live| live.settings().clone());
        let all: Vec<_> = proxies.iter().map(settings).collect();
        if all.iter().any(|settings| *settings != all[0]) {
            return Err(format!("the proxies go by different settings of `{policy}` at the end: {all:?}"));
        }
    }
    let locks = options.policies.iter().filter(|policy| !["once", "version"].contains(policy));
    for policy in locks {
        for (resource, proxy) in (0..options.resources).flat_map(|n| proxies.iter().map(move |p| (n, p))) {
            let name = format!("{policy}/{resource}");
            // The clean-up locks the rows that it checks for a moment.
            let patient = Request { wait_ms: Some(2_000), ..request(&name, "the end") };
            match proxy.service.acquire(patient).await {
                Ok(lease) => drop(proxy.service.release(lease.lease).await),
                // The policy refuses the resource for everybody.
                Err(AcquireError::Refused { .. }) => {}
                Err(error) => {
                    let n = proxy.index;
                    return Err(format!("{name} is not free at the end, through proxy {n}: {error}"));
                }
            }
        }
    }
    Ok(())
}
