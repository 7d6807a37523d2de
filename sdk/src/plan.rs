use crate::{Label, Mode, Permits, Plan, Primitive, Refusal, Request};

/// What happens to a guarded request whose lease is lost while the application works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLoss {
    /// The request continues; the loss is logged and counted. This is the default.
    Finish,
    /// The request continues, and its answer says that the lease was lost.
    Mark,
    /// The request is aborted.
    Cut,
}

/// When a proxy grants a key from its memory, beneath a lease of its own in the store (a delegation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delegate {
    /// Never: the store knows every grant. This is the default.
    Never,
    /// If clients wait for the key, or it is granted often.
    Contended,
    /// Always.
    Always,
}

impl Delegate {
    fn name(self) -> &'static str {
        match self {
            Delegate::Never => "never",
            Delegate::Contended => "contended",
            Delegate::Always => "always",
        }
    }
}

impl Plan {
    /// The default ttl of a lease, in milliseconds.
    pub const TTL: u32 = 10_000;
    /// The default limit of a key's queue.
    pub const MAX_WAITERS: u32 = 10_000;
    /// The default limit of a held connection, in milliseconds: one day.
    pub const MAX_HOLD: u32 = 86_400_000;

    /// A plan for one holder at a time, with a lease of 10 s and no waiting.
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

    /// A plan that follows the request: its name is the key, and its mode, ttl and wait are kept. A request for
    /// permits also needs [`Plan::with_permits`].
    pub fn of(request: &Request) -> Plan {
        Plan {
            mode: request.mode,
            ttl: request.ttl.unwrap_or(Plan::TTL),
            wait: request.wait.unwrap_or(0),
            ..Plan::exclusive(request.name.clone())
        }
    }

    /// Locks this key only.
    pub fn with_key(self, key: impl Into<String>) -> Plan {
        Plan { keys: vec![key.into()], ..self }
    }

    /// Locks all of these keys together, or none.
    pub fn with_keys<K: Into<String>>(self, keys: impl IntoIterator<Item = K>) -> Plan {
        Plan { keys: keys.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets the mode.
    pub fn with_mode(self, mode: Mode) -> Plan {
        Plan { mode, ..self }
    }

    /// Sets the total number of permits, for a request that asks for permits. Plans with other modes stay unchanged.
    ///
    /// # Errors
    /// If the request asks for no permits, or for more than the total.
    pub fn with_permits(self, limit: u32) -> Result<Plan, Refusal> {
        let Mode::Permits(Permits { count, .. }) = self.mode else { return Ok(self) };
        if count == 0 || count > limit {
            return Err(Refusal::new(format!("asks for {count} permits, and the key has {limit}")));
        }
        Ok(self.with_mode(Mode::Permits(Permits { count, limit })))
    }

    /// Sets the ttl of the lease, in milliseconds.
    pub fn with_ttl(self, ttl: u32) -> Plan {
        Plan { ttl, ..self }
    }

    /// Sets the longest wait in milliseconds; 0 makes a single attempt.
    pub fn with_wait(self, wait: u32) -> Plan {
        Plan { wait, ..self }
    }

    /// Sets the rank: lower ranks go first.
    pub fn with_rank(self, rank: i32) -> Plan {
        Plan { rank, ..self }
    }

    /// Sets the group and its weight, for `fairness`.
    pub fn with_group(self, group: impl Into<String>, weight: u32) -> Plan {
        Plan { group: group.into(), weight, ..self }
    }

    /// Sets the mode to shared if the guarded request only reads (see [`Request::is_safe`]), so that readers run
    /// concurrently. For other requests the mode stays unchanged.
    pub fn shared_if_safe(self, request: &Request) -> Plan {
        if request.is_safe() { self.with_mode(Mode::Shared) } else { self }
    }

    /// Does the work once per key: the first request does it, and requests that come meanwhile or later get its
    /// outcome.
    pub fn once_by(self, key: impl Into<String>) -> Plan {
        self.with_key(key).with_mode(Mode::Exclusive).with_primitive(Primitive::Once)
    }

    /// Sets how long the outcome of a `once` is kept, in milliseconds; 0 stands for the proxy's default.
    pub fn with_keep(self, keep: u32) -> Plan {
        Plan { lock_at_least: keep, ..self }
    }

    /// Sets the primitive.
    pub fn with_primitive(self, primitive: Primitive) -> Plan {
        Plan { primitive, ..self }
    }

    /// Sets the primitive to use if the server does not support the first choice: Galera has no GET_LOCK, and a
    /// quorum needs configured stores. Without a second choice, such a request is refused.
    pub fn with_second_primitive(self, primitive: Primitive) -> Plan {
        self.with_label("lockkeeper.second-primitive", primitive.name())
    }

    /// Locks any one free key instead of all keys. For the primitives `lease` and `row`.
    pub fn any_of_keys(self) -> Plan {
        self.with_label("lockkeeper.keys", "any")
    }

    /// Orders waiters by arrival across all proxies, in the global queue, and not only on each proxy. For the
    /// primitive `lease`. `fairness` is then not called; lower ranks still go first.
    pub fn in_global_order(self) -> Plan {
        self.with_label("lockkeeper.order", "global")
    }

    /// Lets a proxy grant the key from its memory. For the primitive `lease`. It has no effect on a plan for several keys, for
    /// any one of several keys, or in global order, and on a lease of more than 250 s. If the proxy is killed, these leases
    /// are lost.
    pub fn delegated(self, when: Delegate) -> Plan {
        self.with_label("lockkeeper.delegate", when.name())
    }

    /// Sets what happens to a guarded request whose lease is lost.
    pub fn on_loss(self, what: OnLoss) -> Plan {
        self.with_label("lockkeeper.on-loss", what.name())
    }

    /// Adds a label to the plan.
    pub fn with_label(mut self, name: impl Into<String>, value: impl Into<String>) -> Plan {
        self.labels.push(Label { name: name.into(), value: value.into() });
        self
    }
}

impl Primitive {
    /// The name, as in config.toml and in answers.
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
    /// The name, as in config.toml and in labels.
    pub fn name(self) -> &'static str {
        match self {
            OnLoss::Finish => "finish",
            OnLoss::Mark => "mark",
            OnLoss::Cut => "cut",
        }
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
    fn a_once_plan_keeps_the_times_of_its_request() {
        let request = Request::http("POST /pay").with_mode(Mode::Shared).with_ttl(500).with_wait(600);
        let plan = Plan::of(&request).once_by("pay/7").with_keep(5_000);
        assert_eq!(
            (plan.primitive, plan.mode, plan.keys),
            (Primitive::Once, Mode::Exclusive, vec!["pay/7".into()])
        );
        assert_eq!((plan.ttl, plan.wait, plan.lock_at_least), (500, 600, 5_000));
    }
}
