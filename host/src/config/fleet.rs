//! `[fleet]`: how the proxies of one store find each other.

use std::net::SocketAddr;
use std::time::Duration;

use super::reader::{Section, defaults};
use super::values::address;

/// How the proxies of one store find each other.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// The address at which other proxies notify this proxy of its waiters' turns.
    pub listen: SocketAddr,
    /// The address at which other proxies reach `listen`, if it differs.
    pub advertise: Option<SocketAddr>,
    /// The interval of this proxy's heartbeats in the store.
    pub beat: Duration,
}

impl FleetConfig {
    /// Reads `[fleet]`.
    pub(super) fn read(section: &Section<'_>) -> FleetConfig {
        let config = FleetConfig {
            listen: section.parsed("listen", SocketAddr::from(([127, 0, 0, 1], 0)), address),
            advertise: section.parsed("advertise", None, |text, place| match text {
                "" => Ok(None),
                text => address(text, place).map(Some),
            }),
            beat: section.milliseconds("beat_ms", 250..=4_000, 1_000),
        };
        let unreachable = |at: SocketAddr| at.ip().is_unspecified() || at.port() == 0;
        if config.listen.ip().is_unspecified() && config.advertise.is_none() {
            let what = "is every address of this machine: say with `advertise` which one others use";
            section.complain("listen", what);
        }
        if config.advertise.is_some_and(unreachable) {
            section.complain("advertise", "must be an address and a port that other proxies can connect to");
        }
        section.finish();
        config
    }
}

impl Default for FleetConfig {
    fn default() -> FleetConfig {
        defaults(FleetConfig::read)
    }
}
