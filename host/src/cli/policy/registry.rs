//! `policy publish` and `policy pull`: components in OCI registries, beside container images.
//!
//! The artifact is the one that other WebAssembly tools publish and pull: one layer `application/wasm`. The signatures and the
//! manifest of a component are inside it, so they travel with it.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use docker_credential::{CredentialRetrievalError, DockerCredential};
use futures_util::TryStreamExt as _;
use oci_client::client::{ClientConfig, ClientProtocol, Config, ImageLayer};
use oci_client::errors::{DigestError, OciDistributionError, OciErrorCode};
use oci_client::manifest::{OciDescriptor, OciImageManifest, WASM_LAYER_MEDIA_TYPE};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;

use super::tools::{self, Described};
use crate::cli::failure::Failure;

/// The media type of a component.
const COMPONENT: &str = "application/wasm";
/// The media type of the configuration, which says what the layer is.
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
/// The largest component, as for `engine.max_component_bytes`.
const MAX_BYTES: u64 = 64 << 20;
/// How long a registry may take to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a registry may send nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a transfer may take.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Where a component is in a registry.
#[derive(clap::Args, Debug)]
pub struct Place {
    /// REGISTRY/NAME, and :VERSION or @DIGEST
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    /// Do not encrypt the connection; a registry on this machine (localhost) is always asked so
    #[arg(long)]
    pub plain_http: bool,
}

/// A component that is in a registry now, or comes from there.
pub struct Stored {
    /// The component, if it was pulled.
    pub component: Vec<u8>,
    /// The reference with the digest of the artifact, which cannot become another one.
    pub pinned: String,
    /// The digest of the component, as a proxy shows it.
    pub digest: String,
}

impl Stored {
    /// The answer as JSON.
    pub fn json(&self, file: &Path) -> Value {
        let bytes = self.component.len();
        json!({"file": file, "bytes": bytes, "digest": self.digest, "reference": self.pinned})
    }
}

/// Publishes a component. Without a version in the reference, the version is that of its manifest.
pub async fn publish(component: Vec<u8>, place: &Place) -> Result<Stored, Failure> {
    let Described { digest, manifest } = tools::described(&component)?;
    let version = manifest.as_ref().map(|manifest| manifest.version.as_str());
    let reference = parsed(&place.reference, version)?;
    if reference.digest().is_some() {
        return Err(Failure::Usage(format!(
            "{}: a component is published by a version; its digest is known after that",
            place.reference
        )));
    }
    let mut annotations = BTreeMap::new();
    if let Some(manifest) = manifest {
        let texts = [
            ("title", Some(manifest.name)),
            ("version", Some(manifest.version)),
            ("description", manifest.description),
            ("source", manifest.source),
        ];
        let named = texts.into_iter().filter_map(|(name, text)| Some((name, text?)));
        annotations.extend(named.map(|(name, text)| (format!("org.opencontainers.image.{name}"), text)));
    }
    let layers = [ImageLayer::new(component.clone(), COMPONENT.to_owned(), None)];
    // The same component is always the same artifact, so it has no time.
    let config = json!({
        "created": "1970-01-01T00:00:00Z", "architecture": "wasm", "os": "wasip2", "layerDigests": [digest],
    });
    let config = Config::new(config.to_string(), CONFIG.to_owned(), None);
    let image = OciImageManifest::build(&layers, &config, Some(annotations));
    let (client, auth) = (client(&reference, place)?, credentials(&reference)?);
    let work = async {
        client.push(&reference, &layers, config, &auth, Some(image)).await?;
        client.pull_image_manifest(&reference, &auth).await
    };
    let (_, artifact) = in_time(work, &reference).await?;
    Ok(Stored { component, pinned: pinned(&reference, &artifact), digest })
}

