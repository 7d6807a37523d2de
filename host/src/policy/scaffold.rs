//! Writes a new policy crate: `lockkeeper policy new NAME`.

use std::io;
use std::path::{Path, PathBuf};

const CARGO_TOML: &str = include_str!("scaffold/Cargo.toml.txt");
const LIB_RS: &str = include_str!("scaffold/lib.rs.txt");
const README: &str = include_str!("scaffold/README.md.txt");
/// Where this binary was built, the SDK lies beside the proxy.
const OWN_SDK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk");

/// Why there is no new crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScaffoldError {
    #[error(
        "`{name}` cannot name a policy: it must begin with a letter and hold only a-z, 0-9, `-` and `_`, at most 64"
    )]
    Name { name: String },
    #[error("{} exists: name another folder, or remove it", .path.display())]
    Exists { path: PathBuf },
    #[error("there is no lockkeeper-sdk in {}: name the folder `sdk` of a checkout", .path.display())]
    NoSdk { path: PathBuf },
    #[error("cannot write {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Writes a policy crate named `name` to the new folder `dir/name`, and returns that folder. It
/// builds and passes its test at once.
///
/// Its SDK is the one in `sdk`; without it, the one of the checkout that this binary was built from
/// where that still exists, else the published one of this version.
///
/// # Errors
/// See [`ScaffoldError`]. Nothing that exists is overwritten.
pub fn scaffold(name: &str, dir: &Path, sdk: Option<&Path>) -> Result<PathBuf, ScaffoldError> {
    if !is_name(name) {
        return Err(ScaffoldError::Name { name: name.to_owned() });
    }
    let root = dir.join(name);
    if root.exists() {
        return Err(ScaffoldError::Exists { path: root });
    }
    let fill = |text: &str| text.replace("{NAME}", name).replace("{TYPE}", &type_name(name));
    let manifest = fill(CARGO_TOML).replace("{SDK}", &sdk_dependency(sdk)?);
    write(&root.join("Cargo.toml"), &manifest)?;
    write(&root.join("src/lib.rs"), &fill(LIB_RS))?;
    write(&root.join("README.md"), &fill(README))?;
    write(&root.join(".gitignore"), "target/\n*.wasm\n")?;
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

fn sdk_dependency(sdk: Option<&Path>) -> Result<String, ScaffoldError> {
    let path = sdk.unwrap_or(Path::new(OWN_SDK));
    match path.canonicalize() {
        Ok(found) if found.join("wit/policy.wit").is_file() => {
            // A TOML string knows the same escapes as a debug string for any usual path.
            Ok(format!("{{ path = {:?} }}", found.display().to_string()))
        }
        _ if sdk.is_some() => Err(ScaffoldError::NoSdk { path: path.to_owned() }),
        _ => Ok(format!("\"{}\"", env!("CARGO_PKG_VERSION"))),
    }
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
    fn a_new_crate_is_named_throughout_and_overwrites_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let root = scaffold("orders-by-tenant", dir.path(), None).unwrap();
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("name = \"orders-by-tenant\"") && manifest.contains("path = "),
            "{manifest}"
        );
        let lib = std::fs::read_to_string(root.join("src/lib.rs")).unwrap();
        assert!(lib.contains("export!(OrdersByTenant)"));
        assert!(!(manifest + &lib).contains("{NAME}"));
        assert!(matches!(scaffold("orders-by-tenant", dir.path(), None), Err(ScaffoldError::Exists { .. })));
        for name in ["", "9a", "../x", "A", "a b"] {
            assert!(matches!(scaffold(name, dir.path(), None), Err(ScaffoldError::Name { .. })), "{name}");
        }
        let missing = scaffold("a", dir.path(), Some(dir.path()));
        assert!(matches!(missing, Err(ScaffoldError::NoSdk { .. })));
    }
}
