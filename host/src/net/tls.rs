//! TLS: the proxy's certificate and key, and the handshake.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, ServerConfig};
use tracing::debug;

use super::Stream;

/// Why a certificate and a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is not valid PEM.
    #[error("{}: this is not PEM: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The error of the PEM parser.
        source: pem::Error,
    },
    /// The file contains no certificate.
    #[error("{}: there is no certificate in it", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// The certificate chain is refused.
    #[error("{}: the certificate cannot be used: {source}", path.display())]
    Certificate {
        /// The file of the certificate chain.
        path: PathBuf,
        /// The error of the TLS library.
        source: Error,
    },
    /// The file contains no unencrypted private key.
    #[error("{}: there is no private key in it, or it is encrypted", path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// The private key is refused.
    #[error("{}: the private key cannot be used: {source}", path.display())]
    Key {
        /// The file of the private key.
        path: PathBuf,
        /// The error of the TLS library.
        source: Error,
    },
    /// The private key does not belong to the certificate.
    #[error("{}: the key is not that of the certificate in {}", key.display(), cert.display())]
    Mismatch {
        /// The file of the private key.
        key: PathBuf,
        /// The file of the certificate chain.
        cert: PathBuf,
    },
}

/// TLS 1.2 and 1.3 with a certificate chain from one PEM file and its key from another (or the same).
///
/// The files are read once: the result does not follow later changes of the files.
pub fn tls_config(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(cert)?;
    let private = private_key(key)?;
    let provider = Arc::new(ring::default_provider());
    // The key is also loaded here, to tell an invalid key from an invalid certificate.
    provider
        .key_provider
        .load_private_key(private.clone_key())
        .map_err(|source| TlsError::Key { path: key.into(), source })?;
    let refused = |source| match source {
        Error::InconsistentKeys(_) => TlsError::Mismatch { key: key.into(), cert: cert.into() },
        source => TlsError::Certificate { path: cert.into(), source },
    };
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(refused)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(refused)?;
    Ok(Arc::new(config))
}

/// The configuration for a protocol with these names in the handshake.
pub fn for_protocol(mut config: Arc<ServerConfig>, alpn: &[&[u8]]) -> Arc<ServerConfig> {
    Arc::make_mut(&mut config).alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

/// Performs the handshake until `deadline`. If it fails, TLS itself alerts the client.
pub async fn handshake(stream: TcpStream, config: Arc<ServerConfig>, deadline: Instant) -> Option<Stream> {
    match timeout_at(deadline, TlsAcceptor::from(config).accept(stream)).await.ok()? {
        Ok(stream) => Some(Stream::Tls(Box::new(stream))),
        Err(error) => {
            debug!(%error, "a TLS handshake failed");
            None
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let chain = chain.map_err(|source| TlsError::Pem { path: path.into(), source })?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: path.into() });
    }
    Ok(chain)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsError::NoKey { path: path.into() },
        source => TlsError::Pem { path: path.into(), source },
    })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    fn refused(cert: &str, key: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        fs::write(&cert_file, cert).unwrap();
        fs::write(&key_file, key).unwrap();
        let error = tls_config(&cert_file, &key_file).expect_err("it is refused").to_string();
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
        let error = tls_config(Path::new("/nowhere/cert.pem"), Path::new("/nowhere/key.pem")).unwrap_err();
        assert!(error.to_string().starts_with("/nowhere/cert.pem: No such file"), "{error}");
    }
}
