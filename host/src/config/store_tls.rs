//! `[store.tls]`: TLS towards the servers of the store, and what a URL says of it.

use std::net::IpAddr;
use std::path::PathBuf;

use mysql_async::Opts;

use super::reader::Section;
use super::values::file;

/// Parameters of a URL for which `[store.tls]` is the only place.
const PARAMETERS: [&str; 4] = ["require_ssl", "verify_ca", "verify_identity", "built_in_roots"];

/// TLS towards the servers of the store. The certificate of a server is always verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreTls {
    /// The authorities that sign the certificates of the servers.
    pub ca: Authorities,
    /// The certificate and the key of the proxy, in two files or twice the same. `None`: it has none.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in the certificates of the servers. `None`: the host of each URL.
    pub server_name: Option<String>,
}

/// Who may sign certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authorities {
    /// The authorities that the system trusts.
    System,
    /// The authorities in a PEM file.
    File(PathBuf),
}

impl StoreTls {
    /// Reads `[store.tls]`; `None` if `ca` is empty.
    pub(super) fn read(section: &Section<'_>) -> Option<StoreTls> {
        let mut is_on = false;
        let ca = section.parsed("ca", None, |text, place| {
            is_on = !text.is_empty();
            match text {
                "" => Ok(None),
                "system" => Ok(Some(Authorities::System)),
                path => file(path, place).map(|path| Some(Authorities::File(path))),
            }
        });
        let path = |key| {
            section.parsed(key, None, |text, place| match text {
                "" => Ok(None),
                path => file(path, place).map(Some),
            })
        };
        let (cert, key) = (path("cert"), path("key"));
        let server_name = section.parsed("server_name", None, |text, _| match text {
            "" => Ok(None),
            name if is_server_name(name) => Ok(Some(name.to_owned())),
            name => Err(format!("is `{name}`; must be a DNS name or an IP address")),
        });
        if key.is_some() && cert.is_none() {
            section.complain("key", "needs cert");
        }
        for (other, is_set) in [("cert", cert.is_some()), ("server_name", server_name.is_some())] {
            if is_set && !is_on {
                let what =
                    "needs ca: the file of the authorities of the servers' certificates, or \"system\"";
                section.complain(other, what);
            }
        }
        section.finish();
        let identity = cert.map(|cert| (cert.clone(), key.unwrap_or(cert)));
        Some(StoreTls { ca: ca?, identity, server_name })
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let ca = match &self.ca {
            Authorities::System => None,
            Authorities::File(path) => Some(path),
        };
        ca.into_iter().chain(self.identity.iter().flat_map(|(cert, key)| [cert, key]))
    }
}

fn is_server_name(name: &str) -> bool {
    tokio_rustls::rustls::pki_types::ServerName::try_from(name).is_ok()
}

/// Refuses parameters of a URL that say how to encrypt.
pub(super) fn check_parameters(url: &str) -> Result<(), String> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let mut names = form_urlencoded::parse(query.as_bytes()).map(|(name, _)| name);
    match names.find(|name| PARAMETERS.contains(&name.as_ref())) {
        Some(name) => Err(format!("has {name}; TLS is set in [store.tls], for all servers")),
        None => Ok(()),
    }
}

/// The server of a URL if other machines can be on the way to it. A Unix socket and a loopback address stay on this
/// machine.
pub(super) fn remote_address(url: &str) -> Option<String> {
    let opts = Opts::from_url(url).ok()?;
    let host = opts.ip_or_hostname();
    let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
    let stays = host == "localhost" || address.is_some_and(|address| address.is_loopback());
    (opts.socket().is_none() && !stays).then(|| format!("{host}:{}", opts.tcp_port()))
}
