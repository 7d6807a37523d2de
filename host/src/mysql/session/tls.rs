//! TLS towards the servers of the store.
//!
//! A server that offers no TLS, and a certificate that is not signed by the authorities or is for another name, end a
//! connection before the password is sent.

use std::sync::Arc;

use arc_swap::ArcSwap;
use mysql_async::{ClientIdentity, SslOpts};
use tokio_rustls::rustls::crypto::ring;

use crate::config::{Authorities, StoreTls};
use crate::pem::{self, PemFile, TlsError};

/// TLS of all connections to the store. Its files may be replaced while it is in use.
pub struct ClientTls {
    config: StoreTls,
    /// With the contents of the files, which were checked.
    current: ArcSwap<SslOpts>,
}

impl ClientTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn load(config: &StoreTls) -> Result<Arc<ClientTls>, TlsError> {
        let current = ArcSwap::from_pointee(read(config)?);
        Ok(Arc::new(ClientTls { config: config.clone(), current }))
    }

    /// Reads the files again. Connections that are open stay as they are.
    ///
    /// # Errors
    /// [`TlsError`], which names the file. New connections then use the old contents.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.store(Arc::new(read(&self.config)?));
        Ok(())
    }

    /// The files.
    pub fn files(&self) -> &StoreTls {
        &self.config
    }

    /// The options of a connection to the host of a URL.
    pub(super) fn options(&self, host: &str) -> SslOpts {
        // The brackets of an IPv6 address are not a part of the name.
        let name = self.config.server_name.as_deref().unwrap_or(host.trim_matches(['[', ']']));
        let options = SslOpts::clone(&self.current.load());
        options.with_danger_tls_hostname_override(Some(name.to_owned()))
    }
}

fn read(config: &StoreTls) -> Result<SslOpts, TlsError> {
    let authorities = match &config.ca {
        Authorities::System => {
            pem::system_authorities()?.into_iter().map(|authority| authority.to_vec().into()).collect()
        }
        Authorities::File(path) => {
            let file = PemFile::read(path)?;
            file.authorities()?;
            vec![file.into_bytes().into()]
        }
    };
    let options = SslOpts::default().with_disable_built_in_roots(true).with_root_certs(authorities);
    let Some((cert, key)) = &config.identity else { return Ok(options) };
    let (cert, key) = (PemFile::read(cert)?, PemFile::read(key)?);
    pem::identity(&cert, &key, &ring::default_provider())?;
    let identity = ClientIdentity::new(cert.into_bytes().into(), key.into_bytes().into());
    Ok(options.with_client_identity(Some(identity)))
}
