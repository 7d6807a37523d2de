//! `[api]`, `[admin]` and `[health]`: the listeners of the two APIs, and of health alone.

use std::net::SocketAddr;

use super::auth::AuthConfig;
use super::listen::ListenAddress;
use super::reader::Section;
use super::tls::TlsFiles;

/// The listeners of the two APIs.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// The API that applications use.
    pub api: ApiListener,
    /// The admin API: health, metrics, and the operators' requests.
    pub admin: ApiListener,
    /// Health and metrics alone, for which nobody is asked for credentials; `None`: there is no such listener.
    pub health: Option<ListenAddress>,
}

/// The listener of an API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiListener {
    /// The address that the listener binds.
    pub listen: ListenAddress,
    /// The certificates. `None`: the listener speaks plain HTTP.
    pub tls: Option<TlsFiles>,
}

impl ListenerConfig {
    /// Reads `[api]`, `[admin]` and `[health]`.
    pub(super) fn read(top: &Section<'_>, auth: &AuthConfig) -> ListenerConfig {
        let (api, admin, health) = (top.section("api"), top.section("admin"), top.section("health"));
        let listen = health.parsed("listen", None, |text, place| match text {
            "" => Ok(None),
            text => ListenAddress::parse(text, place).map(Some),
        });
        let mode = ListenAddress::mode(&health);
        health.finish();
        let config = ListenerConfig {
            api: ApiListener::read(&api, 7070, auth),
            admin: ApiListener::read(&admin, 7071, auth),
            health: listen.map(|listen| listen.with_mode(mode)),
        };
        if config.admin.listen.is_taken_by(&config.api.listen) {
            admin.complain("listen", format!("is {}, which is api.listen, too", config.admin.listen));
        }
        if let Some(own) = &config.health
            && [&config.api, &config.admin].iter().any(|api| own.is_taken_by(&api.listen))
        {
            health.complain("listen", format!("is {own}, which another listener has"));
        }
        config
    }

    /// The addresses of all listeners.
    pub(super) fn addresses(&self) -> impl Iterator<Item = &ListenAddress> {
        [&self.api.listen, &self.admin.listen].into_iter().chain(&self.health)
    }
}

impl ApiListener {
    fn read(section: &Section<'_>, port: u16, auth: &AuthConfig) -> ApiListener {
        let default = ListenAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], port)));
        let listen = section.parsed("listen", default, ListenAddress::parse);
        let listen = listen.with_mode(ListenAddress::mode(section));
        let tls = TlsFiles::read(section, Some(&listen), true);
        let allow_plaintext = section.boolean("allow_plaintext", false);
        section.finish();
        // Whoever listens to the network must have said that strangers and eavesdroppers are meant.
        if !listen.is_of_this_machine() {
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
