//! Which database server the proxy will run on, and what to do on a machine that has none.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::sources::Machine;
use super::{Kind, ensure, places};
use crate::paths::find_program;

/// What the proxy's server needs before the proxy can start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// Nothing: the configuration names a server that runs, or the program of one.
    Named,
    /// Nothing: this program is installed, or was fetched before.
    Installed(PathBuf),
    /// This server is fetched into target/servers.
    Fetched(Kind),
    /// The user must install one, because none can be fetched here. The text says how.
    Missing(String),
}

/// What a machine has, as far as the choice depends on it.
struct Programs {
    /// The servers that are there.
    servers: Vec<(Kind, PathBuf)>,
    /// The servers that apt can fetch.
    fetchable: Vec<Kind>,
    /// The machine's package manager.
    manager: Option<Manager>,
}

/// A package manager: its program, and the commands that install MySQL, if it has MySQL, and MariaDB.
type Manager = (&'static str, Option<&'static str>, &'static str);

const MANAGERS: [Manager; 5] = [
    ("apt-get", Some("sudo apt-get install mysql-server"), "sudo apt-get install mariadb-server"),
    ("dnf", Some("sudo dnf install mysql-server"), "sudo dnf install mariadb-server"),
    ("zypper", None, "sudo zypper install mariadb"),
    ("pacman", None, "sudo pacman -S mariadb"),
    ("apk", None, "sudo apk add mariadb"),
];

impl Server {
    /// Looks at this machine, for these values of `store.url` and `store.managed.server`.
    pub fn choose(url: &str, server: &str) -> Server {
        choose(url, server, Programs::of_this_machine)
    }

    /// Fetches the server if it is to be fetched. Fails if the user must install one.
    pub fn ensure(&self) -> Result<()> {
        match self {
            Server::Named | Server::Installed(_) => Ok(()),
            Server::Fetched(kind) => ensure(*kind, false).map(|_| ()),
            Server::Missing(what_to_do) => bail!("{what_to_do}"),
        }
    }
}

fn choose(url: &str, server: &str, programs: impl Fn() -> Programs) -> Server {
    let kinds = match (url, server) {
        ("managed", "auto") => &[Kind::Mysql, Kind::Mariadb][..],
        ("managed", "mysql") => &[Kind::Mysql],
        ("managed", "mariadb") => &[Kind::Mariadb],
        _ => return Server::Named,
    };
    let programs = programs();
    let installed = |kind: &Kind| programs.servers.iter().find(|(other, _)| other == kind);
    if let Some((_, path)) = kinds.iter().find_map(installed) {
        return Server::Installed(path.clone());
    }
    match kinds.iter().find(|kind| programs.fetchable.contains(kind)) {
        Some(kind) => Server::Fetched(*kind),
        None => {
            let what_to_do = what_to_do(kinds, programs.manager);
            Server::Missing(format!(
                "this machine has no {}, and cargo xtask can fetch one only on Debian and Ubuntu.\n{what_to_do}",
                names(kinds)
            ))
        }
    }
}

/// How to get one of these servers without this program.
pub fn instead(kinds: &[Kind]) -> String {
    what_to_do(kinds, manager())
}

fn what_to_do(kinds: &[Kind], manager: Option<Manager>) -> String {
    let command = |kind: &Kind| match (manager?, kind) {
        ((_, mysql, _), Kind::Mysql) => mysql,
        ((_, _, mariadb), _) => Some(mariadb),
    };
    let commands: Vec<String> =
        kinds.iter().filter_map(command).map(|command| format!("`{command}`")).collect();
    let how = match commands.is_empty() {
        true => "with this machine's package manager".to_owned(),
        false => format!("with {}", commands.join(" or ")),
    };
    format!(
        "Install {} {how}; it need not run, because the proxy starts a private server.\n\
         Or name a server that runs: `cargo xtask up --store mysql://USER:PASSWORD@HOST:3306/DATABASE`.",
        names(kinds)
    )
}

fn names(kinds: &[Kind]) -> String {
    let names: Vec<String> =
        kinds.iter().map(|kind| format!("{} ({})", kind.name(), kind.daemon())).collect();
    names.join(" or ")
}

fn manager() -> Option<Manager> {
    MANAGERS.into_iter().find(|(program, ..)| find_program(program).is_some())
}

impl Programs {
    fn of_this_machine() -> Programs {
        let kinds = [Kind::Mysql, Kind::Mariadb];
        let path = std::env::var_os("PATH").unwrap_or_default();
        let there = |kind: Kind| {
            let mut paths = places::candidates(kind.daemon(), &path).chain([kind.fetched()]);
            Some((kind, paths.find(|path| path.is_file())?))
        };
        let machine = Machine::detect();
        let fetchable = |kind: &Kind| machine.as_ref().is_ok_and(|machine| machine.sources(*kind).is_ok());
        Programs {
            servers: kinds.into_iter().filter_map(there).collect(),
            fetchable: kinds.into_iter().filter(fetchable).collect(),
            manager: manager(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(servers: &[(Kind, &str)], fetchable: &[Kind], manager: &str) -> impl Fn() -> Programs {
        let servers: Vec<_> = servers.iter().map(|(kind, path)| (*kind, PathBuf::from(path))).collect();
        let fetchable = fetchable.to_vec();
        let manager = MANAGERS.into_iter().find(|(program, ..)| *program == manager);
        move || Programs { servers: servers.clone(), fetchable: fetchable.clone(), manager }
    }

    #[test]
    fn a_server_that_is_named_or_installed_is_used_as_it_is() {
        let none = machine(&[], &[], "");
        assert_eq!(choose("mysql://root@db/lockkeeper", "auto", &none), Server::Named);
        assert_eq!(choose("managed", "/opt/mysql/bin/mysqld", &none), Server::Named);
        let mariadb = machine(&[(Kind::Mariadb, "/usr/bin/mariadbd")], &[Kind::Mysql], "apt-get");
        assert_eq!(choose("managed", "auto", &mariadb), Server::Installed("/usr/bin/mariadbd".into()));
        assert_eq!(choose("managed", "mysql", &mariadb), Server::Fetched(Kind::Mysql));
        let both = [(Kind::Mariadb, "/usr/bin/mariadbd"), (Kind::Mysql, "/usr/sbin/mysqld")];
        assert_eq!(
            choose("managed", "auto", machine(&both, &[], "")),
            Server::Installed("/usr/sbin/mysqld".into())
        );
    }

    #[test]
    fn a_server_is_fetched_if_apt_offers_it() {
        let debian = machine(&[], &[Kind::Mysql, Kind::Mariadb], "apt-get");
        assert_eq!(choose("managed", "auto", &debian), Server::Fetched(Kind::Mysql));
        assert_eq!(choose("managed", "mariadb", &debian), Server::Fetched(Kind::Mariadb));
        let ubuntu = machine(&[], &[Kind::Mariadb], "apt-get");
        assert_eq!(choose("managed", "auto", &ubuntu), Server::Fetched(Kind::Mariadb));
    }

    #[test]
    fn a_missing_server_is_reported_with_the_package_to_install() {
        let text = |machine: &dyn Fn() -> Programs, server: &str| match choose("managed", server, machine) {
            Server::Missing(text) => text,
            other => panic!("{other:?}"),
        };
        let either = text(&machine(&[], &[], "dnf"), "auto");
        let commands = "`sudo dnf install mysql-server` or `sudo dnf install mariadb-server`";
        assert!(either.contains(commands), "{either}");
        let fedora = text(&machine(&[], &[], "dnf"), "mariadb");
        assert!(fedora.contains("with `sudo dnf install mariadb-server`;"), "{fedora}");
        let ubuntu = text(&machine(&[], &[Kind::Mariadb], "apt-get"), "mysql");
        assert!(
            ubuntu.contains("no MySQL (mysqld),") && ubuntu.contains("`sudo apt-get install mysql-server`"),
            "{ubuntu}"
        );
        let arch = text(&machine(&[], &[], "pacman"), "auto");
        assert!(arch.contains("with `sudo pacman -S mariadb`;"), "{arch}");
        let unknown = text(&machine(&[], &[], ""), "auto");
        assert!(unknown.contains("package manager") && unknown.contains("--store"), "{unknown}");
    }
}
