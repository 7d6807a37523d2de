//! Builds a policy crate into a component that the proxy loads.
//!
//! [`build`] runs `cargo build` for `wasm32-unknown-unknown` with its own settings (a small stack, no paths, no
//! names), and wraps the module into a component. The same source gives the same bytes in any checkout.

mod cargo;
mod error;

use std::path::Path;

pub use error::BuildError;

/// The compilation target of every policy.
pub const TARGET: &str = "wasm32-unknown-unknown";

/// Builds the policy crate in `dir` and returns the component's bytes.
///
/// Build artifacts go to `target_dir`, or to `policies` inside the crate's own target directory. They never go to the
/// target directory itself, so a build script may call this function while its own cargo holds the lock on that
/// directory.
///
/// # Errors
/// [`BuildError`]: a sentence for the author of the policy. What the compiler says goes to stderr.
#[cfg(feature = "component")]
pub fn build(dir: &Path, target_dir: Option<&Path>) -> Result<Vec<u8>, BuildError> {
    component(&module(dir, target_dir)?)
}

/// As [`build`], without the last step: the core module, which [`component`] wraps.
///
/// # Errors
/// As those of [`build`].
pub fn module(dir: &Path, target_dir: Option<&Path>) -> Result<Vec<u8>, BuildError> {
    let module = cargo::build_module(dir, target_dir)?;
    std::fs::read(&module).map_err(|source| BuildError::Read { path: module, source })
}

/// The name and the version of a crate.
pub struct Named {
    /// The name.
    pub name: String,
    /// The version.
    pub version: String,
}

/// The name and the version of the policy crate in `dir`.
///
/// # Errors
/// [`BuildError::NoCrate`], or [`BuildError::Metadata`] if cargo cannot read the crate.
pub fn named(dir: &Path) -> Result<Named, BuildError> {
    cargo::named(dir)
}

/// Wraps a core module, built with the SDK, into a component.
///
/// # Errors
/// [`BuildError::Component`] where the module imports something or does not export what its hooks
/// need.
#[cfg(feature = "component")]
pub fn component(module: &[u8]) -> Result<Vec<u8>, BuildError> {
    let fail = |error| BuildError::Component { detail: format!("{error:#}") };
    wit_component::ComponentEncoder::default()
        .validate(true)
        .module(module)
        .map_err(fail)?
        .encode()
        .map_err(fail)
}
