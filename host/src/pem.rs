//! Certificates and keys in PEM files. Each error names its file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, RootCertStore};

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
    /// The file contains no revocation list.
    #[error("{}: there is no certificate revocation list in it", path.display())]
    NoRevocationList {
        /// The file.
        path: PathBuf,
    },
    /// The certificates of clients cannot be verified.
    #[error("{}: the certificates of clients cannot be verified: {why}", path.display())]
    ClientVerifier {
        /// The file of the authorities.
        path: PathBuf,
        /// The reason of the TLS library.
        why: String,
    },
    /// The private key does not belong to the certificate.
    #[error("{}: the key is not that of the certificate in {}", key.display(), cert.display())]
    Mismatch {
        /// The file of the private key.
        key: PathBuf,
        /// The file of the certificate chain.
        cert: PathBuf,
    },
    /// The system has no certificates of authorities.
    #[error("the system has no certificates of authorities")]
    NoSystemAuthorities,
}

/// A file that was read.
pub struct PemFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// A certificate chain, and the private key of its first certificate.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl PemFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`TlsError::Read`].
    pub fn read(path: &Path) -> Result<PemFile, TlsError> {
        let bytes = fs::read(path).map_err(|source| TlsError::Read { path: path.into(), source })?;
        Ok(PemFile { path: path.into(), bytes })
    }

    /// The content of the file.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The certificates in the file: one at least.
    ///
    /// # Errors
    /// [`TlsError::Pem`], [`TlsError::NoCertificate`].
    pub fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let chain = self.all::<CertificateDer<'static>>()?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate { path: self.path.clone() });
        }
        Ok(chain)
    }

    /// The certificates in the file, as authorities that sign other certificates.
    ///
    /// # Errors
    /// As [`PemFile::certificates`], and [`TlsError::Certificate`].
    pub fn authorities(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in self.certificates()? {
            let refused = |source| TlsError::Certificate { path: self.path.clone(), source };
            roots.add(authority).map_err(refused)?;
        }
        Ok(roots)
    }

    /// The first private key in the file.
    ///
    /// # Errors
    /// [`TlsError::Pem`], [`TlsError::NoKey`].
    pub fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.bytes).map_err(|error| match error {
            pem::Error::NoItemsFound => TlsError::NoKey { path: self.path.clone() },
            source => TlsError::Pem { path: self.path.clone(), source },
        })
    }

    /// The revocation lists in the file: one at least.
    ///
    /// # Errors
    /// [`TlsError::Pem`], [`TlsError::NoRevocationList`].
    pub fn revocation_lists(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        let lists = self.all::<CertificateRevocationListDer<'static>>()?;
        if lists.is_empty() {
            return Err(TlsError::NoRevocationList { path: self.path.clone() });
        }
        Ok(lists)
    }

    fn all<T: PemObject>(&self) -> Result<Vec<T>, TlsError> {
        let read: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&self.bytes).collect();
        read.map_err(|source| TlsError::Pem { path: self.path.clone(), source })
    }
}

/// The certificate chain in one file and its private key in another, or in the same one.
///
/// # Errors
/// [`TlsError`]: one of them is missing or not valid, or they do not belong together.
pub fn identity(cert: &PemFile, key: &PemFile, provider: &CryptoProvider) -> Result<Identity, TlsError> {
    let (chain, private) = (cert.certificates()?, key.private_key()?);
    // The key is also loaded here, to tell an invalid key from an invalid certificate.
    provider
        .key_provider
        .load_private_key(private.clone_key())
        .map_err(|source| TlsError::Key { path: key.path.clone(), source })?;
    CertifiedKey::from_der(chain.clone(), private.clone_key(), provider).map_err(|error| match error {
        Error::InconsistentKeys(_) => TlsError::Mismatch { key: key.path.clone(), cert: cert.path.clone() },
        source => TlsError::Certificate { path: cert.path.clone(), source },
    })?;
    Ok((chain, private))
}

/// The authorities that the system trusts: one at least.
///
/// # Errors
/// [`TlsError::NoSystemAuthorities`].
pub fn system_authorities() -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let mut authorities = rustls_native_certs::load_native_certs().certs;
    // A system may have certificates that the TLS library does not accept.
    authorities.retain(|authority| RootCertStore::empty().add(authority.clone()).is_ok());
    if authorities.is_empty() {
        return Err(TlsError::NoSystemAuthorities);
    }
    Ok(authorities)
}
