//! TLS: the proxy's certificate and key, the certificates of clients, and the handshake.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoClientAuth, NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{Error, ServerConfig, ServerConnection};
use tracing::debug;
use webpki::EndEntityCert;

use super::Stream;
use crate::config::TlsFiles;
use crate::latest;
use crate::pem::{self, PemFile, TlsError};

/// How often the certificates of connected clients are verified again, because a certificate may end.
const VERIFIED_EVERY: Duration = Duration::from_secs(60);

/// TLS of a listener: 1.2 and 1.3. Its files may be replaced while it is in use.
pub struct Tls {
    files: TlsFiles,
    /// The names of the protocols in the handshake (ALPN), the preferred name first.
    alpn: &'static [&'static [u8]],
    current: latest::Sender<Current>,
}

/// What the files say.
#[derive(Clone)]
struct Current {
    config: Arc<ServerConfig>,
    /// Verifies the certificates of clients.
    clients: Arc<dyn ClientCertVerifier>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn load(files: &TlsFiles, alpn: &'static [&'static [u8]]) -> Result<Arc<Tls>, TlsError> {
        let current = latest::Sender::new(Current::read(files, alpn)?);
        Ok(Arc::new(Tls { files: files.clone(), alpn, current }))
    }

    /// Reads the files again. Open connections keep what they have agreed on, but the certificates of their clients are
    /// verified again ([`Tls::until_refused`]).
    ///
    /// # Errors
    /// [`TlsError`], which names the file. The listener then keeps its certificates.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.send_replace(Current::read(&self.files, self.alpn)?);
        Ok(())
    }

    /// The files.
    pub fn files(&self) -> &TlsFiles {
        &self.files
    }

    /// Performs the handshake until `deadline`. If it fails, TLS itself alerts the client.
    pub(super) async fn handshake(&self, stream: TcpStream, deadline: Instant) -> Option<Stream> {
        let config = Arc::clone(&self.current.borrow().config);
        let accept = TlsAcceptor::from(config).accept(stream);
        match timeout_at(deadline, accept).await.ok()? {
            Ok(stream) => Some(Stream::Tls(Box::new(stream))),
            Err(error) => {
                debug!(%error, "a TLS handshake failed");
                None
            }
        }
    }

    /// Waits until the certificate of a connected client is no longer valid: it has ended, it was revoked, or its
    /// authority was removed. The client's certificate is the first one of `chain`.
    pub(super) async fn until_refused(&self, chain: Vec<CertificateDer<'static>>) {
        let Some((client, others)) = chain.split_first() else { return };
        let mut replaced = self.current.subscribe();
        loop {
            let Current { config, clients } = replaced.borrow_and_update().clone();
            let now = config.time_provider.current_time().ok_or(Error::FailedToGetCurrentTime);
            if let Err(error) = now.and_then(|now| clients.verify_client_cert(client, others, now)) {
                debug!(%error, "the certificate of a connected client is no longer valid");
                return;
            }
            // Whether the files have changed or the time has passed, the certificate is verified again.
            let _ = timeout(VERIFIED_EVERY, replaced.changed()).await;
        }
    }
}

impl Current {
    fn read(files: &TlsFiles, alpn: &[&[u8]]) -> Result<Current, TlsError> {
        let (cert, key) = (PemFile::read(&files.cert)?, PemFile::read(&files.key)?);
        let provider = Arc::new(ring::default_provider());
        let (chain, private) = pem::identity(&cert, &key, &provider)?;
        let refused = |source| TlsError::Certificate { path: files.cert.clone(), source };
        let clients = match &files.client_ca {
            None => Arc::new(NoClientAuth),
            Some(authorities) => client_verifier(authorities, files.crl.as_deref(), &provider)?,
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(refused)?
            .with_client_cert_verifier(Arc::clone(&clients))
            .with_single_cert(chain, private)
            .map_err(refused)?;
        if files.client_ca.is_some() {
            // A resumed session would skip the verification of the client's certificate.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(Current { config: Arc::new(config), clients })
    }
}

/// Verifies the certificates of clients. A client without a certificate is accepted: it may have a token.
fn client_verifier(
    authorities: &Path,
    revoked: Option<&Path>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let roots = PemFile::read(authorities)?.authorities()?;
    let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .allow_unauthenticated();
    if let Some(path) = revoked {
        verifier = verifier.with_crls(PemFile::read(path)?.revocation_lists()?);
    }
    verifier
        .build()
        .map_err(|source| TlsError::ClientVerifier { path: authorities.into(), why: source.to_string() })
}

/// The certificate of the client, which was verified in the handshake, and then those between it and its authority. Empty
/// if the client has none.
pub(super) fn client_chain(connection: &ServerConnection) -> Vec<CertificateDer<'static>> {
    let chain = connection.peer_certificates().unwrap_or_default();
    chain.iter().map(|certificate| certificate.clone().into_owned()).collect()
}

/// The URIs and DNS names of the client's certificate, the first one of `chain`.
pub(super) fn client_names(chain: &[CertificateDer<'_>]) -> Vec<String> {
    let Some(certificate) = chain.first().and_then(|first| EndEntityCert::try_from(first).ok()) else {
        return Vec::new();
    };
    certificate.valid_uri_names().chain(certificate.valid_dns_names()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    fn files(cert: &Path, key: &Path) -> TlsFiles {
        TlsFiles { cert: cert.into(), key: key.into(), client_ca: None, crl: None }
    }

    fn refused(cert: &str, key: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        fs::write(&cert_file, cert).unwrap();
        fs::write(&key_file, key).unwrap();
        let error = Tls::load(&files(&cert_file, &key_file), &[]).err().expect("it is refused").to_string();
        error.replace(&format!("{}/", folder.path().display()), "")
    }

    #[test]
    fn a_certificate_or_key_fault_names_its_file() {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".into()]).unwrap();
        let other = generate_simple_self_signed(["localhost".into()]).unwrap();
        let (cert, key) = (cert.pem(), signing_key.serialize_pem());
        assert_eq!(refused("", &key), "cert.pem: there is no certificate in it");
        assert_eq!(refused(&key, &key), "cert.pem: there is no certificate in it");
        assert_eq!(refused(&cert, &cert), "key.pem: there is no private key in it, or it is encrypted");
        let mismatch = refused(&cert, &other.signing_key.serialize_pem());
        assert_eq!(mismatch, "key.pem: the key is not that of the certificate in cert.pem");
        let cut = &cert[..cert.len() / 2];
        assert!(refused(cut, &key).starts_with("cert.pem: this is not PEM: "), "{}", refused(cut, &key));
        let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(refused(nonsense, &key).starts_with("cert.pem: the certificate cannot be used: "));
        let nonsense = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert!(refused(&cert, nonsense).starts_with("key.pem: the private key cannot be used: "));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Tls::load(&files(Path::new("/nowhere/cert.pem"), Path::new("/nowhere/key.pem")), &[])
            .err()
            .unwrap();
        assert!(error.to_string().starts_with("/nowhere/cert.pem: No such file"), "{error}");
    }
}
