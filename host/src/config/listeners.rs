//! `[api]` and `[admin]`: the addresses of the two APIs.

use std::net::SocketAddr;

use super::reader::Section;
use super::values::address;

/// The listen addresses of the two APIs.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// The API that applications use.
    pub api: SocketAddr,
    /// The admin API: health, metrics, and the operators' requests.
    pub admin: SocketAddr,
}

impl ListenerConfig {
    /// Reads `[api]` and `[admin]`.
    pub(super) fn read(top: &Section<'_>) -> ListenerConfig {
        let (api, admin) = (top.section("api"), top.section("admin"));
        let config = ListenerConfig {
            api: api.parsed("listen", SocketAddr::from(([127, 0, 0, 1], 7070)), address),
            admin: admin.parsed("listen", SocketAddr::from(([127, 0, 0, 1], 7071)), address),
        };
        if config.api == config.admin && config.api.port() != 0 {
            admin.complain("listen", format!("is {}, which is api.listen, too", config.admin));
        }
        api.finish();
        admin.finish();
        config
    }
}
