//! `cargo xtask sbom`: the list of what is in the program (software bill of materials).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{paths, steps};

/// Writes which crates are in the release program, as CycloneDX: target/dist/lockkeeper.cdx.json.
///
/// Each crate has its version, licence, source and checksum. `cargo xtask dist` writes the file, too.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: &Args) -> Result<ExitCode> {
    println!("{}", write(&paths::target().join("dist"))?.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes the list to a folder, and returns the path of the file.
pub fn write(dist: &Path) -> Result<PathBuf> {
    let file = dist.join("lockkeeper.cdx.json");
    let text = format!("{:#}\n", bill()?);
    fs::create_dir_all(dist)
        .and_then(|()| fs::write(&file, text))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// A crate's name and version.
type Id = (String, String);

/// A crate of the program.
#[derive(Default)]
struct Part {
    licence: String,
    needs: BTreeSet<Id>,
    /// It is in the program. Other crates run only while the program is built.
    inside: bool,
}

type Parts = BTreeMap<Id, Part>;

/// The document, in version 1.5 of CycloneDX.
fn bill() -> Result<Value> {
    let compiler =
        output(Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV"))?;
    let compiler = |key: &str| compiler.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let (rust, target) =
        compiler("release:").zip(compiler("host:")).context("rustc names its release and host")?;

    let mut parts = Parts::new();
    let program =
        add(&mut parts, &["lockkeeper".to_owned()], target)?.pop_first().context("the proxy is a crate")?;
    // The build script of the proxy embeds them.
    let policies = add(&mut parts, &policies()?, "wasm32-unknown-unknown")?;
    let std = ("rust-std".to_owned(), rust.to_owned());
    parts.insert(std.clone(), Part { licence: "MIT OR Apache-2.0".into(), inside: true, ..Part::default() });
    parts.entry(program.clone()).or_default().needs.extend(policies.into_iter().chain([std]));

    let sources = Sources::read()?;
    let mut own = component(&program, &parts[&program], &sources);
    own["type"] = "application".into();
    own["properties"] = json!([{ "name": "lockkeeper:target", "value": target }]);
    let components = parts.iter().filter(|(id, _)| **id != program);
    let components: Vec<Value> = components.map(|(id, part)| component(id, part, &sources)).collect();
    let needs = |part: &Part| part.needs.iter().map(|id| sources.purl(id)).collect::<Vec<_>>();
    let dependencies =
        parts.iter().map(|(id, part)| json!({ "ref": sources.purl(id), "dependsOn": needs(part) }));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "timestamp": output(Command::new("date").args(["-u", "+%FT%TZ"]))?.trim(), "component": own },
        "components": components,
        "dependencies": dependencies.collect::<Vec<_>>(),
    }))
}

fn component(id: &Id, part: &Part, sources: &Sources) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": sources.purl(id),
        "name": id.0,
        "version": id.1,
        "scope": if part.inside { "required" } else { "excluded" },
        "purl": sources.purl(id),
    });
    if !part.licence.is_empty() {
        component["licenses"] = json!([{ "expression": part.licence }]);
    }
    if let Some(checksum) = sources.checksums.get(id) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// The checksums of the crates of the registry, from Cargo.lock.
struct Sources {
    checksums: BTreeMap<Id, String>,
}

impl Sources {
    fn read() -> Result<Sources> {
        let text = fs::read_to_string(paths::root().join("Cargo.lock")).context("cannot read Cargo.lock")?;
        let lock: toml::Table = text.parse().context("cannot read Cargo.lock")?;
        let packages = lock.get("package").and_then(toml::Value::as_array).into_iter().flatten();
        let checksum = |package: &toml::Value| {
            let text = |key: &str| package.get(key)?.as_str().map(str::to_owned);
            Some(((text("name")?, text("version")?), text("checksum")?))
        };
        Ok(Sources { checksums: packages.filter_map(checksum).collect() })
    }

    /// The address of a package: only what has a checksum is in the registry.
    fn purl(&self, id: &Id) -> String {
        let kind = if self.checksums.contains_key(id) { "cargo" } else { "generic" };
        // The only character in a name or a version that has to be escaped.
        format!("pkg:{kind}/{}@{}", id.0, id.1.replace('+', "%2B"))
    }
}

/// The policies that the program embeds.
fn policies() -> Result<Vec<String>> {
    let dir = paths::root().join("policies");
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let policies = entries.flatten().filter(|entry| entry.path().join("Cargo.toml").is_file());
    Ok(policies.map(|entry| format!("lockkeeper-policy-{}", entry.file_name().display())).collect())
}

/// Adds crates of the workspace and all crates that they need for a target. Returns the crates of the workspace.
fn add(parts: &mut Parts, names: &[String], target: &str) -> Result<BTreeSet<Id>> {
    let mut roots = BTreeSet::new();
    for (edges, inside) in [("normal,build", false), ("normal,no-proc-macro", true)] {
        // Cargo says what `cargo build` compiles for these crates, with which features.
        let mut tree =
            steps::cargo(&["tree", "--prefix", "depth", "--format", "\t{p}\t{l}", "--edges", edges]);
        tree.args(["--target", target]).args(names.iter().flat_map(|name| ["--package", name]));
        let tree = output(&mut tree)?;
        roots = read(parts, &tree, inside).context("cannot read the answer of `cargo tree`")?;
    }
    Ok(roots)
}

