//! `fleet`: the proxies of one store.

use serde_json::Value;

use super::client::Client;
use super::failure::Failure;
use super::{Options, output};

/// Runs `fleet`.
pub async fn show(options: &Options) -> Result<(), Failure> {
    let fleet = Client::new(&options.admin, options)?.get("/v1/fleet").await?;
    if options.json {
        output::json(&fleet);
        return Ok(());
    }
    let rows: Vec<_> = fleet["members"].as_array().into_iter().flatten().map(member).collect();
    output::table(&["PROXY", "STATE", "SILENT", "ADDRESS", "ACKNOWLEDGED"], &rows);
    if let Some(trouble) = fleet["trouble"].as_str() {
        output::line(&format!("this proxy grants nothing: {trouble}"));
    }
    let rows: Vec<_> = fleet["policies"].as_array().into_iter().flatten().map(policy).collect();
    if !rows.is_empty() {
        output::line("");
        output::table(&["POLICY", "VERSION", "DIGEST", "PHASE", "SEQ"], &rows);
    }
    Ok(())
}

fn policy(policy: &Value) -> Vec<String> {
    vec![
        output::shown(&policy["name"]),
        output::shown(&policy["version"]),
        output::short_digest(&policy["digest"]),
        output::shown(&policy["phase"]),
        output::shown(&policy["seq"]),
    ]
}

fn member(member: &Value) -> Vec<String> {
    let this = if member["is_this"] == true { " (this)" } else { "" };
    let acknowledged = member["acknowledged"].as_object().into_iter().flatten();
    let acknowledged: Vec<String> = acknowledged.map(|(name, seq)| format!("{name}={seq}")).collect();
    let address = output::shown(&member["address"]);
    vec![
        format!("{}{this}", output::shown(&member["id"])),
        output::shown(&member["state"]),
        output::time(&member["silent_ms"]),
        if address.is_empty() { "-".to_owned() } else { address },
        acknowledged.join(" "),
    ]
}