/// Gets a component.
pub async fn pull(place: &Place) -> Result<Stored, Failure> {
    let reference = parsed(&place.reference, None)?;
    let (client, auth) = (client(&reference, place)?, credentials(&reference)?);
    let (image, artifact) = in_time(client.pull_image_manifest(&reference, &auth), &reference).await?;
    let component = in_time(content(&client, &reference, layer(&image, &reference)?), &reference).await?;
    let Described { digest, .. } = tools::described(&component)?;
    Ok(Stored { component, pinned: pinned(&reference, &artifact), digest })
}

/// The bytes of a layer, whose digest is verified. A registry cannot send more than it has announced.
async fn content(
    client: &Client,
    reference: &Reference,
    layer: &OciDescriptor,
) -> Result<Vec<u8>, OciDistributionError> {
    let mut chunks = client.pull_blob_stream(reference, layer).await?.stream;
    let mut content = Vec::new();
    let verified = |error: io::Error| match error.get_ref().is_some_and(|inner| inner.is::<DigestError>()) {
        true => OciDistributionError::SpecViolationError("another digest than announced".to_owned()),
        false => error.into(),
    };
    while let Some(chunk) = chunks.try_next().await.map_err(verified)? {
        content.extend_from_slice(&chunk);
        if content.len() as i64 > layer.size {
            return Err(OciDistributionError::SpecViolationError("more bytes than announced".to_owned()));
        }
    }
    Ok(content)
}

/// The file that a pulled component is written to by default.
pub fn file_of(place: &Place) -> PathBuf {
    let name = place.reference.rsplit('/').next().unwrap_or_default();
    let name = name.split([':', '@']).next().unwrap_or_default();
    PathBuf::from(format!("{name}.wasm"))
}

/// The component among the layers.
fn layer<'a>(image: &'a OciImageManifest, reference: &Reference) -> Result<&'a OciDescriptor, Failure> {
    let refused = |why: &str| Err(Failure::Refused(format!("{reference}: {why}")));
    let [layer] = &image.layers[..] else {
        return refused(&format!("this is no component: it has {} layers", image.layers.len()));
    };
    if ![COMPONENT, WASM_LAYER_MEDIA_TYPE].contains(&layer.media_type.as_str()) {
        return refused(&format!("this is no component: its layer is {}", layer.media_type));
    }
    match u64::try_from(layer.size) {
        Ok(bytes) if bytes <= MAX_BYTES => Ok(layer),
        _ => refused(&format!("the component has {} bytes; {MAX_BYTES} are allowed", layer.size)),
    }
}

/// A reference that names its registry and its version. Container tools know a default for both, which publishes under a name
/// that nobody meant, and pulls what was published last.
fn parsed(text: &str, version: Option<&str>) -> Result<Reference, Failure> {
    let usage = |why: String| Failure::Usage(format!("{text}: {why}"));
    let example = "such as ghcr.io/acme/tenants:1.0.0";
    let registry = text.split_once('/').map(|(registry, _)| registry);
    if !registry.is_some_and(|name| name == "localhost" || name.contains(['.', ':'])) {
        return Err(usage(format!("the reference must begin with a registry, {example}")));
    }
    let has_version = text.rsplit('/').next().is_some_and(|name| name.contains([':', '@']));
    let whole = match version {
        _ if has_version => text.to_owned(),
        Some(version) => format!("{text}:{version}"),
        None => return Err(usage(format!("the reference must have a version or a digest, {example}"))),
    };
    whole.parse().map_err(|error| usage(format!("this is no reference to a registry ({error})")))
}

fn pinned(reference: &Reference, artifact: &str) -> String {
    format!("{}/{}@{artifact}", reference.registry(), reference.repository())
}

fn client(reference: &Reference, place: &Place) -> Result<Client, Failure> {
    // Of all that use TLS here, this library alone asks the process which cryptography to use.
    let _ = ring::default_provider().install_default();
    let registry = reference.resolve_registry();
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let is_here = ["localhost", "127.0.0.1", "[::1]"].contains(&host);
    let protocol = if place.plain_http || is_here { ClientProtocol::Http } else { ClientProtocol::Https };
    let config = ClientConfig {
        protocol,
        use_monolithic_push: true,
        // A component has no platform.
        platform_resolver: None,
        connect_timeout: Some(CONNECT_TIMEOUT),
        read_timeout: Some(READ_TIMEOUT),
        user_agent: concat!("lockkeeper/", env!("CARGO_PKG_VERSION")),
        ..ClientConfig::default()
    };
    Client::try_from(config).map_err(|error| failure(error, reference))
}

