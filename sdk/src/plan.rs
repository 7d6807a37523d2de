use crate::{Label, Mode, Permits, Plan, Primitive, Refusal, Request};

/// What becomes of a guarded request whose lease is lost while the application works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLoss {
    /// It goes on; the loss is logged and counted. So it is where a plan says nothing.
    Finish,
    /// It goes on, and its answer says so.
    Mark,
    /// It is broken off.
    Cut,
}

impl Plan {
    /// The longest time-to-live of a lease where nobody names one, in milliseconds.
    pub const TTL: u32 = 10_000;
    pub const MAX_WAITERS: u32 = 10_000;
    pub const MAX_HOLD: u32 = 86_400_000;

    /// One holder at a time, a lease of 10 s, no waiting.
    pub fn exclusive(key: impl Into<String>) -> Plan {
        Plan {
            keys: vec![key.into()],
            primitive: Primitive::Lease,
            mode: Mode::Exclusive,
            ttl: Plan::TTL,
            wait: 0,
            rank: 0,
            group: String::new(),
            weight: 1,
            reentrant: false,
            max_waiters: Plan::MAX_WAITERS,
            lock_at_least: 0,
            lock_delay: 0,
            max_hold: Plan::MAX_HOLD,
            labels: Vec::new(),
        }
    }

    /// What the request asks for: its name is the key, its mode, ttl and wait are kept. A request
    /// for permits needs [`Plan::with_permits`] besides.
    pub fn of(request: &Request) -> Plan {
        Plan {
            mode: request.mode,
            ttl: request.ttl.unwrap_or(Plan::TTL),
            wait: request.wait.unwrap_or(0),
            ..Plan::exclusive(request.name.clone())
        }
    }

    pub fn with_key(self, key: impl Into<String>) -> Plan {
        Plan { keys: vec![key.into()], ..self }
    }

    /// All of these keys or none.
    pub fn with_keys<K: Into<String>>(self, keys: impl IntoIterator<Item = K>) -> Plan {
        Plan { keys: keys.into_iter().map(Into::into).collect(), ..self }
    }

    pub fn with_mode(self, mode: Mode) -> Plan {
        Plan { mode, ..self }
    }

    /// Says of how many permits a request for permits takes some. Other modes stay as they are.
    ///
    /// # Errors
    /// Where the request asks for none, or for more than there are.
    pub fn with_permits(self, limit: u32) -> Result<Plan, Refusal> {
        let Mode::Permits(Permits { count, .. }) = self.mode else { return Ok(self) };
        if count == 0 || count > limit {
            return Err(Refusal::new(format!("asks for {count} permits, and the key has {limit}")));
        }
        Ok(self.with_mode(Mode::Permits(Permits { count, limit })))
    }

    /// Milliseconds.
    pub fn with_ttl(self, ttl: u32) -> Plan {
        Plan { ttl, ..self }
    }

    /// Milliseconds; 0 asks once.
    pub fn with_wait(self, wait: u32) -> Plan {
        Plan { wait, ..self }
    }

    pub fn with_rank(self, rank: i32) -> Plan {
        Plan { rank, ..self }
    }

    pub fn with_group(self, group: impl Into<String>, weight: u32) -> Plan {
        Plan { group: group.into(), weight, ..self }
    }

    /// Readers beside each other: shared for a guarded request that only reads (see
    /// [`Request::is_safe`]). The mode of others stays as it is.
    pub fn shared_if_safe(self, request: &Request) -> Plan {
        if request.is_safe() { self.with_mode(Mode::Shared) } else { self }
    }

    /// What is done once for this key: the first request does it, those that come meanwhile or later get
    /// its outcome.
    pub fn once_by(self, key: impl Into<String>) -> Plan {
        self.with_key(key).with_mode(Mode::Exclusive).with_primitive(Primitive::Once)
    }

    /// How long the outcome of a `once` is kept, in milliseconds; 0 leaves it to the proxy.
    pub fn with_keep(self, keep: u32) -> Plan {
        Plan { lock_at_least: keep, ..self }
    }

    pub fn with_primitive(self, primitive: Primitive) -> Plan {
        Plan { primitive, ..self }
    }

    /// What to take where the server lacks the first choice: Galera has no GET_LOCK, and a quorum needs
    /// stores. Without one such a request is refused.
    pub fn with_second_primitive(self, primitive: Primitive) -> Plan {
        self.with_label("lockkeeper.second-primitive", primitive.name())
    }

    /// Any one of the keys that is free, instead of all. For the primitives `lease` and `row`.
    pub fn any_of_keys(self) -> Plan {
        self.with_label("lockkeeper.keys", "any")
    }

    /// First come, first served over all proxies, not over each one's own waiters. For the primitive
    /// `lease`. `fairness` is not asked then; lower ranks still go first.
    pub fn in_global_order(self) -> Plan {
        self.with_label("lockkeeper.order", "global")
    }

    /// What becomes of a guarded request whose lease is lost.
    pub fn on_loss(self, what: OnLoss) -> Plan {
        self.with_label("lockkeeper.on-loss", what.name())
    }

    pub fn with_label(mut self, name: impl Into<String>, value: impl Into<String>) -> Plan {
        self.labels.push(Label { name: name.into(), value: value.into() });
        self
    }
}

impl Primitive {
    /// As in config.toml and in answers.
    pub fn name(self) -> &'static str {
        match self {
            Primitive::Lease => "lease",
            Primitive::Row => "row",
            Primitive::Advisory => "advisory",
            Primitive::Version => "version",
            Primitive::Once => "once",
            Primitive::Quorum => "quorum",
        }
    }
}

impl OnLoss {
    pub fn name(self) -> &'static str {
        match self {
            OnLoss::Finish => "finish",
            OnLoss::Mark => "mark",
            OnLoss::Cut => "cut",
        }
    }
}

impl Refusal {
    /// `reason` is shown to the client.
    pub fn new(reason: impl Into<String>) -> Refusal {
        Refusal { reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_get_the_limit_of_the_policy() {
        let asks = |count| Request::new("a").with_mode(Mode::Permits(Permits { count, limit: 0 }));
        let plan = Plan::of(&asks(2)).with_permits(3).unwrap();
        assert_eq!(plan.mode, Mode::Permits(Permits { count: 2, limit: 3 }));
        assert!(Plan::of(&asks(4)).with_permits(3).is_err());
        assert!(Plan::of(&asks(0)).with_permits(3).is_err());
        assert_eq!(Plan::exclusive("a").with_permits(3).unwrap().mode, Mode::Exclusive);
    }

    #[test]
    fn readers_share_and_writers_keep_their_mode() {
        let mode = |line| {
            let request = Request::http(line);
            Plan::of(&request).shared_if_safe(&request).mode
        };
        assert_eq!((mode("GET /a"), mode("PUT /a")), (Mode::Shared, Mode::Exclusive));
        let request = Request::new("a").with_mode(Mode::Shared);
        assert_eq!(Plan::of(&request).shared_if_safe(&request).mode, Mode::Shared);
    }

    #[test]
    fn what_is_done_once_keeps_the_wishes_of_its_request() {
        let request = Request::http("POST /pay").with_mode(Mode::Shared).with_ttl(500).with_wait(600);
        let plan = Plan::of(&request).once_by("pay/7").with_keep(5_000);
        assert_eq!(
            (plan.primitive, plan.mode, plan.keys),
            (Primitive::Once, Mode::Exclusive, vec!["pay/7".into()])
        );
        assert_eq!((plan.ttl, plan.wait, plan.lock_at_least), (500, 600, 5_000));
    }
}
