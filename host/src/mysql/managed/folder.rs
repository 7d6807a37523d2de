//! The data folder: claims it, and names its files.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::error::ManagedError;
use super::kind::Kind;

const LOCK: &str = "lockkeeper.lock";
/// The kernel's limit on a socket's path, without the final zero.
const MAX_SOCKET_BYTES: usize = 107;
/// How often the proxy tries to take the folder's lock, and the time between two tries.
const CLAIM_POLLS: u32 = 30;
const CLAIM_POLL: Duration = Duration::from_millis(100);
/// A longer error log is renamed at the next start.
const MAX_LOG_BYTES: u64 = 8 << 20;

/// A data folder that this proxy alone may use. The claim ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
    socket: PathBuf,
    _lock: Arc<File>,
}

impl Folder {
    /// Creates the folder if it is missing, and claims it.
    pub fn open(dir: &Path) -> Result<Folder, ManagedError> {
        make_private(dir)?;
        let dir = dir.canonicalize().map_err(|source| ManagedError::folder("cannot resolve", dir, source))?;
        let path = dir.join(LOCK);
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(|source| ManagedError::folder("cannot open", &path, source))?;
        match claim(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ManagedError::InUse { dir }),
            Err(TryLockError::Error(source)) => {
                return Err(ManagedError::folder("cannot lock", &path, source));
            }
        }
        // Only now is the folder known to be ours.
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(&dir, private)
            .map_err(|source| ManagedError::folder("cannot protect", &dir, source))?;
        let socket = socket(&dir)?;
        Ok(Folder { dir, socket, _lock: Arc::new(lock) })
    }

    /// The data folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder for the server's own data.
    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The folder in which the data is made before it is moved to [`Folder::data`].
    pub fn unfinished(&self) -> PathBuf {
        self.dir.join("data.new")
    }

    /// The server's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The file with the server's process number.
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("server.pid")
    }

    /// The server's error log.
    pub fn log(&self) -> PathBuf {
        self.dir.join("error.log")
    }

    /// The end of the error log, as a sentence.
    pub fn log_tail(&self) -> String {
        let path = self.log();
        let text = fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let text = text.unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        match &lines[lines.len().saturating_sub(8)..] {
            [] => format!("{} is empty", path.display()),
            last => format!("{} ends with:\n{}", path.display(), last.join("\n")),
        }
    }

    /// The kind of server that made the data, recognized by files that only that kind has.
    pub fn made_by(&self) -> Option<Kind> {
        let data = self.data();
        if !data.exists() {
            return None;
        }
        Some(if data.join("aria_log_control").exists() { Kind::Mariadb } else { Kind::Mysql })
    }

    /// Removes files that a stopped server has left. If the number in an old socket's lock file belongs to a
    /// new process, the old socket would prevent a start.
    pub fn tidy(&self) -> Result<(), ManagedError> {
        let mut lock = self.socket.clone().into_os_string();
        lock.push(".lock");
        for path in [self.socket.clone(), lock.into(), self.pid_file()] {
            gone(fs::remove_file(&path))
                .map_err(|source| ManagedError::folder("cannot remove", &path, source))?;
        }
        if fs::metadata(self.log()).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
            let path = self.log();
            let kept = fs::rename(&path, path.with_extension("log.old"));
            kept.map_err(|source| ManagedError::folder("cannot put aside", &path, source))?;
        }
        Ok(())
    }
}

/// Retries for a moment, because another proxy may just be stopping.
fn claim(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..CLAIM_POLLS {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(CLAIM_POLL),
            other => return other,
        }
    }
    lock.try_lock()
}

/// Creates the folder, or checks that an existing one is ours or empty, so that a mistyped path does not turn
/// another folder into a database.
fn make_private(dir: &Path) -> Result<(), ManagedError> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent).map_err(|source| ManagedError::folder("cannot make", parent, source))?;
    }
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(ManagedError::folder("cannot make", dir, source)),
    }
    // Another user could give us their data, or their programs as plugins.
    let found = fs::metadata(dir).map_err(|source| ManagedError::folder("cannot read", dir, source))?;
    check_owner(found.uid(), dir)?;
    let mut entries = fs::read_dir(dir).map_err(|source| ManagedError::folder("cannot read", dir, source))?;
    if !dir.join(LOCK).exists() && entries.next().is_some() {
        return Err(ManagedError::Foreign { dir: dir.to_path_buf() });
    }
    Ok(())
}

/// Checks that the folder with this owner is ours.
fn check_owner(owner: u32, dir: &Path) -> Result<(), ManagedError> {
    if owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    Err(ManagedError::Owner { owner, dir: dir.to_path_buf() })
}

/// The socket's path: in the data folder, or in a short private folder if that path is too long for the
/// kernel.
fn socket(dir: &Path) -> Result<PathBuf, ManagedError> {
    let path = dir.join("server.sock");
    if path.as_os_str().len() <= MAX_SOCKET_BYTES {
        return Ok(path);
    }
    let digest = Sha256::digest(dir.as_os_str().as_encoded_bytes());
    let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let short = Path::new("/tmp").join(format!("lockkeeper-{name}"));
    if let Err(source) = fs::DirBuilder::new().mode(0o700).create(&short) {
        // Another user who owns a folder of this name could give us their server.
        let ours = fs::symlink_metadata(&short).is_ok_and(|found| {
            let owner = rustix::process::geteuid().as_raw();
            found.is_dir() && found.uid() == owner && found.mode() & 0o077 == 0
        });
        if !ours {
            return Err(ManagedError::folder("the socket's folder is not ours alone:", &short, source));
        }
    }
    Ok(short.join("server.sock"))
}

/// The result of a removal, which succeeds if there was nothing to remove.
pub fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
