//! The address of a listener: a TCP address, or the path of a Unix socket.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::fault::Location;
use super::reader::{Section, resolve};

/// What the address of a Unix socket begins with.
const UNIX: &str = "unix:";
/// The longest path that the kernel accepts, in bytes.
const MAX_SOCKET_PATH: usize = 107;
/// The owner and the group of a socket may connect.
const DEFAULT_MODE: u32 = 0o660;

/// Where a listener listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A TCP address. Port 0 is any free port.
    Tcp(SocketAddr),
    /// A Unix socket, which only processes of this machine can reach.
    Unix {
        /// The file of the socket.
        path: PathBuf,
        /// The mode of the file: who may connect needs the right to write.
        mode: u32,
    },
}

impl ListenAddress {
    /// Parses an address; a relative path starts from `place`.
    pub(super) fn parse(text: &str, place: &Location) -> Result<ListenAddress, String> {
        match socket_path(text) {
            Some(path) => {
                let path = resolve(path?, place);
                match path.as_os_str().len() {
                    0..=MAX_SOCKET_PATH => Ok(ListenAddress::Unix { path, mode: DEFAULT_MODE }),
                    bytes => Err(format!(
                        "is the path {}, which has {bytes} bytes; the path of a socket has {MAX_SOCKET_PATH} at most",
                        path.display()
                    )),
                }
            }
            None => text.parse().map(ListenAddress::Tcp).map_err(|_| {
                format!("`{text}` is not an address; must be like 127.0.0.1:7070, [::1]:7070 or unix:/run/locks.sock")
            }),
        }
    }

    /// The mode of the listener's socket, if it is a Unix socket.
    pub(super) fn mode(listener: &Section<'_>) -> u32 {
        listener.parsed("socket_mode", DEFAULT_MODE, |text, _| {
            let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && mode & 0o200 != 0);
            mode.ok_or_else(|| {
                format!("is `{text}`; must be like \"0660\", from \"0200\" to \"0777\": the owner can write")
            })
        })
    }

    /// The same address; the file of a Unix socket has this mode.
    pub(super) fn with_mode(self, mode: u32) -> ListenAddress {
        match self {
            ListenAddress::Unix { path, mode: _ } => ListenAddress::Unix { path, mode },
            tcp @ ListenAddress::Tcp(_) => tcp,
        }
    }

    /// Whether no other machine can reach the listener.
    pub fn is_of_this_machine(&self) -> bool {
        match self {
            ListenAddress::Tcp(address) => address.ip().is_loopback(),
            ListenAddress::Unix { .. } => true,
        }
    }

    /// Whether only one of two listeners with these addresses could listen.
    pub fn is_taken_by(&self, other: &ListenAddress) -> bool {
        match (self, other) {
            (ListenAddress::Tcp(one), ListenAddress::Tcp(other)) => one == other && one.port() != 0,
            (ListenAddress::Unix { path: one, .. }, ListenAddress::Unix { path: other, .. }) => one == other,
            _ => false,
        }
    }
}

impl From<SocketAddr> for ListenAddress {
    fn from(address: SocketAddr) -> ListenAddress {
        ListenAddress::Tcp(address)
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        ListenAddress::parse(text, &Location::File(PathBuf::new()))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => address.fmt(f),
            ListenAddress::Unix { path, mode: _ } => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

/// The path in the address of a Unix socket, such as `unix:/run/locks.sock` or `unix:///run/locks.sock`; `None` if the
/// text is no such address.
pub fn socket_path(text: &str) -> Option<Result<&str, String>> {
    let rest = text.strip_prefix(UNIX)?;
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        _ => rest,
    };
    Some(match path {
        "" => Err(format!("is `{text}`; must have a path, as in unix:/run/locks.sock")),
        // A name in the abstract namespace has no mode, so every user of the machine could connect.
        _ if path.starts_with('@') || path.contains('\0') => {
            Err(format!("is `{text}`; must be the path of a file, as in unix:/run/locks.sock"))
        }
        _ if path.starts_with("//") || path.ends_with('/') || Path::new(path).file_name().is_none() => {
            Err(format!("is `{text}`, which is no path of a file; must be like unix:/run/locks.sock"))
        }
        path => Ok(path),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(text: &str) -> String {
        match text.parse() {
            Ok(ListenAddress::Unix { path, mode: DEFAULT_MODE }) => path.display().to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn addresses_are_tcp_or_paths_of_sockets() {
        assert_eq!("[::1]:80".parse(), Ok(ListenAddress::Tcp("[::1]:80".parse().unwrap())));
        assert_eq!(path_of("unix:/run/a.sock"), "/run/a.sock");
        assert_eq!(path_of("unix:///run/a.sock"), "/run/a.sock");
        assert_eq!(path_of("unix:a.sock"), "a.sock");
        for wrong in [
            "unix:",
            "unix://",
            "unix://run/a",
            "unix:@a",
            "unix:/run/",
            "unix:..",
            "/run/a",
            "80",
            "localhost:1",
        ] {
            assert!(wrong.parse::<ListenAddress>().is_err(), "{wrong}");
        }
        let longest = format!("unix:/{}", "a".repeat(MAX_SOCKET_PATH - 1));
        assert!(longest.parse::<ListenAddress>().is_ok());
        let error = format!("{longest}a").parse::<ListenAddress>().unwrap_err();
        assert!(error.contains("108 bytes; the path of a socket has 107 at most"), "{error}");
    }

    #[test]
    fn a_relative_path_starts_from_the_file() {
        let place = Location::Line(PathBuf::from("/etc/locks/config.toml"), 1);
        let parsed = ListenAddress::parse("unix:a.sock", &place).unwrap();
        assert_eq!(parsed.to_string(), "unix:/etc/locks/a.sock");
    }

    #[test]
    fn two_listeners_need_two_addresses() {
        let taken = |one: &str, other: &str| {
            one.parse::<ListenAddress>().unwrap().is_taken_by(&other.parse().unwrap())
        };
        assert!(taken("127.0.0.1:1", "127.0.0.1:1") && taken("unix:/a", "unix:///a"));
        assert!(!taken("127.0.0.1:0", "127.0.0.1:0") && !taken("127.0.0.1:1", "127.0.0.1:2"));
        assert!(!taken("unix:/a", "unix:/b") && !taken("unix:/a", "127.0.0.1:1"));
    }
}
