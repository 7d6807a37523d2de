//! `tls`: the certificates of a listener.

use std::path::PathBuf;

use super::listen::ListenAddress;
use super::reader::Section;
use super::values::file;

/// The paths of PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// The certificates of the authorities that sign the certificates of clients. `None`: clients are not asked for
    /// certificates.
    pub client_ca: Option<PathBuf>,
    /// The revocation lists of these authorities.
    pub crl: Option<PathBuf>,
}

impl TlsFiles {
    /// Reads `tls` of a listener at `listen`; `None` if there is none, or if it has faults. `with_clients`: clients may
    /// have certificates.
    pub(super) fn read(
        listener: &Section<'_>,
        listen: Option<&ListenAddress>,
        with_clients: bool,
    ) -> Option<TlsFiles> {
        listener.know("tls");
        if !listener.holds("tls") {
            return None;
        }
        if let Some(ListenAddress::Unix { .. }) = listen {
            listener.complain("tls", "has no use here: no other machine can reach a Unix socket");
        }
        let section = listener.section("tls");
        let path = |key| match with_clients {
            true => section.parsed(key, None, |text, place| file(text, place).map(Some)),
            false => None,
        };
        let (client_ca, crl) = (path("client_ca"), path("crl"));
        if crl.is_some() && !section.holds("client_ca") {
            section.complain("crl", "needs client_ca: without it, clients are not asked for certificates");
        }
        let (cert, key) = (section.required("cert", file), section.required("key", file));
        section.finish();
        Some(TlsFiles { cert: cert?, key: key?, client_ca, crl })
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca).chain(&self.crl)
    }
}
