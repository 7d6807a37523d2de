//! `trust_forwarded`: the clients whose `X-Forwarded-…` and `Forwarded` headers are kept.

use std::collections::BTreeSet;
use std::fmt::{self, Debug as _};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::config::reader::Section;

/// The clients whose `X-Forwarded-…` and `Forwarded` headers are kept, because they are proxies themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrustForwarded {
    /// All clients, or none.
    All(bool),
    /// The clients with an address in one of these networks. Clients of a Unix socket have no address.
    Networks(Vec<IpNet>),
}

impl TrustForwarded {
    /// Reads the setting.
    pub(super) fn read(section: &Section<'_>) -> TrustForwarded {
        const KEY: &str = "trust_forwarded";
        if section.is_boolean(KEY) || !section.holds(KEY) {
            return TrustForwarded::All(section.boolean(KEY, false));
        }
        let networks = section.texts(KEY, |texts| texts.iter().map(|text| network(text)).collect());
        networks.map_or(TrustForwarded::All(false), TrustForwarded::Networks)
    }

    /// Whether the headers of this client are kept. `None`: a client of a Unix socket.
    pub fn includes(&self, client: Option<IpAddr>) -> bool {
        match self {
            TrustForwarded::All(all) => *all,
            TrustForwarded::Networks(networks) => client
                .map(|client| client.to_canonical())
                .is_some_and(|client| networks.iter().any(|network| network.contains(&client))),
        }
    }

    /// Whether the headers of any client are kept.
    pub fn is_used(&self) -> bool {
        *self != TrustForwarded::All(false)
    }
}

impl fmt::Display for TrustForwarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrustForwarded::All(all) => write!(f, "{all}"),
            TrustForwarded::Networks(networks) => {
                networks.iter().map(IpNet::trunc).collect::<BTreeSet<_>>().fmt(f)
            }
        }
    }
}

/// Reads a network, such as `10.0.0.0/8`, or an address.
fn network(text: &str) -> Result<IpNet, String> {
    let address = || text.parse().ok().map(|address: IpAddr| IpNet::from(address.to_canonical()));
    let network = text.parse().ok().or_else(address);
    network.ok_or_else(|| {
        format!("has `{text}`; must be true, false, or a list of networks such as \"10.0.0.0/8\"")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_a_network_are_trusted_and_no_others() {
        let networks = ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32"].map(|text| network(text).unwrap());
        let trusted = TrustForwarded::Networks(networks.into());
        let includes = |client: &str| trusted.includes(Some(client.parse().unwrap()));
        for client in ["10.255.0.1", "::ffff:10.0.0.1", "192.0.2.7", "2001:db8:1::2"] {
            assert!(includes(client), "{client}");
        }
        for client in ["11.0.0.1", "::ffff:11.0.0.1", "192.0.2.8", "2001:db9::1", "::1"] {
            assert!(!includes(client), "{client}");
        }
        assert!(!trusted.includes(None), "a client of a Unix socket has no address");
        assert!(TrustForwarded::All(true).includes(None));
        for wrong in ["", "10.0.0.0/33", "10.0.0", "proxy.internal"] {
            assert!(network(wrong).is_err(), "{wrong}");
        }
    }
}
