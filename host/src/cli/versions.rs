//! `version read` and `version commit`.

use serde_json::{Value, json};

use super::args::labels_json;
use super::client::CALL_TIMEOUT;
use super::failure::Failure;
use super::servers::{self, Servers};
use super::{Options, VersionCommand, output};

/// Runs `version read` or `version commit`.
pub async fn run(command: VersionCommand, options: &Options) -> Result<(), Failure> {
    let servers = Servers::new(options)?;
    let (path, body) = match command {
        VersionCommand::Read { resource, labels } => {
            let mut body = json!({ "resource": resource });
            set_labels(&mut body, &labels);
            ("/v1/versions/read", body)
        }
        VersionCommand::Commit { resource, version, value, labels, request_id } => {
            let mut body = json!({ "resource": resource, "version": version });
            set_labels(&mut body, &labels);
            if let Some(value) = value {
                let not_json = |error| Failure::Usage(format!("the value is not JSON: {error}"));
                body["value"] = serde_json::from_str(&value).map_err(not_json)?;
            }
            body["request_id"] = request_id.unwrap_or_else(servers::new_request_id).into();
            ("/v1/versions/commit", body)
        }
    };
    let answer = servers.post(path, &body, CALL_TIMEOUT).await?;
    if options.json {
        output::json(&answer);
        return Ok(());
    }
    output::line(&format!("version {}", answer["version"]));
    if let Some(value) = answer.get("value").filter(|value| **value != Value::Null) {
        output::line(&value.to_string());
    }
    Ok(())
}

fn set_labels(body: &mut Value, labels: &[(String, String)]) {
    if let Some(labels) = labels_json(labels) {
        body["labels"] = labels;
    }
}
