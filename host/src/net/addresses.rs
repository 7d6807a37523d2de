//! The addresses of clients, and a count for each address: of its open connections, or of the answers that it has not read.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use crate::mutex::Mutex;

/// What counts as one address where clients are limited by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// An IPv4 address, or the first 64 bits of an IPv6 address, because one client can use all addresses that begin with
    /// them.
    Network(IpAddr),
    /// The user id of a process that has connected to a Unix socket.
    User(u32),
}

impl Origin {
    pub(super) fn of_ip(ip: IpAddr) -> Origin {
        Origin::Network(match ip.to_canonical() {
            IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
            ip => ip,
        })
    }
}

/// Counts something for each address, such as its open connections. It knows the addresses that have one, and no others.
#[derive(Debug)]
pub struct Addresses {
    /// The most that an address may have.
    max: usize,
    open: Mutex<HashMap<Origin, usize>>,
}

/// One that counts at its address until this is dropped.
#[derive(Debug)]
pub struct Place {
    addresses: Arc<Addresses>,
    origin: Origin,
}

impl Addresses {
    /// Allows each address so many.
    pub fn new(max: usize) -> Addresses {
        Addresses { max, open: Mutex::default() }
    }

    /// Counts one more. `None` if the address has as many as it may have.
    pub fn take(self: &Arc<Addresses>, origin: Origin) -> Option<Place> {
        let mut open = self.open.lock();
        let count = open.entry(origin).or_default();
        if *count >= self.max {
            return None;
        }
        *count += 1;
        Some(Place { addresses: self.clone(), origin })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock();
        if let Some(count) = open.get_mut(&self.origin) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.origin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Origin {
        Origin::of_ip(text.parse().unwrap())
    }

    #[test]
    fn an_ipv6_client_has_one_address_whatever_its_last_64_bits() {
        assert_eq!(origin("2001:db8:1:2:3:4:5:6"), origin("2001:db8:1:2::1"));
        assert_ne!(origin("2001:db8:1:2::1"), origin("2001:db8:1:3::1"));
        assert_eq!(origin("::ffff:10.0.0.1"), origin("10.0.0.1"));
        assert_ne!(origin("10.0.0.1"), origin("10.0.0.2"));
    }

    #[test]
    fn addresses_without_a_connection_are_forgotten() {
        let addresses = Arc::new(Addresses::new(2));
        let take = |text: &str| addresses.take(origin(text));
        let places = [take("10.0.0.1").unwrap(), take("10.0.0.1").unwrap()];
        assert!(take("10.0.0.1").is_none());
        drop(take("10.0.0.2").unwrap());
        let [first, _second] = places;
        drop(first);
        assert!(take("10.0.0.1").is_some());
        assert_eq!(addresses.open.lock().len(), 1);
    }
}