/// Reads lines such as `2`, `memchr v2.8.3`, `Unlicense OR MIT`, with tabs between them. The number is the depth in the tree.
fn read(parts: &mut Parts, tree: &str, inside: bool) -> Option<BTreeSet<Id>> {
    let mut path: Vec<Id> = Vec::new();
    let mut roots = BTreeSet::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let (depth, line) = line.split_once('\t')?;
        let (package, licence) = line.split_once('\t')?;
        let (name, version) = package.split_once(" v")?;
        let id = (name.to_owned(), version.split(' ').next()?.to_owned());
        path.truncate(depth.parse().ok()?);
        match path.last() {
            Some(parent) => drop(parts.get_mut(parent)?.needs.insert(id.clone())),
            None => drop(roots.insert(id.clone())),
        }
        path.push(id.clone());
        let part = parts.entry(id).or_default();
        part.inside |= inside;
        // A repeated crate has a star. Old manifests have a slash between licences.
        let licence = licence.trim_end_matches(" (*)").split('/').map(str::trim);
        part.licence = licence.collect::<Vec<_>>().join(" OR ");
    }
    Some(roots)
}

/// What a command prints.
fn output(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !out.status.success() {
        bail!("{}: {}", command.get_program().display(), String::from_utf8_lossy(&out.stderr).trim());
    }
    String::from_utf8(out.stdout).context("the answer is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_the_program_is_valid_and_has_what_is_in_the_program() {
        let bill = bill().expect("cargo knows the program");
        assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
        let components = bill["components"].as_array().expect("a list");
        let mut refs = BTreeSet::new();
        let own = &bill["metadata"]["component"];
        assert_eq!(
            (&own["name"], &own["version"]),
            (&"lockkeeper".into(), &env!("CARGO_PKG_VERSION").into())
        );
        for component in components.iter().chain([own]) {
            assert!(refs.insert(component["bom-ref"].as_str()), "listed twice: {component}");
            assert!(component["name"].is_string() && component["version"].is_string(), "{component}");
            let licence = component["licenses"][0]["expression"].as_str().unwrap_or_default();
            assert!(!licence.is_empty() && !licence.contains('/'), "not an SPDX expression: {component}");
            let checksum = component["hashes"][0]["content"].as_str().map(str::len);
            let is_registered = component["purl"].as_str().is_some_and(|purl| purl.starts_with("pkg:cargo/"));
            assert_eq!(checksum, is_registered.then_some(64), "{component}");
        }
        let dependencies = bill["dependencies"].as_array().expect("a list");
        assert_eq!(dependencies.len(), refs.len());
        for dependency in dependencies {
            let needs = dependency["dependsOn"].as_array().expect("a list");
            assert!(
                needs.iter().chain([&dependency["ref"]]).all(|name| refs.contains(&name.as_str())),
                "{dependency}"
            );
        }
        let component = |name: &str| components.iter().find(|component| component["name"] == name);

        let manifest =
            fs::read_to_string(paths::root().join("host/Cargo.toml")).expect("the proxy's manifest");
        let manifest: toml::Table = manifest.parse().expect("it is TOML");
        let version = manifest["dependencies"]["wasmtime"]["version"].as_str().expect("it is pinned");
        let wasmtime = component("wasmtime").expect("it executes policies");
        let version = version.trim_start_matches('=');
        assert_eq!(wasmtime["purl"], format!("pkg:cargo/wasmtime@{version}"));
        assert_eq!(wasmtime["licenses"][0]["expression"], "Apache-2.0 WITH LLVM-exception");

        let scope =
            |name: &str| component(name).map_or("missing", |it| it["scope"].as_str().unwrap_or_default());
        // A policy alone has postcard. serde_derive runs in the compiler; the tests alone use tempfile.
        let scopes =
            ["postcard", "lockkeeper-policy-default", "rust-std", "serde_derive", "tempfile"].map(scope);
        assert_eq!(scopes, ["required", "required", "required", "excluded", "missing"]);
        let program = dependencies.iter().find(|it| it["ref"] == own["bom-ref"]);
        let needs = program.and_then(|program| program["dependsOn"].as_array()).expect("it needs crates");
        assert!(needs.contains(&wasmtime["bom-ref"]), "{needs:?}");
    }

    #[test]
    fn a_tree_of_cargo_is_read_with_its_edges() {
        let mut parts = Parts::new();
        let tree = "0\ta v1.0.0 (/a)\tMIT\n1\tb v2.0.0+x\tMIT/Apache-2.0\n2\tc v3.0.0\t\n1\tc v3.0.0\t (*)\n";
        let id = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        assert_eq!(read(&mut parts, tree, true), Some([id("a", "1.0.0")].into()));
        let (b, c) = (id("b", "2.0.0+x"), id("c", "3.0.0"));
        assert_eq!(parts[&id("a", "1.0.0")].needs, [b.clone(), c.clone()].into());
        assert_eq!(
            (&parts[&b].needs, parts[&b].licence.as_str()),
            (&[c.clone()].into(), "MIT OR Apache-2.0")
        );
        assert_eq!((parts[&c].needs.len(), parts[&c].licence.as_str()), (0, ""));
    }
}
