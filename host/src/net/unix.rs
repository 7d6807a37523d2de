//! Listening Unix sockets: their files, and the users who connect.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

use super::peer::{PEER_TIMEOUT, PeerAddress};
use super::timed::TimedStream;

/// How often a listener tries to lock the folder of its socket, while other listeners create sockets in that folder.
const FOLDER_TRIES: u32 = 100;
/// The pause between two tries.
const FOLDER_PAUSE: Duration = Duration::from_millis(20);

/// A listening Unix socket. Its file is removed when this is dropped.
pub(super) struct UnixSocket {
    pub listener: UnixListener,
    pub path: PathBuf,
    pub mode: u32,
    /// The file system and the number of the file.
    file: (u64, u64),
}

impl UnixSocket {
    /// Listens at a path. Replaces a socket at which no process listens. `backlog`: how many connections may wait to be
    /// accepted.
    pub fn bind(path: &Path, mode: u32, backlog: u32) -> io::Result<UnixSocket> {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // Until the end of this function: a socket that another proxy has just created is not taken for a dead one.
        let _folder = lock(folder)?;
        clear(path)?;
        let address = SockAddr::unix(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&address)?;
        // Nobody can connect before the socket listens, so the mode applies to the first client, too.
        let listening = fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .and_then(|()| socket.listen(backlog.cast_signed()))
            .and_then(|()| socket.set_nonblocking(true))
            .and_then(|()| UnixListener::from_std(OwnedFd::from(socket).into()))
            .and_then(|listener| Ok((listener, fs::symlink_metadata(path)?)));
        let (listener, file) = listening.inspect_err(|_| {
            let _ = fs::remove_file(path);
        })?;
        Ok(UnixSocket { listener, path: path.to_owned(), mode, file: (file.dev(), file.ino()) })
    }

    /// The next connection.
    pub async fn accept(&self) -> io::Result<(TimedStream, PeerAddress)> {
        let (stream, _unnamed) = self.listener.accept().await?;
        let client = stream.peer_cred()?;
        Ok((
            TimedStream::new(stream, PEER_TIMEOUT),
            PeerAddress::Unix { uid: client.uid(), pid: client.pid() },
        ))
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // The file may be that of another process by now.
        let is_own = |file: &fs::Metadata| (file.dev(), file.ino()) == self.file;
        if fs::symlink_metadata(&self.path).is_ok_and(|file| is_own(&file)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Locks a folder against other proxies that create a socket in it, until the file is closed.
fn lock(folder: &Path) -> io::Result<File> {
    let context = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
    let file = File::open(folder).map_err(context)?;
    for _ in 0..FOLDER_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => std::thread::sleep(FOLDER_PAUSE),
            Err(TryLockError::Error(error)) => return Err(context(error)),
        }
    }
    Err(context(io::Error::new(ErrorKind::TimedOut, "another process has locked the folder (flock)")))
}

/// Removes a socket that a dead process has left.
fn clear(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(
                ErrorKind::AlreadyExists,
                "the path leads to a file that is not a socket",
            ));
        }
        Ok(_) => {}
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // With a full backlog, the call would wait.
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        Ok(()) | Err(_) => {
            Err(io::Error::new(ErrorKind::AddrInUse, "another process listens at this socket"))
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_socket_has_its_mode_and_its_file_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        for mode in [0o600, 0o666] {
            let socket = UnixSocket::bind(&path, mode, 16).unwrap();
            assert_eq!(mode_of(&path), mode);
            drop(socket);
            assert!(!path.exists());
        }
    }

    #[tokio::test]
    async fn a_socket_of_a_dead_process_is_replaced_and_one_of_a_live_process_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "nobody has removed it");
        let first = UnixSocket::bind(&path, 0o600, 16).unwrap();
        let second = UnixSocket::bind(&path, 0o600, 16).err().expect("it is in use");
        assert_eq!(second.kind(), ErrorKind::AddrInUse);
        assert!(second.to_string().contains("another process listens"), "{second}");
        UnixStream::connect(&path).await.expect("the first one still listens");
        drop(first);
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        fs::write(&path, "precious").unwrap();
        let error = UnixSocket::bind(&path, 0o600, 16).err().expect("it is refused");
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let error = UnixSocket::bind(&folder.path().join("b/a.sock"), 0o600, 16).err().expect("no folder");
        assert!(error.to_string().contains("/b: No such file"), "{error}");
    }

    #[tokio::test]
    async fn the_file_of_another_listener_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let first = UnixSocket::bind(&path, 0o600, 16).unwrap();
        fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(&path, 0o600, 16).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
    }

    #[tokio::test]
    async fn a_client_is_known_by_its_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let socket = UnixSocket::bind(&path, 0o600, 16).unwrap();
        let _client = UnixStream::connect(&path).await.unwrap();
        let (_, address) = socket.accept().await.unwrap();
        let PeerAddress::Unix { uid, pid } = address else { panic!("{address}") };
        assert_eq!((uid, pid), (rustix::process::getuid().as_raw(), Some(std::process::id().cast_signed())));
    }
}
