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
use hyper::header::HeaderValue;
use oci_client::client::{ClientConfig, ClientProtocol, Config, ImageLayer};
use oci_client::errors::{DigestError, OciDistributionError, OciErrorCode};
use oci_client::manifest::{OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciImageManifest, WASM_LAYER_MEDIA_TYPE};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;

use super::tools::{self, Described};
use crate::cli::failure::Failure;

/// The media type of a component.
const COMPONENT: &str = "application/wasm";
/// The media type of the configuration, which says what the layer is.
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
/// The largest component: the largest value of `engine.max_component_bytes`.
const MAX_BYTES: u64 = 64 << 20;
/// The longest tag. It has letters, digits and these characters.
const MAX_TAG_BYTES: usize = 128;
const IN_TAGS: [char; 3] = ['.', '_', '-'];
/// How long it may take to connect to a registry.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a registry may send nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How long all of a command may take, without the programs that keep credentials.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The names of this machine.
const HERE: [&str; 2] = ["localhost", "127.0.0.1"];
/// How much of a registry's own message is shown, in characters.
const MESSAGE: usize = 300;

/// Where a component is in a registry.
#[derive(clap::Args, Debug)]
pub struct Place {
    /// REGISTRY/NAME, and :VERSION or @DIGEST
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    /// Connect without encryption, and send credentials so; connections to localhost are never encrypted
    #[arg(long)]
    pub plain_http: bool,
}

/// A component that is in a registry.
pub struct Stored {
    /// The component.
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
    let Described { digest, manifest, exports } = tools::described(&component)?;
    if component.len() as u64 > MAX_BYTES {
        let bytes = component.len();
        return Err(Failure::Refused(format!("the component has {bytes} bytes; {MAX_BYTES} are allowed")));
    }
    let version = manifest.as_ref().map(|manifest| manifest.version.as_str());
    let reference = to_publish(&place.reference, version)?;
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
    let layer = ImageLayer::new(component.clone(), COMPONENT.to_owned(), None);
    // The same component is always the same artifact, so it has no time.
    let config = json!({
        "created": "1970-01-01T00:00:00Z", "architecture": "wasm", "os": "wasip2", "layerDigests": [digest],
        "component": { "exports": exports, "imports": [] },
    });
    let config = Config::new(config.to_string(), CONFIG.to_owned(), None);
    let mut image = OciImageManifest::build(std::slice::from_ref(&layer), &config, Some(annotations));
    image.media_type = Some(OCI_IMAGE_MEDIA_TYPE.to_owned());
    let body = serde_json::to_vec(&image).map_err(|error| Failure::Other(error.to_string()))?;
    let artifact = tools::digest(&body);
    // An upload is one request, which takes as long as it takes.
    let (client, auth) = (client(&reference, place, None)?, credentials(&reference)?);
    let work = async {
        client.auth(&reference, &auth, RegistryOperation::Push).await?;
        client.push_blob(&reference, layer.data, &digest).await?;
        client.push_blob(&reference, config.data, &image.config.digest).await?;
        let kind = HeaderValue::from_static(OCI_IMAGE_MEDIA_TYPE);
        client.push_manifest_raw(&reference, body, kind).await
    };
    in_time(async { work.await.map_err(|error| failure(error, &reference)) }, &reference).await?;
    Ok(Stored { component, pinned: pinned(&reference, &artifact), digest })
}

/// Gets a component.
pub async fn pull(place: &Place) -> Result<Stored, Failure> {
    let reference = to_pull(&place.reference)?;
    let (client, auth) = (client(&reference, place, Some(READ_TIMEOUT))?, credentials(&reference)?);
    let work = async {
        let failed = |error| failure(error, &reference);
        client.auth(&reference, &auth, RegistryOperation::Pull).await.map_err(failed)?;
        let (image, artifact) = client.pull_image_manifest(&reference, &auth).await.map_err(failed)?;
        let component = content(&client, &reference, layer(&image, &reference)?).await.map_err(failed)?;
        Ok((component, artifact))
    };
    let (component, artifact) = in_time(work, &reference).await?;
    if !tools::is_component(&component) {
        return Err(Failure::Refused(format!("{reference}: this is not a component")));
    }
    Ok(Stored { pinned: pinned(&reference, &artifact), digest: tools::digest(&component), component })
}

