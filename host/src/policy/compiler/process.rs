//! The child process that compiles one component, as its parent sees it.

use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};

use super::child::{self, CompileArgs};
use crate::config::EngineLimits;
use crate::policy::Rejection;

/// The child's name in the process list.
const NAME: &str = "lockkeeper-compiler";
/// How much larger than the largest component an artifact may be. A component of the SDK grows by a factor of 3 to 4.
const GROWTH: usize = 16;
/// What a very busy machine may take from a child that needs little.
const LEEWAY: Duration = Duration::from_secs(30);
/// How much of the child's last words is kept.
const LAST_WORDS: u64 = 4096;
/// What Rust's allocator and the kernel say when memory is refused.
const NO_MEMORY: [&str; 2] = ["memory allocation of ", "os error 12"];

/// How the child has ended.
enum Ended {
    /// It was killed, because it ran for too long by the clock.
    TimeOver,
    /// It has ended by itself, or by a signal of somebody else.
    With { status: ExitStatus, output: Vec<u8>, last_words: Vec<u8> },
}

/// How long the child may run by the clock. The kernel ends it when its processor time is over, which comes first unless the
/// machine is very busy.
pub(super) fn longest(limits: &EngineLimits) -> Duration {
    3 * limits.compile_time + LEEWAY
}

/// Checks the form of a component and compiles it in a child process. Returns the artifact. The child is gone when this
/// returns.
pub(super) fn compile(component: &[u8], limits: &EngineLimits) -> Result<Vec<u8>, Rejection> {
    if component.len() > limits.max_component_bytes {
        return Err(Rejection::TooLarge { max: limits.max_component_bytes });
    }
    let args = CompileArgs::of(limits);
    let ended = on_own_thread(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(ended(command(&args), component, limits))
    });
    verdict(ended.map_err(|error| Rejection::NoCompiler { detail: error.to_string() })?, limits)
}

/// The kernel kills the child when the thread that has started it ends. So the thread lives until the child is gone, which
/// threads of a pool need not do.
fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("policy-compiler".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")))
    })
}

fn command(args: &CompileArgs) -> Command {
    // The running program, even if its path now has another file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(child::COMMAND).args(args.to_args()).current_dir("/");
    // The environment may have secrets, which a compiler does not need.
    command.env_clear().envs(child::ENVIRONMENT);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn ended(command: Command, component: &[u8], limits: &EngineLimits) -> io::Result<Ended> {
    let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
    let (Some(mut stdin), Some(stdout), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let conversation = async {
        let feed = async move {
            // A child that does not read to the end says why.
            let _ = stdin.write_all(component).await;
        };
        let max = max_artifact(limits) as u64;
        let ((), output, last_words) = tokio::join!(feed, up_to(max, stdout), up_to(LAST_WORDS, stderr));
        Ok(Ended::With { status: child.wait().await?, output: output?, last_words: last_words? })
    };
    match tokio::time::timeout(longest(limits), conversation).await {
        Ok(ended) => ended,
        Err(_time_over) => {
            child.kill().await?;
            Ok(Ended::TimeOver)
        }
    }
}

/// Reads up to one byte more than `max`, and closes the pipe.
async fn up_to(max: u64, pipe: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe.take(max + 1).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

fn max_artifact(limits: &EngineLimits) -> usize {
    limits.max_component_bytes.saturating_mul(GROWTH)
}

fn verdict(ended: Ended, limits: &EngineLimits) -> Result<Vec<u8>, Rejection> {
    let time_over = Rejection::CompileTime { max_s: limits.compile_time.as_secs() };
    let Ended::With { status, output, last_words } = ended else { return Err(time_over) };
    let last_words = String::from_utf8_lossy(&last_words);
    let max = max_artifact(limits);
    let refused = || serde_json::from_slice(&output).ok();
    Err(match status.code().map(|code| u8::try_from(code).unwrap_or(u8::MAX)) {
        _ if output.len() > max => Rejection::CodeTooLarge { max },
        Some(child::COMPILED) => return Ok(output),
        Some(child::REFUSED) if let Some(rejection) = refused() => rejection,
        _ if status.signal() == Some(libc::SIGXCPU) => time_over,
        _ if NO_MEMORY.iter().any(|said| last_words.contains(said)) => {
            Rejection::CompileMemory { max: limits.compile_memory_bytes }
        }
        _ => {
            let said = last_words.lines().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            Rejection::Crashed { detail: format!("{status}; {said}") }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn limits() -> EngineLimits {
        EngineLimits { max_component_bytes: 1024, ..EngineLimits::default() }
    }

    // Time passes at once while the child sleeps.
    #[tokio::test(start_paused = true)]
    async fn a_child_that_uses_no_processor_is_killed_when_its_time_is_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let script = format!("echo $$ > {}; exec sleep 600", file.path().display());
        // The time begins when the child has begun.
        tokio::time::resume();
        let ended = tokio::spawn(async move { ended(shell(&script), &[], &limits()).await });
        let pid = loop {
            let written = std::fs::read_to_string(file.path()).unwrap();
            match written.trim().parse::<u32>() {
                Ok(pid) => break pid,
                Err(_not_yet) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        tokio::time::pause();
        let ended = ended.await.unwrap().unwrap();
        assert!(matches!(ended, Ended::TimeOver));
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "it was killed and awaited");
        assert!(matches!(verdict(ended, &limits()), Err(Rejection::CompileTime { .. })));
    }

    #[tokio::test]
    async fn an_artifact_over_the_limit_is_refused_before_it_is_read_to_its_end() {
        // `yes` never ends by itself.
        let ended = ended(shell("exec yes"), &[], &limits()).await.unwrap();
        let Err(Rejection::CodeTooLarge { max }) = verdict(ended, &limits()) else { panic!("it is endless") };
        assert_eq!(max, 1024 * GROWTH);
    }

    #[tokio::test]
    async fn a_child_that_reads_nothing_tells_why() {
        let component = vec![0; 1 << 20];
        let ended = ended(shell("echo no room >&2; exit 1"), &component, &limits()).await.unwrap();
        let Err(Rejection::Crashed { detail }) = verdict(ended, &limits()) else { panic!("it has failed") };
        assert!(detail.ends_with("; no room"), "{detail}");
    }

    #[tokio::test]
    async fn a_program_that_cannot_be_started_is_an_error() {
        assert!(ended(Command::new("/nowhere"), &[], &limits()).await.is_err());
        assert!(on_own_thread::<()>(|| panic!("on purpose")).is_err());
    }
}
