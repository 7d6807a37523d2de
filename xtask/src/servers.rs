//! `cargo xtask servers`: the real MySQL and MariaDB, without root and without touching the system; for the
//! bench, nginx and Redis in the same way.
//!
//! apt fetches the packages with a private state folder (so the machine's own is neither read nor
//! written, and signatures are checked as ever), `dpkg-deb` unpacks them into a folder, and a small
//! script runs the server on the C library that came along, which may be newer than the machine's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::paths;

mod apt;
mod choice;
/// Where the proxy looks for servers.
#[path = "../../host/src/mysql/managed/places.rs"]
mod places;
mod sources;
mod wrapper;

pub use choice::Server;

/// Gets the real servers that the tests need, MySQL, MariaDB and a registry, into target/servers, without root.
///
/// Needs Debian or a kin of it (apt-get and dpkg-deb). MariaDB and the registry come from the machine's own suite,
/// MySQL from Debian's sid. `cargo xtask torture` gets what it needs beside them. The second run does nothing; an interrupted one goes on where it was.
#[derive(clap::Args)]
pub struct Args {
    /// Get only this one.
    #[arg(long, value_enum)]
    only: Option<Kind>,
    /// Fetch again, even if the server is there: newer packages may have come out.
    #[arg(long)]
    refresh: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    Mysql,
    Mariadb,
    // What `cargo xtask torture` needs, and nothing else.
    /// MariaDB of Debian's sid, which the next release of Debian will have.
    #[value(skip)]
    MariadbNext,
    /// The machine's own MariaDB with the library of Galera clusters.
    #[value(skip)]
    Galera,
    /// A library that sets the clock of one program.
    #[value(skip)]
    Faketime,
    /// What the bench compares guarded routes with; nothing else needs it.
    #[value(skip)]
    Nginx,
    /// What the bench compares delegated keys with; nothing else needs it.
    #[value(skip)]
    Redis,
    /// What the tests publish components in.
    Registry,
}

impl Kind {
    /// What the tests need.
    pub const OF_THE_TESTS: [Kind; 3] = [Kind::Mysql, Kind::Mariadb, Kind::Registry];

