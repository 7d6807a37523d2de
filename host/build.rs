//! Builds the shipped policies into components that the binary carries.

use std::path::{Path, PathBuf};

const POLICIES: [&str; 3] = ["default", "fair-groups", "backoff"];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for watched in ["policies", "sdk", "Cargo.lock", "rust-toolchain.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let target = target_dir(&out).join("policies");
    for name in POLICIES {
        match lockkeeper_builder::build(&root.join("policies").join(name), Some(&target)) {
            Ok(component) => {
                let path = out.join(format!("{name}.wasm"));
                std::fs::write(&path, component).expect("OUT_DIR can be written to");
            }
            Err(error) => {
                println!("cargo::error=cannot build the policy {name}: {error}");
                return;
            }
        }
    }
}

/// The target directory that holds `out`: the nearest folder above it that cargo has marked.
fn target_dir(out: &Path) -> &Path {
    out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()).unwrap_or(out)
}
