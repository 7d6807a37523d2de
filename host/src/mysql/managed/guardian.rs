//! A shell between the proxy and the server, which outlives a proxy that is killed.
//!
//! The guardian holds one end of a pipe; only the proxy has the other end. When the proxy closes its end or
//! dies, the guardian stops the server. The guardian has a process group of its own, so that Ctrl-C on a
//! terminal reaches only the proxy, which can then finish its requests while the server still runs.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use super::command_line::CommandLine;
use super::folder::Folder;

/// The guardian's `$0`, which distinguishes its command line from the server's.
pub const NAME: &str = "lockkeeper-guardian";

/// Arguments: the file that the server reads as its input, then the server's command line. Writes the
/// server's process number, and ends with the server's status.
///
/// Only this shell signals the server, and only before it has waited for it, so the number cannot belong to
/// another process. The watcher signals this shell, which lives as long as the watcher.
const SCRIPT: &str = r#"
server=
stop=
trap 'stop=1; [ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM INT HUP
trap '[ -z "$server" ] || kill -KILL "$server" 2>/dev/null' USR1
input=$1
shift
exec 3<&0
"$@" <"$input" >&2 3<&- &
server=$!
echo "$server"
[ -z "$stop" ] || kill -TERM "$server"
(
    trap - TERM INT HUP USR1
    while read -r line <&3; do :; done
    kill -TERM $$
    n=0
    while [ "$n" -lt 30 ]; do
        sleep 1
        n=$((n + 1))
    done
    kill -USR1 $$
) >/dev/null 2>&1 &
watcher=$!
exec 3<&- >/dev/null
while :; do
    wait "$server"
    status=$?
    kill -0 "$server" 2>/dev/null || break
done
trap '' TERM INT HUP USR1
kill -KILL "$watcher" 2>/dev/null
exit "$status"
"#;

/// A server and its guardian.
pub struct Guardian {
    child: Child,
    /// The proxy's end of the pipe. Dropping it stops the server.
    pub line: Option<ChildStdin>,
    /// The server's process.
    pub pid: u32,
}

impl Guardian {
    /// Starts a guardian, which starts the server.
    pub fn spawn(command: &CommandLine, folder: &Folder) -> io::Result<Guardian> {
        let log = File::options().create(true).append(true).open(folder.log())?;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SCRIPT, NAME]).arg(&command.input).arg(&command.program).args(&command.args);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = shell.process_group(0).current_dir("/").spawn()?;
        let line = child.stdin.take();
        let mut text = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut text)?;
        }
        let pid = text.trim().parse().map_err(|_| io::Error::other("the guardian could not start"))?;
        Ok(Guardian { child, line, pid })
    }

    /// Waits until the server has ended.
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        // `Child::wait` would close the pipe if it still owned it.
        let line = self.line.take();
        let status = self.child.wait();
        drop(line);
        status
    }
}
