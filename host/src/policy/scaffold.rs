//! Writes a new policy crate: `lockkeeper policy new NAME`.

use std::io;
use std::path::{Path, PathBuf};

const CARGO_TOML: &str = include_str!("scaffold/Cargo.toml.txt");
const LIB_RS: &str = include_str!("scaffold/lib.rs.txt");
const README: &str = include_str!("scaffold/README.md.txt");
const SCENARIO: &str = include_str!("scaffold/scenario.toml.txt");
const SDK_CARGO_TOML: &str = include_str!("scaffold/sdk.Cargo.toml.txt");
/// The files of the SDK, by their paths, and under `dependencies` those of its manifest.
const SDK: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/sdk.rs"));
/// The folder of the SDK in a new crate.
const SDK_FOLDER: &str = "lockkeeper-sdk";

/// Why there is no new crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScaffoldError {
    /// The name is not allowed for a policy.
    #[error(
        "`{name}` cannot name a policy: it must begin with a letter and hold only a-z, 0-9, `-` and `_`, at most 64"
    )]
    Name {
        /// The refused name.
        name: String,
    },
    /// The folder of the new crate already exists.
    #[error("{} exists: name another folder, or remove it", .path.display())]
    Exists {
        /// The path of the folder.
        path: PathBuf,
    },
    /// A file of the crate cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Writes a policy crate named `name` to the new folder `dir/name`, and returns that folder. It
/// builds and passes its test at once.
///
/// The SDK of this version lies in a folder of the crate: neither a checkout nor a registry is needed for it.
///
/// # Errors
/// See [`ScaffoldError`]. Nothing that exists is overwritten.
pub fn scaffold(name: &str, dir: &Path) -> Result<PathBuf, ScaffoldError> {
    if !is_name(name) {
        return Err(ScaffoldError::Name { name: name.to_owned() });
    }
    let root = dir.join(name);
    if root.exists() {
        return Err(ScaffoldError::Exists { path: root });
    }
    let fill = |text: &str| {
        let text = text.replace("{NAME}", name).replace("{TYPE}", &type_name(name));
        text.replace("{VERSION}", env!("CARGO_PKG_VERSION"))
    };
    write(&root.join("Cargo.toml"), &fill(CARGO_TOML))?;
    write(&root.join("src/lib.rs"), &fill(LIB_RS))?;
    write(&root.join("README.md"), &fill(README))?;
    write(&root.join("scenarios/orders.toml"), SCENARIO)?;
    write(&root.join(".gitignore"), "target/\n*.wasm\n")?;
    write_sdk(&root.join(SDK_FOLDER))?;
    Ok(root)
}

fn is_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
}

/// `orders-by-tenant` is `OrdersByTenant`.
fn type_name(name: &str) -> String {
    let words = name.split(['-', '_']).map(|word| match word.split_at_checked(1) {
        Some((first, rest)) => first.to_uppercase() + rest,
        None => String::new(),
    });
    words.collect()
}

fn write_sdk(folder: &Path) -> Result<(), ScaffoldError> {
    let mut manifest = SDK_CARGO_TOML.replace("{VERSION}", env!("CARGO_PKG_VERSION"));
    for (path, text) in SDK {
        match *path {
            "dependencies" => manifest += text,
            path => write(&folder.join(path), text)?,
        }
    }
    write(&folder.join("Cargo.toml"), &manifest)
}

fn write(path: &Path, text: &str) -> Result<(), ScaffoldError> {
    let fail = |source| ScaffoldError::Write { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(fail)?;
    }
    std::fs::write(path, text).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scaffolded_crate_has_its_name_everywhere_and_overwrites_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let root = scaffold("orders-by-tenant", dir.path()).unwrap();
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("name = \"orders-by-tenant\"") && manifest.contains("path = "),
            "{manifest}"
        );
        let lib = std::fs::read_to_string(root.join("src/lib.rs")).unwrap();
        assert!(lib.contains("export!(OrdersByTenant)"));
        assert!(!(manifest + &lib).contains("{NAME}"));
        assert!(matches!(scaffold("orders-by-tenant", dir.path()), Err(ScaffoldError::Exists { .. })));
        for name in ["", "9a", "../x", "A", "a b"] {
            assert!(matches!(scaffold(name, dir.path()), Err(ScaffoldError::Name { .. })), "{name}");
        }
    }
}
