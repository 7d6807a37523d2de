//! The scripts that run an unpacked server on its own libraries.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Kind;

/// Raised when the folder is laid out differently: older ones are then made anew.
pub const LAYOUT: &str = "layout 1";

/// Writes `bin/<daemon>`, and for a database `bin/<client>`, for what is unpacked under `home/root`.
pub fn write(home: &Path, kind: Kind) -> Result<()> {
    let root = home.join("root");
    let bin = home.join("bin");
    fs::create_dir_all(&bin)?;
    let launch = launch(&root)?;
    let plain = |name: &str, program: &str| {
        let program = first(&root, &[program])?;
        executable(&bin.join(name), &PLAIN.replace("@LAUNCH@", &launch.replace("@PROGRAM@", &program)))
    };
    match kind {
        Kind::Mysql => plain("mysql", "usr/bin/mysql")?,
        Kind::Mariadb | Kind::MariadbNext | Kind::Galera => plain("mariadb", "usr/bin/mariadb")?,
        Kind::Nginx => return plain("nginx", "usr/sbin/nginx"),
        Kind::Faketime | Kind::Redis | Kind::Registry => {
            return plain(kind.daemon(), &format!("usr/bin/{}", kind.daemon()));
        }
    }
    executable(&bin.join(kind.daemon()), &database(&root, &launch, kind.daemon())?)
}

/// The script that starts a database with the files that came with it.
fn database(root: &Path, launch: &str, daemon: &str) -> Result<String> {
    let server = first(root, &[&format!("usr/sbin/{daemon}"), &format!("usr/libexec/{daemon}")])?;
    let share = first(root, &["usr/share/mysql", "usr/share/mariadb"])?;
    let plugins = first(root, &["usr/lib/mysql/plugin", "usr/lib64/mysql/plugin"]);
    // A server without plugins must not look for them in the machine's own folder.
    let plugins = plugins.unwrap_or_else(|_| share.clone());
    let charsets = first(root, &["usr/share/mysql/charsets", "usr/share/mariadb/charsets"])?;
    Ok(SERVER
        .replace("@LAUNCH@", &launch.replace("@PROGRAM@", &server))
        .replace("@PLUGINS@", &plugins)
        .replace("@SHARE@", &share)
        .replace("@CHARSETS@", &charsets))
}

const SERVER: &str = r#"#!/bin/sh
# Made by `cargo xtask servers`: runs the server on the libraries that came with it. The folder may
# be moved. The server takes this shell's place, so its pid is the one that was started.
self=$(readlink -f -- "$0") || exit 1
root=${self%/*/*}/root
# These options count only as the first one.
case ${1-} in
--no-defaults | --defaults-* | --print-defaults) first=$1 && shift ;;
*) first= ;;
esac
@LAUNCH@ ${first:+"$first"} \
    --basedir="$root/usr" --plugin-dir="$root/@PLUGINS@" \
    --lc-messages-dir="$root/@SHARE@" --character-sets-dir="$root/@CHARSETS@" "$@"
"#;

const PLAIN: &str = r#"#!/bin/sh
# Made by `cargo xtask`: runs a program on the libraries that came with it, in this shell's place.
self=$(readlink -f -- "$0") || exit 1
root=${self%/*/*}/root
@LAUNCH@ "$@"
"#;

/// The command that starts `@PROGRAM@` through the loader of the unpacked C library, which finds
/// libraries in the unpacked folders alone: mixed with the machine's they would not fit.
fn launch(root: &Path) -> Result<String> {
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let loader = match std::env::consts::ARCH {
        "x86_64" => "ld-linux-x86-64.so.2",
        "aarch64" => "ld-linux-aarch64.so.1",
        other => bail!("no servers are known for {other}: only x86_64 and aarch64 are"),
    };
    let dirs = [format!("usr/lib/{triple}"), format!("lib/{triple}")];
    let candidates: Vec<String> = dirs.iter().map(|dir| format!("{dir}/{loader}")).collect();
    let loader = first(root, &candidates.iter().map(String::as_str).collect::<Vec<_>>())?;

    let mut libraries: Vec<String> = dirs.to_vec();
    libraries.extend(["usr/lib/mysql/private".into(), "usr/lib".into(), "lib".into()]);
    libraries.retain(|dir| root.join(dir).is_dir());
    let path: Vec<String> = libraries.iter().map(|dir| format!("$root/{dir}")).collect();
    Ok(format!(
        "exec \"$root/{loader}\" --inhibit-cache \\\n    --library-path \"{}\" \\\n    \"$root/@PROGRAM@\"",
        path.join(":")
    ))
}

/// The first of these paths below `root` that exists, as it was given.
fn first(root: &Path, candidates: &[&str]) -> Result<String> {
    let found = candidates.iter().find(|path| root.join(path).exists());
    found.map(|path| (*path).to_owned()).with_context(|| {
        let wanted: Vec<PathBuf> = candidates.iter().map(PathBuf::from).collect();
        format!("the packages have none of {wanted:?}")
    })
}

fn executable(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
