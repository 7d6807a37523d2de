//! The hooks that a policy may export: a file each, with the name of the hook's interface in `sdk/wit/policy.wit`.
//!
//! A file has everything that belongs to its hook: the types that the rest of the proxy sees, the call, the limits
//! on the policy's answer, the fallback, and the trial calls of a check. Other modules go through the list of
//! hooks here: [`super::form`] and [`super::module`] look for the exports, [`super::check`] makes the trial calls,
//! and [`super::generation`] counts the faults.

pub(super) mod backoff;
pub(super) mod fairness;
pub(super) mod naming;
pub(super) mod reads;
pub(super) mod renewal;
pub(super) mod response;
pub(super) mod settings;

use super::Rejection;
use super::check::Trial;

/// The longest text for people that a policy gives.
const MAX_TEXT_BYTES: usize = 1024;

/// A function that a policy may export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// `naming.plan`: turns a request into a plan.
    Plan,
    /// `fairness.choose`: chooses the next waiter of a key.
    Choose,
    /// `backoff.contended`: decides what a waiter does while another client holds the key.
    Backoff,
    /// `renewal.due`: decides whether an expiring lease is extended.
    Renewal,
    /// `response.contended`: makes the answer to a guarded request that cannot get its lock.
    Response,
    /// `settings.configure`: checks the settings when the policy is loaded.
    Configure,
    /// `reads.plan-reads`: lists what `plan` reads of a request.
    Reads,
}

/// A row of the list of hooks.
pub(super) struct Definition {
    pub hook: Hook,
    /// The name in metrics and messages.
    pub name: &'static str,
    /// The interface in `sdk/wit/policy.wit`.
    pub interface: &'static str,
    /// The function of the interface.
    pub function: &'static str,
    /// Calls the hook as a check of the component. Returns findings that do not prevent loading.
    pub try_out: fn(&Trial<'_>) -> Result<Vec<String>, Rejection>,
}

/// A row is at the index of its hook.
static HOOKS: [Definition; 7] =
    [naming::HOOK, fairness::HOOK, backoff::HOOK, renewal::HOOK, response::HOOK, settings::HOOK, reads::HOOK];

impl Definition {
    /// The name under which a component exports the interface.
    pub fn export(&self) -> String {
        format!("lockkeeper:policy/{}@0.1.0", self.interface)
    }
}

impl Hook {
    /// All hooks.
    pub const ALL: [Hook; HOOKS.len()] = {
        let mut all = [Hook::Plan; HOOKS.len()];
        let mut at = 0;
        while at < all.len() {
            all[at] = HOOKS[at].hook;
            assert!(all[at] as usize == at, "each row is at the index of its hook");
            at += 1;
        }
        all
    };

    pub(super) fn definition(self) -> &'static Definition {
        &HOOKS[self as usize]
    }

    /// The name of the hook in metrics and messages.
    pub fn as_str(self) -> &'static str {
        self.definition().name
    }
}

/// Cuts a text for people at the limit, between characters.
pub(super) fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_truncated_at_character_boundaries() {
        let text = shortened("ä".repeat(1_000));
        assert_eq!(text.len(), 1024);
        assert_eq!(shortened("x".to_owned() + &"ä".repeat(1_000)).len(), 1023);
    }
}