/// The bytes of a layer, whose digest is verified. A registry cannot send more than the artifact says.
async fn content(
    client: &Client,
    reference: &Reference,
    layer: &OciDescriptor,
) -> Result<Vec<u8>, OciDistributionError> {
    let broken = |error: io::Error| {
        if error.get_ref().is_some_and(|inner| inner.is::<DigestError>()) {
            return OciDistributionError::SpecViolationError("another digest than announced".to_owned());
        }
        error.downcast().map_or_else(OciDistributionError::IoError, OciDistributionError::RequestError)
    };
    // Only the digest is passed, because an artifact may name other addresses for a layer.
    let mut chunks = client.pull_blob_stream(reference, layer.digest.as_str()).await?.stream;
    let mut content = Vec::new();
    while let Some(chunk) = chunks.try_next().await.map_err(broken)? {
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
        return refused(&format!("this is no component: its layer is {}", shortened(&layer.media_type)));
    }
    match u64::try_from(layer.size) {
        Ok(bytes) if bytes <= MAX_BYTES => Ok(layer),
        _ => refused(&format!("the component has {} bytes; {MAX_BYTES} are allowed", layer.size)),
    }
}

const EXAMPLE: &str = "such as ghcr.io/acme/tenants:1.0.0";

/// The reference under which a component is published, with the version of its manifest if it has none of its own.
fn to_publish(text: &str, version: Option<&str>) -> Result<Reference, Failure> {
    let usage = |why: String| Failure::Usage(format!("{text}: {why}"));
    if text.contains('@') {
        return Err(usage(
            "a component is published by a version; its digest is known after that".to_owned(),
        ));
    }
    if has_version(text) {
        return parsed(text);
    }
    let Some(version) = version else {
        return Err(usage(format!("the component has no manifest, so name a version, {EXAMPLE}")));
    };
    let fits = version.len() <= MAX_TAG_BYTES
        && version.starts_with(|c: char| c.is_ascii_alphanumeric())
        && version.chars().all(|c| c.is_ascii_alphanumeric() || IN_TAGS.contains(&c));
    if !fits {
        let version = shortened(version);
        return Err(usage(format!(
            "the version of the manifest, {version}, cannot be a tag; name one, {EXAMPLE}"
        )));
    }
    parsed(&format!("{text}:{version}"))
}

/// The reference of a component. Container tools take a missing version for the last one.
fn to_pull(text: &str) -> Result<Reference, Failure> {
    if !has_version(text) {
        return Err(Failure::Usage(format!(
            "{text}: the reference must have a version or a digest, {EXAMPLE}"
        )));
    }
    parsed(text)
}

fn has_version(text: &str) -> bool {
    text.rsplit('/').next().is_some_and(|name| name.contains([':', '@']))
}

/// A reference that names its registry. Container tools take a missing one for Docker Hub.
fn parsed(text: &str) -> Result<Reference, Failure> {
    let usage = |why: String| Failure::Usage(format!("{text}: {why}"));
    let registry = text.split_once('/').map(|(registry, _)| registry);
    if !registry.is_some_and(|name| name == "localhost" || name.contains(['.', ':'])) {
        return Err(usage(format!("the reference must begin with a registry, {EXAMPLE}")));
    }
    text.parse().map_err(|error| {
        usage(format!("this is no reference, {EXAMPLE}, in lower case and without https:// ({error})"))
    })
}

fn pinned(reference: &Reference, artifact: &str) -> String {
    format!("{}/{}@{artifact}", reference.registry(), reference.repository())
}

