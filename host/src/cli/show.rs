//! `show`: who has a lock, and why others wait for it.

use serde_json::Value;

use super::client::{encode_path, encode_query};
use super::failure::Failure;
use super::servers::Servers;
use super::{Options, output};

/// Runs `show`.
pub async fn show(name: &str, owner: Option<&str>, options: &Options) -> Result<(), Failure> {
    let owner = owner.map_or_else(String::new, |owner| format!("?owner={}", encode_query(owner)));
    let path = format!("/v1/locks/{}{owner}", encode_path(name));
    let lock = Servers::new(options)?.get(&path).await?;
    if options.json {
        output::json(&lock);
        return Ok(());
    }
    let (key, token) = (output::shown(&lock["key"]), output::shown(&lock["token"]));
    let holders = of(&lock["holders"]);
    if holders.is_empty() {
        output::line(&format!("{key}  free, last token {token}"));
    }
    holders.iter().for_each(|holder| output::line(&format!("{key}  {}", held(holder))));
    if let Some(kept) = lock.get("kept") {
        let value = kept.get("value").map_or_else(String::new, |value| format!(": {value}"));
        output::line(&format!("  kept since {}{value}", output::shown(&kept["since"])));
    }
    let waiters = of(&lock["queue"]);
    output::columns(&waiters.iter().map(waiter).collect::<Vec<_>>());
    if lock["others_wait"] == true {
        output::line("  clients of other proxies wait, too; no estimate counts them");
    }
    if let Some(held) = lock.get("recent_holds") {
        output::line(&format!("  held lately for {}", times(held)));
    }
    const PLANS: &[&str] =
        &["PLACE", "OWNER", "MODE", "RANK", "GROUP", "LEASE", "WAIT", "KEYS", "READS", "POLICY"];
    section("plans", &waiters, PLANS, plan);
    section("decisions", &of(&lock["decisions"]), &["AT", "HOOK", "BY", "WHAT"], |decision| {
        ["at", "hook", "by", "what"].iter().map(|name| output::shown(&decision[*name])).collect()
    });
    Ok(())
}

fn of(list: &Value) -> Vec<&Value> {
    list.as_array().into_iter().flatten().collect()
}

fn held(holder: &Value) -> String {
    // The time of day is enough: a lease ends soon.
    let until = output::shown(&holder["until"]);
    let until = until.get(11..19).unwrap_or(&until).to_owned();
    format!(
        "held by {} ({}) for {}, lease until {until} UTC ({} left), token {}",
        output::shown(&holder["owner"]),
        output::mode(&holder["mode"]),
        output::time(&holder["held_ms"]),
        output::time(&holder["left_ms"]),
        output::shown(&holder["token"]),
    )
}

fn waiter(waiter: &&Value) -> Vec<String> {
    vec![
        format!("  {}.", output::shown(&waiter["position"])),
        output::shown(&waiter["owner"]),
        format!("waits {}", output::time(&waiter["waited_ms"])),
        output::shown(&waiter["why"]["text"]),
        expected(&waiter["estimate"]),
    ]
}

fn expected(estimate: &Value) -> String {
    let holds = output::shown(&estimate["holds"]);
    match estimate["none"].as_str() {
        None if estimate.is_object() => format!("expected in about {}", times(estimate)),
        Some("too_few_holds") => format!("no estimate: {holds} holds have ended here so far"),
        Some("held_longer") => {
            format!("no estimate: held for longer than nearly all of the last {holds} holds")
        }
        Some("permits") => "no estimate for permits".to_owned(),
        Some("several_keys") => "no estimate for several keys".to_owned(),
        Some("fairness") => "no estimate: the policy chooses".to_owned(),
        _ => String::new(),
    }
}

fn times(times: &Value) -> String {
    let time = |name: &str| match &times[name] {
        ms if ms == 0 => "under 1ms".to_owned(),
        ms => output::time(ms),
    };
    let (median, low, high) = (time("median_ms"), time("low_ms"), time("high_ms"));
    format!("{median} ({low} to {high}; from {} holds)", output::shown(&times["holds"]))
}

fn plan(waiter: &Value) -> Vec<String> {
    let plan = &waiter["plan"];
    let keys: Vec<String> = of(&plan["keys"]).into_iter().map(output::shown).collect();
    let keys = keys.join(if plan["any"] == true { " or " } else { " " });
    let read = |read: &Value| match read["value"].as_str() {
        Some(_) => format!("{}={}", output::shown(&read["part"]), output::shown(&read["value"])),
        None => output::shown(&read["part"]),
    };
    let reads = plan["reads"].as_array().map(|reads| reads.iter().map(read).collect::<Vec<_>>().join(" "));
    vec![
        output::shown(&waiter["position"]),
        output::shown(&waiter["owner"]),
        output::mode(&waiter["mode"]),
        output::shown(&waiter["rank"]),
        output::shown(&waiter["group"]),
        output::time(&plan["ttl_ms"]),
        output::time(&plan["wait_ms"]),
        keys,
        reads.unwrap_or_else(|| "all".to_owned()),
        output::shown(&plan["policy"]),
    ]
}

fn section(title: &str, items: &[&Value], headings: &[&str], row: impl Fn(&Value) -> Vec<String>) {
    let rows: Vec<Vec<String>> = items.iter().map(|item| row(item)).collect();
    if !rows.is_empty() {
        output::line(&format!("\n{title}"));
        output::table(headings, &rows);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_estimate_is_told_with_its_spread_or_not_at_all() {
        let within = json!({"low_ms": 0, "median_ms": 810, "high_ms": 2_500, "holds": 32});
        assert_eq!(expected(&within), "expected in about 810ms (under 1ms to 2.5s; from 32 holds)");
        let few = json!({"none": "too_few_holds", "holds": 3});
        assert_eq!(expected(&few), "no estimate: 3 holds have ended here so far");
        assert_eq!(expected(&json!({"none": "not_held"})), "");
        assert_eq!(expected(&Value::Null), "");
    }
}
