//! `tls`: the certificates of a listener.

use std::path::PathBuf;

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
    /// Reads `tls` of a listener; `None` if there is none, or if it has faults.
    pub(super) fn read(listener: &Section<'_>) -> Option<TlsFiles> {
        TlsFiles::section(listener).and_then(|section| {
            let files = TlsFiles::server(&section, None, None);
            section.finish();
            files
        })
    }

    /// As [`TlsFiles::read`], for a listener whose clients may have certificates.
    pub(super) fn read_with_clients(listener: &Section<'_>) -> Option<TlsFiles> {
        TlsFiles::section(listener).and_then(|section| {
            let path = |key| section.parsed(key, None, |text, place| file(text, place).map(Some));
            let (client_ca, crl) = (path("client_ca"), path("crl"));
            if crl.is_some() && !section.holds("client_ca") {
                section
                    .complain("crl", "needs client_ca: without it, clients are not asked for certificates");
            }
            let files = TlsFiles::server(&section, client_ca, crl);
            section.finish();
            files
        })
    }

    fn section<'a>(listener: &Section<'a>) -> Option<Section<'a>> {
        listener.know("tls");
        listener.holds("tls").then(|| listener.section("tls"))
    }

    fn server(section: &Section<'_>, client_ca: Option<PathBuf>, crl: Option<PathBuf>) -> Option<TlsFiles> {
        let (cert, key) = (section.required("cert", file), section.required("key", file));
        Some(TlsFiles { cert: cert?, key: key?, client_ca, crl })
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca).chain(&self.crl)
    }
}
