//! The answers for hooks that a policy does not export or that fail. Pure.
//!
//! The queue itself decides who is next and how long to back off: see `lock::table`.

use super::{Expiring, RefusalResponse, Renewal, ResponseContention};

/// Extends by the ttl while the client is alive, up to the longest hold.
pub fn renewal(expiring: &Expiring) -> Renewal {
    match expiring.max_hold_ms.saturating_sub(expiring.held_ms) {
        left_ms if left_ms > 0 && expiring.client_alive => {
            Renewal::Extend { ttl_ms: expiring.ttl_ms.min(left_ms) }
        }
        _ => Renewal::Lapse,
    }
}

/// Answers 423 Locked.
pub fn response(contention: &ResponseContention) -> RefusalResponse {
    RefusalResponse {
        status: 423,
        retry_after_ms: contention.retry_after_ms,
        headers: Vec::new(),
        detail: "another request holds the lock".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::lock::Key;

    #[test]
    fn leases_of_the_living_are_extended_up_to_the_longest_hold() {
        let due = |held_ms, client_alive| {
            renewal(&Expiring {
                key: Key::new("a").unwrap(),
                owner: String::new(),
                ttl_ms: 10,
                renewals: 0,
                held_ms,
                max_hold_ms: 25,
                waiters: 0,
                client_alive,
                labels: Arc::from([]),
            })
        };
        assert_eq!(due(5, true), Renewal::Extend { ttl_ms: 10 });
        assert_eq!(due(20, true), Renewal::Extend { ttl_ms: 5 });
        assert_eq!(due(25, true), Renewal::Lapse);
        assert_eq!(due(5, false), Renewal::Lapse);
    }
}
