//! `lockkeeper run` at a terminal, as a job of a shell.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use super::*;

/// A terminal with a shell that has job control. Typed text is written to it.
struct Terminal {
    typed: File,
    shell: Child,
    shown: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
}

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";

impl Terminal {
    fn open(dir: &Path, fake: &Fake) -> Terminal {
        let (typed, screen) = pair();
        let other = |screen: &File| Stdio::from(screen.try_clone().unwrap());
        let mut shell = Command::new("setsid");
        shell.args(["--ctty", "sh", "-i"]).current_dir(dir).env("LOCKKEEPER_SERVER", &fake.url);
        shell.env("LOCKKEEPER", env!("CARGO_BIN_EXE_lockkeeper")).env("PS1", "").env_remove("ENV");
        shell.stdin(other(&screen)).stdout(other(&screen)).stderr(screen);
        let shell = shell.spawn().expect("setsid and sh");
        let shown = std::sync::Arc::<std::sync::Mutex<Vec<u8>>>::default();
        let (mut reader, all) = (typed.try_clone().unwrap(), shown.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 1_024];
            while let Ok(read @ 1..) = std::io::Read::read(&mut reader, &mut buffer) {
                all.lock().unwrap().extend_from_slice(&buffer[..read]);
            }
        });
        Terminal { typed, shell, shown }
    }

    fn types(&mut self, text: &str) {
        self.typed.write_all(text.as_bytes()).unwrap();
    }

    /// Runs a script under a lock in the foreground.
    fn runs(&mut self, script: &str) {
        self.types(&format!("\"$LOCKKEEPER\" run job -- sh -c '{script}'; echo $? > code\n"));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
        if std::thread::panicking() {
            eprintln!("the terminal showed: {}", text(&self.shown.lock().unwrap()));
        }
    }
}

/// Both ends of a pseudo-terminal.
fn pair() -> (File, File) {
    // SAFETY: the calls take an open descriptor that is owned here, and a buffer with its length.
    let (typed, name) = unsafe {
        let raw = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
        assert!(raw >= 0, "a pseudo-terminal");
        let typed = File::from(OwnedFd::from_raw_fd(raw));
        let mut name = [0_u8; 64];
        assert_eq!(libc::grantpt(typed.as_raw_fd()), 0);
        assert_eq!(libc::unlockpt(typed.as_raw_fd()), 0);
        assert_eq!(libc::ptsname_r(typed.as_raw_fd(), name.as_mut_ptr().cast(), name.len()), 0);
        (typed, name)
    };
    let name = std::ffi::CStr::from_bytes_until_nul(&name).unwrap().to_str().unwrap();
    let screen = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name).unwrap();
    (typed, screen)
}

#[test]
fn a_command_reads_the_terminal_and_gives_it_back() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let mut terminal = Terminal::open(dir.path(), &fake);
        terminal.runs("touch begun; read line; echo \"$line\" > line");
        until_file(&dir.path().join("begun")).await;
        terminal.types("hello\n");
        assert_eq!(written(&dir.path().join("line")).await, "hello");
        assert_eq!(written(&dir.path().join("code")).await, "0");
        terminal.types("echo again > again\n");
        written(&dir.path().join("again")).await;
    });
}

#[test]
fn ctrl_c_reaches_the_command_once() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let mut terminal = Terminal::open(dir.path(), &fake);
        terminal.runs("trap \"echo x >> ints\" INT; touch begun; while [ ! -e go ]; do :; done; exit 3");
        until_file(&dir.path().join("begun")).await;
        terminal.types(CTRL_C);
        written(&dir.path().join("ints")).await;
        std::fs::write(dir.path().join("go"), "").unwrap();
        assert_eq!(written(&dir.path().join("code")).await, "3");
        assert_eq!(written(&dir.path().join("ints")).await, "x");
        assert_eq!(fake.count("/v1/release"), 1);
    });
}

/// A script is no interactive shell: it does not take the terminal back itself.
#[test]
fn a_command_that_cannot_start_leaves_the_terminal_to_the_script() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(60_000), folder());
        let mut terminal = Terminal::open(dir.path(), &fake);
        terminal.types(
            "sh -c '\"$LOCKKEEPER\" run job -- ./none; echo $? > code; read line; echo \"$line\" > line'\n",
        );
        assert_eq!(written(&dir.path().join("code")).await, "127");
        terminal.types("hello\n");
        assert_eq!(written(&dir.path().join("line")).await, "hello");
    });
}

/// The shell has the terminal while the job is stopped. In the foreground again, the command continues.
#[test]
fn ctrl_z_stops_the_job_until_it_is_continued() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(600_000), folder());
        let mut terminal = Terminal::open(dir.path(), &fake);
        terminal
            .types("\"$LOCKKEEPER\" run job -- sh -c 'echo $$ > pid; read line; echo \"$line\" > line'\n");
        let pid = process(&dir.path().join("pid")).await;
        terminal.types(CTRL_Z);
        eventually("the command is stopped", async || state(pid) == Some('T')).await;
        terminal.types("echo $? > stopped\n");
        written(&dir.path().join("stopped")).await;
        assert_eq!(state(pid), Some('T'));
        terminal.types("fg; echo $? > code\n");
        fake.until_called("/v1/renew", 1).await;
        terminal.types("hello\n");
        assert_eq!(written(&dir.path().join("line")).await, "hello");
        assert_eq!(written(&dir.path().join("code")).await, "0");
    });
}

/// A job that stays stopped ends with its lease, although only its guard runs.
#[test]
fn a_job_that_stays_stopped_ends_with_its_lease() {
    crate::harness::run(async {
        let (fake, dir) = (Fake::start(1_500), folder());
        let mut terminal = Terminal::open(dir.path(), &fake);
        // The command starts no process: a shell that is stopped during a start only stops after it.
        terminal.types("\"$LOCKKEEPER\" run job -- sh -c 'echo $$ > pid; exec sleep 300'\n");
        let pid = process(&dir.path().join("pid")).await;
        terminal.types(CTRL_Z);
        eventually("the command has ended", async || !is_running(pid)).await;
        terminal.types("fg; echo $? > code\n");
        assert_eq!(written(&dir.path().join("code")).await, "114");
    });
}

/// The state of a process; T means stopped.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}
