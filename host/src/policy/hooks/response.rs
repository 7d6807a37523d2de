//! `response.contended`: makes the answer to a guarded request that cannot get its lock.

use super::naming::{PlanRequest, trial_requests};
use super::{Definition, Hook, shortened};
use crate::lock::Key;
use crate::policy::bindings::{response as wit, types};
use crate::policy::check::Trial;
use crate::policy::generation::invalid_answer;
use crate::policy::module::Module;
use crate::policy::{Fault, Generation, Observed, Rejection};

const MAX_RETRY_AFTER_MS: u32 = 3_600_000;
const MAX_HEADERS: usize = 16;
const MAX_HEADER_BYTES: usize = 1024;
/// Response headers that frame the response, which a policy must not set.
const OWN_HEADERS: [&str; 9] = [
    "connection",
    "content-length",
    "content-type",
    "keep-alive",
    "retry-after",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

pub(super) const HOOK: Definition = Definition {
    hook: Hook::Response,
    name: "response",
    interface: "response",
    function: "contended",
    try_out,
};

/// A guarded request that cannot get its lock, as `response.contended` sees it.
#[derive(Clone, Debug)]
pub struct ResponseContention {
    /// The key that the request did not get.
    pub key: Key,
    /// The holder's name; empty if it is unknown.
    pub holder: String,
    /// The position in the queue; 1 is next.
    pub position: u32,
    /// How long the request waited.
    pub waited_ms: u32,
    /// How long the proxy suggests to wait before the next request.
    pub retry_after_ms: u32,
}

/// The answer to a guarded request that cannot get its lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalResponse {
    /// 400 to 599.
    pub status: u16,
    /// How long the client should wait before its next request.
    pub retry_after_ms: u32,
    /// Header names are in lower case; headers that frame the response are not allowed.
    pub headers: Vec<(String, String)>,
    /// The text that the client sees.
    pub detail: String,
}

impl Generation {
    /// The answer to a guarded request that cannot get its lock.
    pub fn response(
        &self,
        request: &PlanRequest,
        contention: &ResponseContention,
    ) -> Option<Result<RefusalResponse, Fault>> {
        let answer = self.ask_optional(Hook::Response, || {
            let (request, contention) = (request.to_wit(), contention.to_wit());
            let answer = ask(&self.module, &self.settings, &request, &contention)?;
            checked(answer).map_err(|detail| invalid_answer(Hook::Response, detail))
        });
        self.observed(contention.key.as_str(), answer.as_ref(), |answer| Observed::Response {
            request: request.clone(),
            contention: contention.clone(),
            answer,
        });
        answer
    }
}

fn ask(
    module: &Module,
    settings: &[u8],
    request: &types::Request,
    contention: &wit::Contention,
) -> Result<wit::Answer, Fault> {
    module.ask(Hook::Response, (settings, request, contention))
}

/// Checks an answer. The error says what is invalid, for a fault of kind `Value`.
fn checked(from: wit::Answer) -> Result<RefusalResponse, String> {
    if !(400..=599).contains(&from.status) {
        return Err(format!("the status {} is not between 400 and 599", from.status));
    }
    if from.headers.len() > MAX_HEADERS {
        return Err(format!("{} headers, at most {MAX_HEADERS} are allowed", from.headers.len()));
    }
    let headers: Result<Vec<_>, String> = from.headers.into_iter().map(header).collect();
    Ok(RefusalResponse {
        status: from.status,
        retry_after_ms: from.retry_after.min(MAX_RETRY_AFTER_MS),
        headers: headers?,
        detail: shortened(from.detail),
    })
}

fn header(from: types::Label) -> Result<(String, String), String> {
    let name = from.name.to_ascii_lowercase();
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let sound = !name.is_empty()
        && name.bytes().all(token)
        && from.value.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        && name.len() + from.value.len() <= MAX_HEADER_BYTES;
    if !sound {
        return Err(format!("the header {:?} is malformed", shortened(name)));
    }
    if OWN_HEADERS.contains(&name.as_str()) {
        return Err(format!("the header `{name}` is the proxy's own"));
    }
    Ok((name, from.value))
}

impl ResponseContention {
    /// The fallback, for a policy that does not export the hook or fails: 423 Locked.
    pub fn fallback(&self) -> RefusalResponse {
        RefusalResponse {
            status: 423,
            retry_after_ms: self.retry_after_ms,
            headers: Vec::new(),
            detail: "another request holds the lock".to_owned(),
        }
    }

    fn to_wit(&self) -> wit::Contention {
        wit::Contention {
            key: self.key.as_str().to_owned(),
            holder: self.holder.clone(),
            position: self.position,
            waited: self.waited_ms,
            retry_after: self.retry_after_ms,
        }
    }
}

fn try_out(trial: &Trial<'_>) -> Result<Vec<String>, Rejection> {
    let [.., (_, guarded)] = trial_requests();
    let contention = ResponseContention {
        key: trial.key.clone(),
        holder: "other".to_owned(),
        position: 2,
        waited_ms: 100,
        retry_after_ms: 1_000,
    };
    let (request, contention) = (guarded.to_wit(), contention.to_wit());
    trial.twice("a guarded request without its lock", || {
        ask(trial.module, trial.settings, &request, &contention)
    })?;
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_answers_must_be_valid_http() {
        let with = |name: &str, value: &str| wit::Answer {
            status: 423,
            retry_after: u32::MAX,
            headers: vec![types::Label { name: name.into(), value: value.into() }],
            detail: String::new(),
        };
        assert_eq!(
            checked(with("X-Lock", "held")).unwrap().headers,
            [("x-lock".to_owned(), "held".to_owned())]
        );
        assert_eq!(checked(with("X-Lock", "held")).unwrap().retry_after_ms, 3_600_000);
        assert!(checked(with("x", "a\r\nset-cookie: b")).is_err());
        assert!(checked(with("x y", "a")).is_err());
        assert!(checked(with("Transfer-Encoding", "chunked")).unwrap_err().contains("own"));
        assert!(checked(wit::Answer { status: 200, ..with("x", "y") }).is_err());
    }
}
