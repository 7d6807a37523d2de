//! Builds the shipped policies into modules that the binary carries, and lists the files of the SDK, which it carries, too.

use std::path::{Path, PathBuf};

const POLICIES: [&str; 3] = ["default", "fair-groups", "backoff"];

fn main() {
    // Asked when it runs: a checkout that was moved has another folder than the one that this was compiled in.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let root = Path::new(&package).join("..");
    for watched in ["policies", "sdk", "Cargo.lock", "rust-toolchain.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("sdk.rs"), sdk_files(&root.join("sdk"))).expect("OUT_DIR can be written to");
    let target = target_dir(&out).join("policies");
    for name in POLICIES {
        match lockkeeper_builder::module(&root.join("policies").join(name), Some(&target)) {
            Ok(module) => {
                let path = out.join(format!("{name}.wasm"));
                std::fs::write(&path, module).expect("OUT_DIR can be written to");
            }
            Err(error) => {
                println!("cargo::error=cannot build the policy {name}: {error}");
                return;
            }
        }
    }
}

/// An array of the SDK's files for `policy/scaffold.rs`: paths, and what is in them.
fn sdk_files(sdk: &Path) -> String {
    let mut folders = vec![sdk.join("src"), sdk.join("wit")];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the SDK is there") {
            let path = entry.expect("the SDK can be read").path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let line = |path: &PathBuf| {
        let below = path.strip_prefix(sdk).expect("it was found below the SDK");
        format!("({below:?}, include_str!({path:?})),")
    };
    let lines: Vec<String> = files.iter().map(line).chain([dependencies(sdk)]).collect();
    format!("[{}]", lines.concat())
}

/// The dependencies of the SDK, without what they inherit from the workspace.
fn dependencies(sdk: &Path) -> String {
    let read = |path: PathBuf| std::fs::read_to_string(path).expect("a manifest");
    let (own, workspace) = (read(sdk.join("Cargo.toml")), read(sdk.join("../Cargo.toml")));
    let (_, own) = own.split_once("[dependencies]\n").expect("the SDK has dependencies");
    let own = own.split("\n[").next().unwrap_or_default();
    let line = |line: &str| match line.split_once(".workspace = true") {
        None => line.to_owned(),
        Some((name, _)) => {
            let is_of = |line: &&str| line.starts_with(&format!("{name} = "));
            workspace.lines().find(is_of).expect("the workspace has the dependency").to_owned()
        }
    };
    let lines: Vec<String> = own.lines().map(line).collect();
    format!("(\"dependencies\", {:?}),", lines.join("\n") + "\n")
}

/// The target directory that holds `out`: the nearest folder above it that cargo has marked.
fn target_dir(out: &Path) -> &Path {
    out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()).unwrap_or(out)
}
