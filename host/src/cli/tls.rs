//! TLS towards a proxy.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::Options;
use super::failure::Failure;

/// The TLS settings of the options. `is_used`: the URL needs TLS, so the authorities of the system are read if the
/// options name none.
pub fn config(options: &Options, is_used: bool) -> Result<ClientConfig, Failure> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = &options.ca_file {
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| wrong(file, &error))?;
        }
    } else if is_used {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let what = "the system has no certificates of authorities; name those of the proxy by --ca-file";
            return Err(Failure::Usage(what.to_owned()));
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::Other(error.to_string()))?
        .with_root_certificates(roots);
    let Some(file) = &options.cert_file else { return Ok(builder.with_no_client_auth()) };
    // The key may be in the same file.
    let key_file = options.key_file.as_ref().unwrap_or(file);
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|error| wrong(key_file, &error))?;
    builder.with_client_auth_cert(certificates(file)?, key).map_err(|error| wrong(file, &error))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let read = CertificateDer::pem_file_iter(file).map_err(|error| wrong(file, &error))?;
    let certificates: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| wrong(file, &error))?;
    if certificates.is_empty() {
        return Err(wrong(file, &"there is no certificate in it"));
    }
    Ok(certificates)
}

fn wrong(file: &Path, why: &impl std::fmt::Display) -> Failure {
    Failure::Usage(format!("{}: {why}", file.display()))
}
