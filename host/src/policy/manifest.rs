//! What a component says of itself: its name, its version, where its source is, and which settings it takes.
//!
//! A manifest is JSON in a custom section of the component. `lockkeeper policy build` writes it from the file
//! `manifest.json`. A manifest is optional.

mod schema;

use std::path::Path;

use lockkeeper_builder::Named;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use wasm_encoder::{ComponentSection as _, CustomSection};
use wasmparser::{Parser, Payload};

use super::Signed;

pub use schema::{Schema, SettingFault};

/// The name of the custom section.
const SECTION: &str = "lockkeeper-manifest";
/// The longest manifest, in bytes.
const MAX_BYTES: usize = 65_536;
/// The longest name, version and source, in bytes.
const MAX_TEXT_BYTES: usize = 256;
/// The longest description, in bytes.
const MAX_DESCRIPTION_BYTES: usize = 1_024;
/// The name of the file that a manifest is written in.
pub const FILE: &str = "manifest.json";

/// What a component says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The name of the policy, as its author calls it.
    pub name: String,
    /// The version, as its author counts.
    pub version: String,
    /// What the policy does, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Where the source is: the address of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The settings that the policy takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<Schema>,
}

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{detail}")]
pub struct ManifestError {
    detail: String,
}

/// Why a component gets no manifest.
#[derive(Debug, thiserror::Error)]
pub enum AnnotateError {
    /// It is no component.
    #[error("this is not a component; `lockkeeper policy build` makes one of a core module")]
    NotAComponent,
    /// It has one, or one that cannot be read.
    #[error("the component has a manifest already; build it again to give it another")]
    Annotated,
    /// It is signed.
    #[error(
        "the component is signed, and a manifest would void the signatures; attach the manifest before it is signed"
    )]
    Signed,
}

impl From<Named> for Manifest {
    fn from(Named { name, version }: Named) -> Manifest {
        Manifest { name, version, description: None, source: None, settings: None }
    }
}

