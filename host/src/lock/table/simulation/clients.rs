//! The clients of the simulation.

use std::num::NonZero;

use super::*;

impl Sim {
    pub(in crate::lock::table) fn client(&mut self) {
        let proxy = self.random.below(PROXIES as u64) as usize;
        match self.random.below(100) {
            0..45 => self.acquire(proxy),
            45..75 => self.release(proxy),
            75..83 => self.cancel(),
            83..92 => self.renew(proxy),
            92..96 => {
                let event = Event::Wake(key(self.random.below(KEYS as u64)));
                self.tell(proxy, event);
            }
            96..98 => self.replan(),
            98 => self.commit(proxy),
            _ => self.fault_until = self.now.plus_ms(20),
        }
    }

    pub(in crate::lock::table) fn acquire(&mut self, proxy: usize) {
        let is_repeated = !self.asked.is_empty() && self.random.chance(10);
        let (claim, rank, ticket) = match is_repeated {
            true => self.asked[self.random.below(self.asked.len() as u64) as usize].clone(),
            false => (self.claim(), self.random.below(2) as i32, self.serial),
        };
        if claim.request.is_some() && !is_repeated {
            self.asked.push((claim.clone(), rank, ticket));
        }
        let repeats = if claim.request.is_some() && self.random.chance(30) { 2 } else { 1 };
        for n in 0..repeats {
            let wait_ms = match self.random.below(10) {
                0..3 => 0,
                // Longer than anything blocks the waiter.
                3 => 2 * STUCK_MS + self.random.below(5_000) as u32,
                _ => self.random.below(300) as u32,
            };
            let mut waiter = self.waiter((proxy + n) % PROXIES, claim.clone(), wait_ms);
            waiter.rank = rank;
            if let Some(own) = &mut waiter.claim.global {
                (own.number, own.rank, own.returns) = (ticket, rank, waiter.claim.request.is_some());
            }
            self.enqueue((proxy + n) % PROXIES, waiter);
        }
    }

    pub(in crate::lock::table) fn waiter(&mut self, proxy: usize, mut claim: Claim, wait_ms: u32) -> Waiter {
        self.serial += 1;
        claim.attempt = self.serial * 1_000 + 7;
        (claim.proxy, claim.waits) = (proxy.to_string().into(), wait_ms > 0);
        Waiter {
            id: WaiterId(self.serial),
            rank: 0,
            group: format!("g{}", self.random.below(3)).into(),
            wait_ms,
            max_waiters: if self.random.chance(10) { 2 } else { 100 },
            asks_choice: self.random.chance(30),
            asks_backoff: self.random.chance(30),
            seed: self.random.next() as u32,
            claim,
            charge: Charge { request: Some(self.charged[0].clone()), lease: Some(self.charged[1].clone()) },
        }
    }

    pub(in crate::lock::table) fn enqueue(&mut self, proxy: usize, waiter: Waiter) {
        let (asked, deadline) = (self.now, self.now.plus_ms(waiter.wait_ms));
        self.open.insert((proxy, waiter.id), Open { asked, deadline, claim: waiter.claim.clone() });
        self.tell(proxy, Event::Enqueue(Box::new(waiter)));
    }

    pub(in crate::lock::table) fn claim(&mut self) -> Claim {
        let mut keys = vec![key(self.random.below(KEYS as u64))];
        if self.random.chance(self.several_percent) {
            keys.push(key(self.random.below(KEYS as u64)));
        }
        keys.sort_unstable();
        keys.dedup();
        let mode = match self.random.below(10) {
            0..6 => Mode::Exclusive,
            6..8 => Mode::Shared,
            _ => Mode::Permits { count: 1 + self.random.below(2) as u32, limit: 3 },
        };
        let any = keys.len() > 1 && self.random.chance(40);
        let is_once = keys.len() == 1 && mode == Mode::Exclusive && self.random.chance(10);
        self.serial += 1;
        Claim {
            keys: keys.into(),
            proxy: "".into(),
            waits: false,
            attempt: 0,
            owner: format!("o{}", self.random.below(OWNERS)).into(),
            request: self.random.chance(self.with_id_percent).then(|| format!("r{}", self.serial).into()),
            fingerprint: 1,
            mode,
            ttl_ms: if self.random.chance(70) { 20 + self.random.below(200) as u32 } else { 2_000 },
            at_least_ms: if self.random.chance(5) { 15 } else { 0 },
            delay_ms: if self.random.chance(5) { 15 } else { 0 },
            reentrant: !is_once && self.random.chance(20),
            keep_ms: is_once.then(|| NonZero::new(1 + self.random.below(100) as u32)).flatten(),
            any,
            global: (!any && self.random.chance(40)).then_some(GlobalTicket {
                number: 0,
                rank: 0,
                joined: None,
                returns: false,
            }),
            delegable: None,
            tag: Tag::default(),
        }
    }

