use crate::{Label, Mode, Permits, Plan, Primitive, Refusal, Request};

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

    pub fn with_primitive(self, primitive: Primitive) -> Plan {
        Plan { primitive, ..self }
    }

    /// What to take where the server lacks the first choice: Galera has no GET_LOCK, and a quorum needs
    /// stores. Without one such a request is refused.
    pub fn with_second_primitive(self, primitive: Primitive) -> Plan {
        self.with_label("lockkeeper.second-primitive", primitive.name())
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
}
