//! TLS towards a proxy.

use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::Options;
use super::failure::Failure;
use crate::pem::{self, PemFile, TlsError};

/// The TLS settings of the options. `is_used`: the URL needs TLS, so the authorities of the system are read if the
/// options name none.
pub fn config(options: &Options, is_used: bool) -> Result<ClientConfig, Failure> {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    if let Some(file) = &options.ca_file {
        roots = PemFile::read(file).and_then(|file| file.authorities()).map_err(wrong)?;
    } else if is_used {
        roots.add_parsable_certificates(pem::system_authorities().map_err(wrong)?);
    }
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::Other(error.to_string()))?
        .with_root_certificates(roots);
    let Some(file) = &options.cert_file else { return Ok(builder.with_no_client_auth()) };
    let cert = PemFile::read(file).map_err(wrong)?;
    // The key may be in the same file.
    let key = PemFile::read(options.key_file.as_ref().unwrap_or(file)).map_err(wrong)?;
    let (chain, key) = pem::identity(&cert, &key, &provider).map_err(wrong)?;
    let refused = |error| Failure::Usage(format!("{}: {error}", file.display()));
    builder.with_client_auth_cert(chain, key).map_err(refused)
}

fn wrong(error: TlsError) -> Failure {
    Failure::Usage(match error {
        TlsError::NoSystemAuthorities => format!("{error}; name those of the proxy by --ca-file"),
        error => error.to_string(),
    })
}