    pub(in crate::lock::table) fn some_belief(&mut self) -> Option<u64> {
        let mut nonces: Vec<u64> = self.beliefs.keys().copied().collect();
        nonces.sort_unstable();
        (!nonces.is_empty()).then(|| nonces[self.random.below(nonces.len() as u64) as usize])
    }

    pub(in crate::lock::table) fn release(&mut self, proxy: usize) {
        if let Some(nonce) = self.some_belief() {
            self.give_back(proxy, nonce);
        }
    }

    /// A client stops counting on a lease before it releases it.
    pub(in crate::lock::table) fn give_back(&mut self, proxy: usize, nonce: u64) {
        let Some(belief) = self.beliefs.get_mut(&nonce) else { return };
        let lease = belief.lease.clone();
        let outcome = (belief.is_once && self.random.chance(60)).then(|| "1".into());
        belief.levels -= 1;
        if belief.levels == 0 {
            self.beliefs.remove(&nonce);
            self.given_up.insert(nonce);
        }
        self.serial += 1;
        let id = ReleaseId(self.serial);
        self.open_releases.insert((proxy, id), (nonce, self.serial));
        self.tell(proxy, Event::Release { id, release: Release { lease, attempt: self.serial, outcome } });
    }

    pub(in crate::lock::table) fn cancel(&mut self) {
        let mut ids: Vec<_> = self.open.keys().copied().collect();
        ids.sort_unstable();
        if ids.is_empty() {
            return;
        }
        let (proxy, id) = ids[self.random.below(ids.len() as u64) as usize];
        self.open.remove(&(proxy, id));
        self.tell(proxy, Event::Cancel(id));
    }

    pub(in crate::lock::table) fn renew(&mut self, proxy: usize) {
        let Some(nonce) = self.some_belief() else { return };
        let lease = self.beliefs[&nonce].lease.clone();
        let outcome = self.on_store(vec![Op::Renew { lease, ttl_ms: None }]).remove(0);
        match outcome {
            Outcome::Renewed { left_us } => {
                let until = self.now.plus_us(left_us);
                if let Some(belief) = self.beliefs.get_mut(&nonce) {
                    belief.until = belief.until.max(until);
                }
                self.tell(proxy, Event::Renewed { nonce, until });
            }
            _ => {
                self.beliefs.remove(&nonce);
                self.tell(proxy, Event::Lost { nonce });
            }
        }
    }

    /// A policy swap: from now on every waiter for one of two keys waits for both.
    pub(in crate::lock::table) fn replan(&mut self) {
        let pair = [key(self.random.below(KEYS as u64)), key(self.random.below(KEYS as u64))];
        let mut ids: Vec<_> = self.open.keys().copied().collect();
        ids.sort_unstable();
        for (proxy, waiter) in ids {
            // An earlier replan may have made room for it.
            let Some(Open { claim, .. }) = self.open.get_mut(&(proxy, waiter)) else { continue };
            let concerned = claim.keys.iter().any(|key| pair.contains(key));
            if !concerned || claim.request.is_some() || claim.reentrant || claim.keep_ms.is_some() {
                continue;
            }
            let mut keys = claim.keys.to_vec();
            keys.extend(pair.iter().cloned());
            keys.sort_unstable();
            keys.dedup();
            self.serial += 1;
            (claim.keys, claim.attempt) = (keys.into(), self.serial * 1_000 + 7);
            let claim = Box::new(claim.clone());
            self.tell(proxy, Event::Replan { waiter, claim });
        }
    }
}