fn client(reference: &Reference, place: &Place, read_timeout: Option<Duration>) -> Result<Client, Failure> {
    // Of all that use TLS here, this library alone asks the process which cryptography to use.
    let _ = ring::default_provider().install_default();
    let registry = reference.resolve_registry();
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let is_here = HERE.contains(&host);
    let protocol = if place.plain_http || is_here { ClientProtocol::Http } else { ClientProtocol::Https };
    // If one is named here, the library asks no proxy of the environment. This one is for no address of this machine.
    let proxy = is_here.then(|| "http://localhost".to_owned());
    let config = ClientConfig {
        protocol,
        use_monolithic_push: true,
        // A component has no platform.
        platform_resolver: None,
        connect_timeout: Some(CONNECT_TIMEOUT),
        read_timeout,
        user_agent: concat!("lockkeeper/", env!("CARGO_PKG_VERSION")),
        no_proxy: proxy.is_some().then(|| HERE.join(",")),
        http_proxy: proxy,
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
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("DOCKER_CONFIG").or_else(|| Some(variable("HOME")?.join(".docker")));
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
        // The words of all programs that keep credentials for Docker.
        Err(CredentialRetrievalError::HelperFailure { ref stdout, ref stderr, .. })
            if [stdout, stderr].iter().any(|said| said.contains("credentials not found")) =>
        {
            Ok(RegistryAuth::Anonymous)
        }
        Err(error) => Err(failed(shortened(&error.to_string()))),
    }
}

async fn in_time<T>(
    work: impl Future<Output = Result<T, Failure>>,
    reference: &Reference,
) -> Result<T, Failure> {
    tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| {
        Err(Failure::Unavailable(format!("{reference}: not finished within {} s", TIMEOUT.as_secs())))
    })
}

fn failure(error: OciDistributionError, reference: &Reference) -> Failure {
    let registry = reference.registry();
    let denied = |why: &str| {
        Failure::Refused(format!(
            "{registry} refuses access to {reference}: {}; `docker login {registry}` stores credentials",
            shortened(why)
        ))
    };
    let answered = |code: u16, message: &str| {
        let what = format!("{registry} answers {code} for {reference}: {}", shortened(message));
        match code {
            401 | 403 => denied(message),
            429 | 500.. => Failure::Unavailable(what),
            _ => Failure::Other(what),
        }
    };
    let not_promised = |why: &str| {
        let why = shortened(why);
        Failure::Refused(format!("{reference} is not what the registry has promised: {why}"))
    };
    match error {
        OciDistributionError::RequestError(error) => match error.status() {
            Some(status) => answered(status.as_u16(), status.canonical_reason().unwrap_or_default()),
            // Without the address, which may have a signature.
            None => {
                Failure::Unavailable(format!("{registry} cannot be asked: {}", causes(&error.without_url())))
            }
        },
        OciDistributionError::UnauthorizedError { .. } => denied("it wants other credentials"),
        OciDistributionError::AuthenticationFailure(why) => denied(&why),
        OciDistributionError::ImageManifestNotFoundError(_) => {
            Failure::Other(format!("{registry} has no {reference}"))
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            let code = envelope.errors.first().map(|error| &error.code);
            let messages: Vec<&str> = envelope.errors.iter().map(|error| error.message.as_str()).collect();
            let messages = shortened(&messages.join("; "));
            match code {
                Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => denied(&messages),
                Some(OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound) => {
                    Failure::Other(format!("{registry} has no {reference}: {messages}"))
                }
                Some(OciErrorCode::Toomanyrequests) => {
                    Failure::Unavailable(format!("{registry} has had too many requests: {messages}"))
                }
                _ => Failure::Other(format!("{registry} refuses {reference}: {messages}")),
            }
        }
        OciDistributionError::ServerError { code, message, .. } => answered(code, &message),
        OciDistributionError::SpecViolationError(why) => not_promised(&why),
        OciDistributionError::DigestError(why) => not_promised(&why.to_string()),
        OciDistributionError::ImageIndexParsingNoPlatformResolverError => {
            Failure::Refused(format!("{reference}: this is no component, but an index of images"))
        }
        error => Failure::Other(format!("{reference}: {}", shortened(&error.to_string()))),
    }
}

/// What is wrong with a connection, with what helps.
fn causes(error: &reqwest::Error) -> String {
    let mut why = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        why = format!("{why}: {cause}");
        source = cause.source();
    }
    let help = match () {
        () if why.contains("certificate") => "; SSL_CERT_FILE names a file with the authorities to trust",
        () if why.contains("InvalidContentType") => "; it may need --plain-http",
        () => "",
    };
    shortened(&why) + help
}

fn shortened(text: &str) -> String {
    text.trim().chars().take(MESSAGE).collect()
}
