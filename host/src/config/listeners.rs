//! `[api]`, `[admin]` and `[health]`: the listeners of the two APIs, and of health alone.

use std::net::SocketAddr;

use super::auth::AuthConfig;
use super::reader::Section;
use super::tls::TlsFiles;
use super::values::address;

/// The listeners of the two APIs.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// The API that applications use.
    pub api: ApiListener,
    /// The admin API: health, metrics, and the operators' requests.
    pub admin: ApiListener,
    /// Health and metrics alone, for which nobody is asked for credentials; `None`: there is no such listener.
    pub health: Option<SocketAddr>,
}

/// The listener of an API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiListener {
    /// The address that the listener binds.
    pub listen: SocketAddr,
    /// The certificates. `None`: the listener speaks plain HTTP.
    pub tls: Option<TlsFiles>,
}

impl ListenerConfig {
    /// Reads `[api]`, `[admin]` and `[health]`.
    pub(super) fn read(top: &Section<'_>, auth: &AuthConfig) -> ListenerConfig {
        let (api, admin, health) = (top.section("api"), top.section("admin"), top.section("health"));
        let config = ListenerConfig {
            api: ApiListener::read(&api, 7070, auth),
            admin: ApiListener::read(&admin, 7071, auth),
            health: health.parsed("listen", None, |text, place| match text {
                "" => Ok(None),
                text => address(text, place).map(Some),
            }),
        };
        health.finish();
        if config.api.listen == config.admin.listen && config.api.listen.port() != 0 {
            admin.complain("listen", format!("is {}, which is api.listen, too", config.admin.listen));
        }
        if let Some(own) = config.health.filter(|own| own.port() != 0)
            && [config.api.listen, config.admin.listen].contains(&own)
        {
            health.complain("listen", format!("is {own}, which another listener has"));
        }
        config
    }
}

impl ApiListener {
    fn read(section: &Section<'_>, port: u16, auth: &AuthConfig) -> ApiListener {
        let listen = section.parsed("listen", SocketAddr::from(([127, 0, 0, 1], port)), address);
        let tls = TlsFiles::read_with_clients(section);
        let allow_plaintext = section.boolean("allow_plaintext", false);
        section.finish();
        // Whoever listens to the network must have said that strangers and eavesdroppers are meant.
        if !listen.ip().is_loopback() {
            if auth.file.is_none() && !auth.allow_anonymous {
                let what = format!(
                    "is {listen}, so other machines can reach it, and nobody is asked for credentials; set auth.file, or \
                     auth.allow_anonymous = true if every client may do everything"
                );
                section.complain("listen", what);
            }
            if auth.file.is_some() && !section.holds("tls") && !allow_plaintext {
                let what = format!(
                    "is {listen}, so other machines can reach it, and tokens would travel unencrypted; set tls, or \
                     allow_plaintext = true if something else encrypts the connections"
                );
                section.complain("listen", what);
            }
        }
        ApiListener { listen, tls }
    }
}
