//! The open connections of each client address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use crate::mutex::Mutex;

/// What counts as one address: an IPv4 address, or the first 64 bits of an IPv6 address, because one client can use all
/// addresses that begin with them.
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// Counts the open connections of each address. It knows the addresses that have one, and no others.
#[derive(Debug)]
pub(super) struct Addresses {
    /// The most connections of an address.
    max: usize,
    open: Mutex<HashMap<IpAddr, usize>>,
}

/// A connection that counts at its address until this is dropped.
#[derive(Debug)]
pub struct Place {
    addresses: Arc<Addresses>,
    network: IpAddr,
}

impl Addresses {
    pub fn new(max: usize) -> Addresses {
        Addresses { max, open: Mutex::default() }
    }

    /// Counts a connection. `None` if the address has as many as it may have.
    pub fn take(self: &Arc<Addresses>, address: IpAddr) -> Option<Place> {
        let network = network_of(address);
        let mut open = self.open.lock();
        let count = open.entry(network).or_default();
        if *count >= self.max {
            return None;
        }
        *count += 1;
        Some(Place { addresses: self.clone(), network })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock();
        if let Some(count) = open.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_client_has_one_address_whatever_its_last_64_bits() {
        let network = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(network("2001:db8:1:2:3:4:5:6"), network("2001:db8:1:2::1"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }

    #[test]
    fn addresses_without_a_connection_are_forgotten() {
        let addresses = Arc::new(Addresses::new(2));
        let take = |text: &str| addresses.take(text.parse().unwrap());
        let places = [take("10.0.0.1").unwrap(), take("10.0.0.1").unwrap()];
        assert!(take("10.0.0.1").is_none());
        drop(take("10.0.0.2").unwrap());
        let [first, _second] = places;
        drop(first);
        assert!(take("10.0.0.1").is_some());
        assert_eq!(addresses.open.lock().len(), 1);
    }
}