/// The credentials that `docker login` has stored for the registry.
fn credentials(reference: &Reference) -> Result<RegistryAuth, Failure> {
    let server = match reference.registry() {
        "docker.io" => "https://index.docker.io/v1/",
        registry => registry,
    };
    let folder = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let folder = folder.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".docker")));
    let Some(file) = folder.map(|folder| folder.join("config.json")) else {
        return Ok(RegistryAuth::Anonymous);
    };
    let failed = |why: String| {
        Failure::Other(format!("the credentials of {server} cannot be read from {}: {why}", file.display()))
    };
    let config = match File::open(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(RegistryAuth::Anonymous),
        opened => opened.map_err(|error| failed(error.to_string()))?,
    };
    match docker_credential::get_credential_from_reader(BufReader::new(config), server) {
        Ok(DockerCredential::UsernamePassword(user, password)) => Ok(RegistryAuth::Basic(user, password)),
        Ok(DockerCredential::IdentityToken(_)) => Err(failed(
            "they are an identity token, which is not supported; log in with an access token as the password"
                .to_owned(),
        )),
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(RegistryAuth::Anonymous),
        Err(error) => Err(failed(error.to_string())),
    }
}

async fn in_time<T>(
    work: impl Future<Output = Result<T, OciDistributionError>>,
    reference: &Reference,
) -> Result<T, Failure> {
    match tokio::time::timeout(TIMEOUT, work).await {
        Ok(result) => result.map_err(|error| failure(error, reference)),
        Err(_) => {
            Err(Failure::Unavailable(format!("{reference}: not finished within {} s", TIMEOUT.as_secs())))
        }
    }
}

fn failure(error: OciDistributionError, reference: &Reference) -> Failure {
    let registry = reference.registry();
    let denied = |why: String| {
        Failure::Refused(format!(
            "{registry} refuses access to {reference}: {why}; `docker login {registry}` stores credentials"
        ))
    };
    let not_promised =
        |why: String| Failure::Refused(format!("{reference} is not what the registry has promised: {why}"));
    match error {
        OciDistributionError::RequestError(error) => {
            let mut why = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                why = format!("{why}: {cause}");
                source = cause.source();
            }
            Failure::Unavailable(format!("{registry} cannot be asked: {why}"))
        }
        OciDistributionError::UnauthorizedError { .. } => denied("it wants other credentials".to_owned()),
        OciDistributionError::AuthenticationFailure(why) => denied(why),
        OciDistributionError::ImageManifestNotFoundError(_) => {
            Failure::Other(format!("{registry} has no {reference}"))
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            let code = envelope.errors.first().map(|error| &error.code);
            let messages: Vec<&str> = envelope.errors.iter().map(|error| error.message.as_str()).collect();
            let messages = messages.join("; ");
            match code {
                Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => denied(messages),
                Some(OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound) => {
                    Failure::Other(format!("{registry} has no {reference}: {messages}"))
                }
                _ => Failure::Other(format!("{registry} refuses {reference}: {messages}")),
            }
        }
        OciDistributionError::ServerError { code: code @ (401 | 403), .. } => {
            denied(format!("it answers {code}"))
        }
        OciDistributionError::ServerError { code, message, .. } => {
            let why = format!("{registry} answers {code} for {reference}: {}", message.trim());
            if code < 500 { Failure::Other(why) } else { Failure::Unavailable(why) }
        }
        OciDistributionError::SpecViolationError(why) => not_promised(why),
        OciDistributionError::DigestError(why) => not_promised(why.to_string()),
        error => Failure::Other(format!("{reference}: {error}")),
    }
}