    pub fn dir(self) -> &'static str {
        match self {
            Kind::Mysql => "mysql",
            Kind::Mariadb => "mariadb",
            Kind::MariadbNext => "mariadb-next",
            Kind::Galera => "galera",
            Kind::Faketime => "faketime",
            Kind::Nginx => "nginx",
            Kind::Redis => "redis",
            Kind::Registry => "registry",
        }
    }

    /// The name of the product.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Mysql => "MySQL",
            Kind::Mariadb | Kind::MariadbNext | Kind::Galera => "MariaDB",
            Kind::Faketime => "faketime",
            Kind::Nginx => "nginx",
            Kind::Redis => "Redis",
            Kind::Registry => "a registry",
        }
    }

    /// The program.
    pub fn daemon(self) -> &'static str {
        match self {
            Kind::Mysql => "mysqld",
            Kind::Mariadb | Kind::MariadbNext | Kind::Galera => "mariadbd",
            Kind::Faketime => "faketime",
            Kind::Nginx => "nginx",
            Kind::Redis => "redis-server",
            Kind::Registry => "docker-registry",
        }
    }

    /// Where this program puts it.
    pub fn fetched(self) -> PathBuf {
        paths::servers().join(self.dir()).join("bin").join(self.daemon())
    }

    fn packages(self) -> &'static [&'static str] {
        match self {
            Kind::Mysql => &["mysql-server-core", "mysql-client-core"],
            Kind::Mariadb | Kind::MariadbNext => &["mariadb-server-core", "mariadb-client-core"],
            Kind::Galera => &["mariadb-server-core", "mariadb-client-core", "galera-4"],
            Kind::Faketime => &["faketime"],
            Kind::Nginx => &["nginx"],
            Kind::Redis => &["redis-server"],
            Kind::Registry => &["docker-registry"],
        }
    }

    /// What makes the program say its version.
    fn version_option(self) -> &'static str {
        match self {
            Kind::Nginx => "-v",
            _ => "--version",
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    for kind in args.only.map_or(Kind::OF_THE_TESTS.to_vec(), |kind| vec![kind]) {
        ensure(kind, args.refresh)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Gets a server unless it is there, and returns the path of its program.
pub fn ensure(kind: Kind, refresh: bool) -> Result<PathBuf> {
    let servers = paths::servers();
    fs::create_dir_all(&servers).with_context(|| format!("cannot create {}", servers.display()))?;
    let lock = File::create(servers.join(".lock"))?;
    lock.lock().context("cannot lock target/servers")?;

    let home = servers.join(kind.dir());
    let program = kind.fetched();
    let stamp = home.join("complete");
    if !refresh && let Some(version) = stamped(&stamp) {
        println!("{}: {version} is in {}", kind.dir(), home.display());
        return Ok(program);
    }
    let started = Instant::now();
    println!("{}: not in {} yet", kind.dir(), home.display());
    let version = install(kind, &servers, &home).with_context(|| advice(kind))?;
    println!("{}: {version} is ready after {:.0} s", kind.dir(), started.elapsed().as_secs_f32());
    Ok(program)
}

/// The library that sets a program's clock, once [`Kind::Faketime`] is there.
pub fn faketime() -> Result<PathBuf> {
    let libraries = paths::servers().join(Kind::Faketime.dir()).join("root/usr/lib");
    let library = format!("{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    let path = libraries.join(library);
    if !path.is_file() {
        bail!("the package faketime has no {}", path.display());
    }
    Ok(path)
}

/// The version that a finished installation recorded, if it was made as this program makes it.
fn stamped(stamp: &Path) -> Option<String> {
    let text = fs::read_to_string(stamp).ok()?;
    let version = text.strip_prefix(&format!("{}\n", wrapper::LAYOUT))?;
    Some(version.trim().to_owned())
}

/// Fetches, unpacks beside the final place, tries it, and only then moves it there.
fn install(kind: Kind, servers: &Path, home: &Path) -> Result<String> {
    let machine = sources::Machine::detect()?;
    let work = servers.join(format!(".{}.fetch", kind.dir()));
    let debs = apt::fetch(&machine, kind, &work)?;

    let new = servers.join(format!(".{}.new", kind.dir()));
    remove(&new)?;
    unpack(kind, &debs, &new.join("root"))?;
    wrapper::write(&new, kind)?;
    let version = version_of(&new.join("bin").join(kind.daemon()), kind.version_option())?;
    // Written last inside the new folder, which then appears as a whole.
    fs::write(new.join("complete"), format!("{}\n{version}\n", wrapper::LAYOUT))?;
    remove(home)?;
    fs::rename(&new, home).with_context(|| format!("cannot move {} into place", new.display()))?;
    remove(&work)?;
    Ok(version)
}

fn unpack(kind: Kind, debs: &[PathBuf], root: &Path) -> Result<()> {
    println!("{}: unpacking {} packages", kind.dir(), debs.len());
    fs::create_dir_all(root)?;
    for deb in debs {
        let out = Command::new("dpkg-deb").arg("--extract").arg(deb).arg(root).output();
        let out = out.context("cannot run dpkg-deb")?;
        if !out.status.success() {
            bail!("dpkg-deb cannot unpack {}: {}", deb.display(), apt::tail(&out.stderr));
        }
    }
    for unused in ["usr/share/doc", "usr/share/man", "usr/share/lintian"] {
        remove(&root.join(unused))?;
    }
    Ok(())
}

fn version_of(program: &Path, option: &str) -> Result<String> {
    let out = Command::new(program).arg(option).output();
    let out = out.with_context(|| format!("cannot run {}", program.display()))?;
    if !out.status.success() {
        bail!("{} {option} fails: {}", program.display(), apt::tail(&out.stderr));
    }
    // nginx says it where other programs complain.
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    let after = ["Ver ", "nginx/", "Version ", " v=", "docker/distribution "]
        .into_iter()
        .find_map(|name| text.split(name).nth(1));
    let version = after.and_then(|rest| rest.split_whitespace().next());
    Ok(version.unwrap_or("unknown version").to_owned())
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

fn advice(kind: Kind) -> String {
    let instead = match kind {
        Kind::Mysql | Kind::Mariadb | Kind::MariadbNext => choice::instead(&[kind]),
        Kind::Galera => "Install `mariadb-server` and `galera-4` with this machine's package manager.".into(),
        Kind::Faketime | Kind::Nginx | Kind::Redis | Kind::Registry => {
            format!("Install `{}` with this machine's package manager.", kind.packages().join("` and `"))
        }
    };
    format!("cannot get {}. {instead}\nWhy it cannot be fetched", kind.daemon())
}