impl Manifest {
    /// Reads a manifest from a file. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read, or is not a manifest.
    pub fn read(file: &Path, of: Option<&Named>) -> Result<Option<Manifest>, ManifestError> {
        let fail = |detail: String| ManifestError { detail: format!("{}: {detail}", file.display()) };
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail(error.to_string())),
        };
        let parsed = Manifest::written(&text, of).map_err(|error| fail(error.detail))?;
        Ok(Some(parsed))
    }

    /// Parses the text of a `manifest.json`. A crate has a name and a version, so its manifest need not repeat them.
    ///
    /// # Errors
    /// The text is not a manifest, no value can fit its schema, or a default value does not fit it.
    pub fn written(text: &str, of: Option<&Named>) -> Result<Manifest, ManifestError> {
        let fail = |detail: String| ManifestError { detail };
        let mut table: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
        if let Some(Named { name, version }) = of {
            table.entry("name").or_insert_with(|| name.as_str().into());
            table.entry("version").or_insert_with(|| version.as_str().into());
        }
        const KEYS: [&str; 5] = ["name", "version", "description", "source", "settings"];
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(fail(format!("unknown key `{key}`; a manifest has {}", KEYS.join(", "))));
        }
        let manifest: Manifest =
            serde_json::from_value(table.into()).map_err(|error| fail(error.to_string()))?;
        manifest.check()?;
        if let Some(fault) = manifest.settings.iter().flat_map(Schema::faults).next() {
            return Err(fail(format!(
                "the schema of the settings, or a default in it, has a fault: {fault}"
            )));
        }
        if manifest.encoded().len() > MAX_BYTES {
            return Err(fail(format!("it has more than {MAX_BYTES} bytes")));
        }
        Ok(manifest)
    }

    /// The manifest of a component. Returns `None` if it has none. Keys beside those of a manifest are ignored, because a later
    /// version may have more. A keyword of the schema that is not known is an error, because it would not be checked.
    ///
    /// # Errors
    /// The component has several manifests, or an invalid one.
    pub fn of(component: &[u8]) -> Result<Option<Manifest>, ManifestError> {
        let fail = |detail: String| ManifestError { detail };
        let mut found = None;
        let mut depth = 0_u32;
        for payload in Parser::new(0).parse_all(component) {
            match payload.map_err(|error| fail(error.to_string()))? {
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                Payload::CustomSection(section) if depth == 0 && section.name() == SECTION => {
                    if section.data().len() > MAX_BYTES {
                        return Err(fail(format!("it has more than {MAX_BYTES} bytes")));
                    }
                    let manifest: Manifest =
                        serde_json::from_slice(section.data()).map_err(|error| fail(error.to_string()))?;
                    manifest.check()?;
                    if found.replace(manifest).is_some() {
                        return Err(fail("the component has more than one".to_owned()));
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// The component with this manifest.
    ///
    /// # Errors
    /// The bytes are not a component, or the component already has a manifest or a signature.
    pub fn annotate(&self, component: &[u8]) -> Result<Vec<u8>, AnnotateError> {
        if !Parser::is_component(component) {
            return Err(AnnotateError::NotAComponent);
        }
        if !matches!(Manifest::of(component), Ok(None)) {
            return Err(AnnotateError::Annotated);
        }
        if !Signed::of(component).signatures.is_empty() {
            return Err(AnnotateError::Signed);
        }
        Ok(self.attach(component))
    }

    fn encoded(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest can be written as JSON")
    }

    fn attach(&self, component: &[u8]) -> Vec<u8> {
        let section = CustomSection { name: SECTION.into(), data: self.encoded().into() };
        let mut component = component.to_vec();
        section.append_to_component(&mut component);
        component
    }

    /// The manifest for a list of policies, without the schema of the settings.
    pub fn without_settings(&self) -> Manifest {
        Manifest { settings: None, ..self.clone() }
    }

    fn check(&self) -> Result<(), ManifestError> {
        let texts = [
            ("name", Some(&self.name), MAX_TEXT_BYTES),
            ("version", Some(&self.version), MAX_TEXT_BYTES),
            ("source", self.source.as_ref(), MAX_TEXT_BYTES),
            ("description", self.description.as_ref(), MAX_DESCRIPTION_BYTES),
        ];
        for (key, text, max) in texts {
            let Some(text) = text else { continue };
            if !(1..=max).contains(&text.len()) || text.chars().any(char::is_control) {
                let detail = format!("`{key}` must have 1 to {max} bytes, and no control characters");
                return Err(ManifestError { detail });
            }
        }
        let fail = |detail: &str| Err(ManifestError { detail: detail.to_owned() });
        match &self.settings {
            Some(settings) if !settings.is_table() => fail("`settings` must be a schema of type `object`"),
            Some(settings) if !settings.is_plain() => {
                fail("a name or text of the schema has a control character")
            }
            _ => Ok(()),
        }
    }

    /// How settings differ from what the policy takes.
    pub fn faults_of(&self, settings: &Value) -> Vec<SettingFault> {
        self.settings.as_ref().map(|schema| schema.faults_of(settings)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use wasm_encoder::{RawSection, Section as _};

    use super::*;
    use crate::policy::builtin;

    const TEXT: &str = r#"{
        "name": "fair", "version": "1.2.0", "source": "https://git.example/fair",
        "settings": {"type": "object", "additionalProperties": false, "properties": {
            "ttl_ms": {"type": "integer", "minimum": 100, "maximum": 3600000, "default": 10000}
        }}
    }"#;

    #[test]
    fn a_component_keeps_its_manifest() {
        let manifest = Manifest::written(TEXT, None).unwrap();
        let component = manifest.annotate(b"\0asm\x0d\0\x01\0").unwrap();
        assert_eq!(Manifest::of(&component).unwrap(), Some(manifest.clone()));
        assert_eq!(Manifest::of(b"\0asm\x0d\0\x01\0").unwrap(), None);
        assert!(matches!(manifest.annotate(&component), Err(AnnotateError::Annotated)));
        let twice = manifest.attach(&component);
        assert_eq!(Manifest::of(&twice).unwrap_err().to_string(), "the component has more than one");
    }

    #[test]
    fn the_manifest_of_a_crate_need_not_repeat_its_name() {
        let of = Named { name: "tenants".into(), version: "0.3.0".into() };
        let manifest = Manifest::written("{}", Some(&of)).unwrap();
        assert_eq!((manifest.name.as_str(), manifest.version.as_str()), ("tenants", "0.3.0"));
        assert!(Manifest::written("{}", None).unwrap_err().to_string().contains("name"));
    }

    #[test]
    fn a_wrong_manifest_is_refused_with_its_key() {
        let faults = [
            (r#"{"name": "", "version": "1"}"#, "`name` must have 1 to 256 bytes"),
            (r#"{"name": "a", "version": "1", "licence": "x"}"#, "unknown key `licence`"),
            (
                r#"{"name": "a", "version": "1", "settings": {"type": "string"}}"#,
                "`settings` must be a schema",
            ),
            (
                r#"{"name": "a", "version": "1", "settings": {"type": "object", "pattern": "x"}}"#,
                "unknown field `pattern`",
            ),
            (
                r#"{"name": "a", "version": "1", "settings": {"type": "object",
                    "properties": {"n": {"type": "integer", "minimum": 1, "default": 0}}}}"#,
                "has a fault: n: is 0; must be a whole number, 1 or more",
            ),
        ];
        let settings = |schema: &str| format!(r#"{{"name": "a", "version": "1", "settings": {schema}}}"#);
        let property =
            |schema: &str| settings(&format!(r#"{{"type": "object", "properties": {{"n": {schema}}}}}"#));
        let more = [
            (property(r#"{"type": "integer", "minimun": 1}"#), "in `n`: unknown field `minimun`"),
            (
                property(r#"{"type": "array", "items": {"type": "text"}}"#),
                "in `n`: in `items`: unknown variant `text`",
            ),
            (property(r#"{"type": "integer", "minimum": 2, "maximum": 1}"#), "n: the minimum is above"),
            (property(r#"{"type": "string", "enum": []}"#), "n: `enum` is empty"),
            (property(r#"{"type": "string", "enum": ["a"], "maxLength": 1}"#), "n: `enum` and a length"),
            (property(r#"{"type": "string", "enum": ["a\nb"]}"#), "has a control character"),
            (
                settings(r#"{"type": "object", "additionalProperties": false, "required": ["m"]}"#),
                "m: is required, and not among the properties",
            ),
            (
                settings(r#"{"type": "object", "additionalProperties": {"type": "string", "pattern": "x"}}"#),
                "in `additionalProperties`: unknown field `pattern`",
            ),
            (
                property(&format!(r#"{{"type": "string", "enum": ["{}"]}}"#, "x".repeat(70_000))),
                "more than 65536 bytes",
            ),
        ];
        let faults = faults.map(|(text, expected)| (text.to_owned(), expected));
        for (text, expected) in faults.into_iter().chain(more) {
            let error = Manifest::written(&text, None).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_manifest_of_a_module_inside_does_not_count() {
        let component = builtin("default").unwrap();
        // A custom section in a nested core module: the name of the section is looked for at the top level only.
        let mut module = b"\0asm\x01\0\0\0".to_vec();
        CustomSection { name: SECTION.into(), data: b"{}".as_slice().into() }.append_to(&mut module);
        let mut component = component.to_vec();
        RawSection { id: 1, data: &module }.append_to_component(&mut component);
        assert_eq!(Manifest::of(&component).unwrap().unwrap().name, "default");
    }
}
