//! `acquire`, `renew`, `release`, `force` and `ls`.

use bytes::Bytes;
use hyper::Method;
use serde_json::{Value, json};

use super::client::{CALL_TIMEOUT, Client, encode_path, encode_query};
use super::failure::Failure;
use super::servers::Servers;
use super::{AcquireArgs, Options, output};

/// Runs `acquire`.
pub async fn acquire(args: &AcquireArgs, options: &Options) -> Result<(), Failure> {
    let servers = Servers::new(options)?;
    let (lease, _) = servers.acquire("/v1/acquire", &args.to_json(), args.wait).await?;
    if options.json {
        output::json(&lease);
    } else {
        print_lease(&lease);
    }
    Ok(())
}

/// Runs `renew`.
pub async fn renew(lease_id: &str, ttl_ms: Option<u32>, options: &Options) -> Result<(), Failure> {
    let mut body = json!({ "lease_id": lease_id });
    if let Some(ttl_ms) = ttl_ms {
        body["ttl_ms"] = ttl_ms.into();
    }
    let renewed = Servers::new(options)?.post("/v1/renew", &body, CALL_TIMEOUT).await?;
    if options.json {
        output::json(&renewed);
    } else {
        output::line(&format!("renewed; expires in {}", output::time(&renewed["expires_in_ms"])));
    }
    Ok(())
}

/// Runs `release`.
pub async fn release(lease_id: &str, options: &Options) -> Result<(), Failure> {
    let body = json!({ "lease_id": lease_id });
    let released = Servers::new(options)?.post_once("/v1/release", &body).await?;
    if options.json {
        output::json(&released);
    } else {
        output::line("released");
    }
    Ok(())
}

/// Runs `force`.
pub async fn force(key: &str, options: &Options) -> Result<(), Failure> {
    let path = format!("/v1/locks/{}", encode_path(key));
    let admin = Client::new(&options.admin, options)?;
    let taken = admin.call(Method::DELETE, &path, Bytes::new(), CALL_TIMEOUT).await?;
    if options.json {
        output::json(&taken);
        return Ok(());
    }
    let key = output::shown(&taken["key"]);
    output::line(&match taken["holders"].as_u64() {
        Some(0) => format!("{key} had no holder"),
        Some(1) => format!("{key} was taken from its holder"),
        _ => format!("{key} was taken from its {} holders", output::shown(&taken["holders"])),
    });
    Ok(())
}

/// Runs `ls`: lists up to `limit` locks, in as many pages as necessary.
pub async fn list(prefix: Option<&str>, limit: usize, options: &Options) -> Result<(), Failure> {
    let servers = Servers::new(options)?;
    let prefix = encode_query(prefix.unwrap_or_default());
    let mut locks: Vec<Value> = Vec::new();
    let mut unheard = Value::Null;
    let mut after = String::new();
    let mut more = true;
    let mut broken_off = None;
    while more && locks.len() < limit {
        let page = (limit - locks.len()).min(1_000);
        let path = format!("/v1/locks?prefix={prefix}&limit={page}&after={}", encode_query(&after));
        let answer = match servers.get(&path).await {
            Ok(answer) => answer,
            Err(failure) if locks.is_empty() => return Err(failure),
            // What was found is shown.
            Err(failure) => {
                broken_off = Some(failure);
                break;
            }
        };
        let found = answer["locks"].as_array().cloned().unwrap_or_default();
        more = answer["more"].as_bool().unwrap_or(false) && !found.is_empty();
        after = answer["next"].as_str().unwrap_or_default().to_owned();
        locks.extend(found);
        if unheard.is_null() {
            unheard = answer["unheard"].clone();
        }
    }
    if options.json {
        let mut all = json!({ "locks": locks, "more": more });
        if !unheard.is_null() {
            all["unheard"] = unheard;
        }
        output::json(&all);
        return broken_off.map_or(Ok(()), Err);
    }
    for why in unheard.as_array().into_iter().flatten() {
        output::complain(&format!("there may be more locks than these: {}", output::shown(why)));
    }
    if locks.is_empty() {
        output::line("no locks are held");
        return Ok(());
    }
    output::table(
        &["KEY", "TOKEN", "MODE", "OWNER", "LEFT", "POLICY"],
        &locks.iter().flat_map(|lock| [holders(lock), kept(lock)].concat()).collect::<Vec<_>>(),
    );
    if more && broken_off.is_none() {
        output::line(&format!("… and more than these {limit}; see --limit"));
    }
    broken_off.map_or(Ok(()), Err)
}

fn print_lease(lease: &Value) {
    output::pairs(&[
        ("lease", output::shown(&lease["lease_id"])),
        (
            "keys",
            lease["keys"].as_array().into_iter().flatten().map(output::shown).collect::<Vec<_>>().join(" "),
        ),
        ("token", output::shown(&lease["token"])),
        ("owner", output::shown(&lease["owner"])),
        ("mode", output::mode(&lease["mode"])),
        ("expires in", output::time(&lease["expires_in_ms"])),
        ("ends with", output::shown(&lease["ends_with"])),
        ("waited", output::time(&lease["waited_ms"])),
        ("policy", output::shown(&lease["policy"])),
    ]);
}

fn holders(lock: &Value) -> Vec<Vec<String>> {
    let row = |holder: &Value| {
        vec![
            output::shown(&lock["key"]),
            output::shown(&holder["token"]),
            output::mode(&holder["mode"]),
            output::shown(&holder["owner"]),
            output::time(&holder["left_ms"]),
            output::shown(&holder["policy"]),
        ]
    };
    lock["holders"].as_array().into_iter().flatten().map(row).collect()
}

/// A row for a stored value, whose key may have no holder.
fn kept(lock: &Value) -> Vec<Vec<String>> {
    let none = || "-".to_owned();
    let row = |_: &Value| {
        let (key, token) = (output::shown(&lock["key"]), output::shown(&lock["token"]));
        vec![key, token, "kept".to_owned(), none(), none(), none()]
    };
    lock.get("kept").into_iter().map(row).collect()
}
