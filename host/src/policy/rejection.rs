use serde::{Deserialize, Serialize};

use super::hooks::shortened;
use super::manifest::SettingFault;
use super::{Fault, PACKAGE};

/// Why a policy was not loaded: one sentence that states the fault and its remedy. The live generation stays live.
///
/// The process that compiles a component reports its rejections as JSON. Variants without a form in JSON come from calls of
/// the policy, which that process does not make.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Rejection {
    /// The configuration has no policy of this name.
    #[error("there is no policy `{name}`: add [policies.{name}] to config.toml")]
    Unknown {
        /// The unknown name.
        name: String,
    },
    /// There is no built-in policy of this name.
    #[error(
        "there is no `builtin:{name}`: there are builtin:default, builtin:fair-groups and builtin:backoff"
    )]
    NoBuiltin {
        /// The name after `builtin:`.
        name: String,
    },
    /// The component file cannot be read.
    #[error("cannot read {path}: {detail}")]
    Unreadable {
        /// The path of the file.
        path: String,
        /// Why the file cannot be read.
        detail: String,
    },
    /// The file is not WebAssembly.
    #[error(
        "this is not WebAssembly: it begins with {start}; build the policy with `lockkeeper policy build`"
    )]
    NotWasm {
        /// The first bytes of the file, at most 4, as quoted text: an operator can have sent a secret by mistake.
        start: String,
    },
    /// The file is a core module instead of a component.
    #[error(
        "this is a core module, not a component: `lockkeeper policy build MODULE.wasm` makes a component of it"
    )]
    CoreModule,
    /// The component cannot be parsed or compiled.
    #[error(
        "this is WebAssembly that cannot be loaded: {detail}; it may be cut short, or use a feature that \
         this proxy does not have: build it again with `lockkeeper policy build`"
    )]
    Broken {
        /// The error of the parser or the compiler.
        detail: String,
    },
    /// The component does not export `naming`, so it is not a policy.
    #[error(
        "this component is not a policy: it does not export `naming.plan` of {package}; it exports \
         {exports}: call `lockkeeper_sdk::export!` in the crate",
        package = PACKAGE
    )]
    WrongWorld {
        /// The names that the component exports, or `nothing`.
        exports: String,
    },
    /// The component exports a hook with other functions or types than the proxy expects.
    #[error(
        "the component's `{interface}` is not that of {package}: {detail}; build it with the SDK of this \
         proxy's version",
        package = PACKAGE
    )]
    WrongTypes {
        /// The interface of the hook.
        interface: String,
        /// How the interface differs.
        detail: String,
    },
    /// The component imports a WASI interface.
    #[error(
        "the policy imports {import}, which is WASI: policies have no system to call; build Rust for \
         wasm32-unknown-unknown with `lockkeeper policy build`, and JavaScript with `--stub-wasi`"
    )]
    Wasi {
        /// The name of the import.
        import: String,
    },
    /// The component imports a function that is not WASI. Policies may import types only.
    #[error("the policy imports {import}: a policy decides from its arguments alone; remove the import")]
    Import {
        /// The name of the import.
        import: String,
    },
    /// The component file exceeds its size limit.
    #[error(
        "the component has more than the {max} bytes that are allowed: build it with `lockkeeper policy build`, or raise `engine.max_component_bytes`"
    )]
    TooLarge {
        /// The limit in bytes.
        max: usize,
    },
    /// The component was not compiled in time.
    #[error(
        "the component takes more than the {max_s} s to compile that are allowed: shrink its functions, or raise `engine.compile_time_s`"
    )]
    CompileTime {
        /// The limit in seconds of processor time.
        max_s: u64,
    },
    /// The compilation of the component needed too much memory.
    #[error(
        "the component needs more memory to compile than the {max} bytes that are allowed: shrink its functions, or raise `engine.compile_memory_bytes`"
    )]
    CompileMemory {
        /// The limit in bytes.
        max: u64,
    },
    /// The machine code of the component is too large.
    #[error(
        "the component compiles to more than the {max} bytes of machine code that are allowed: shrink it, or raise `engine.max_component_bytes`"
    )]
    CodeTooLarge {
        /// The limit in bytes, which follows from the limit on the component.
        max: usize,
    },
    /// The process that compiled the component has ended before it was done.
    #[error(
        "the process that compiles the component has ended too early ({detail}); try again, and report it if it ends again"
    )]
    Crashed {
        /// How the process has ended, and the first line that it wrote to its standard error.
        detail: String,
    },
    /// The process that compiles the component cannot be started or read.
    #[error("the process that compiles the component cannot run: {detail}; try again")]
    NoCompiler {
        /// The error of the operating system.
        detail: String,
    },
    /// Other components are being compiled. The component itself was not looked at.
    #[error("another policy is being compiled, and others wait for the same; try again")]
    Busy,
    /// The memories of the component exceed their limit together from the start.
    #[error(
        "the policy needs {bytes} bytes of memory from the start, and {max} are allowed: shrink its static data, or raise `engine.memory_bytes`"
    )]
    TooMuchMemory {
        /// The initial sizes of all memories, in bytes.
        bytes: u64,
        /// The limit in bytes.
        max: usize,
    },
    /// The component has more memories, tables or core instances than the pool provides for a call.
    #[error("the policy has {count} {what}, and at most {max} are allowed: link its modules into fewer")]
    TooMany {
        /// What there are too many of, in the plural.
        what: String,
        /// How many there are.
        count: u32,
        /// The limit.
        max: u32,
    },
    /// Too few of the policy's signers have signed the component for it.
    #[error(
        "{valid} of the signers of `{policy}` have signed the component for it, and {approvals} must (it has {signatures} \
         signatures): sign it with `minisign -S -t policy={policy} -m FILE`, and attach the signature with `lockkeeper \
         policy sign`"
    )]
    NotSigned {
        /// The name of the policy.
        policy: String,
        /// How many signatures the component has.
        signatures: usize,
        /// How many signers of the policy have signed.
        valid: usize,
        /// How many must have.
        approvals: usize,
    },
    /// The policy refused its settings.
    #[error("the settings were refused: {message}; mend them in the policy's settings table")]
    Settings {
        /// The policy's message.
        message: String,
    },
    /// The settings do not fit the schema in the component's manifest.
    #[error("the settings were refused: {}; mend them in the policy's settings table", listed(.faults))]
    SettingFaults {
        /// The settings that do not fit, at most 20.
        faults: Vec<SettingFault>,
    },
    /// The manifest of the component cannot be used.
    #[error(
        "the manifest of the component cannot be used: {detail}; mend its manifest.json, or upgrade this proxy if the manifest is of a later version"
    )]
    Manifest {
        /// What is wrong with it.
        detail: String,
    },
    /// There are settings, but the component does not export `settings`.
    #[error("the policy takes no settings (it exports no `settings`): empty its settings table")]
    NoSettings,
    /// The call of `configure` failed, so the settings were not checked.
    #[serde(skip)]
    #[error("`configure` failed: {0}; the policy must return an error instead")]
    Configure(Fault),
    /// The call of `plan-reads` failed.
    #[serde(skip)]
    #[error("`plan-reads` failed: {0}; it must list the parts of a request that `plan` reads")]
    Reads(Fault),
    /// The plan of a trial request depends on a part that `plan-reads` does not list.
    #[serde(skip)]
    #[error(
        "the plan of a trial request ({trial}) depends on a part of the request that `plan-reads` does not list: the list needs {part}"
    )]
    Unlisted {
        /// What the trial request is.
        #[serde(skip)]
        trial: &'static str,
        /// The part, by its name in the WIT package.
        part: String,
    },
    /// The policy failed on a trial request.
    #[serde(skip)]
    #[error("the policy failed a trial request ({trial}): {fault}; try it natively with `cargo test`")]
    SelfTest {
        /// What the trial request is.
        #[serde(skip)]
        trial: &'static str,
        /// How the call failed.
        fault: Fault,
    },
    /// The policy gave different answers to the same trial request.
    #[serde(skip)]
    #[error(
        "the policy gave two answers to the same question ({trial}): a decision must depend on nothing but its input"
    )]
    Nondeterministic {
        /// What the trial request is.
        #[serde(skip)]
        trial: &'static str,
    },
}

fn listed(faults: &[SettingFault]) -> String {
    shortened(faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

impl Rejection {
    /// A stable slug for answers and logs.
    pub fn as_str(&self) -> &'static str {
        match self {
            Rejection::Unknown { .. } => "unknown_policy",
            Rejection::NoBuiltin { .. } => "no_builtin",
            Rejection::Unreadable { .. } => "unreadable",
            Rejection::NotWasm { .. } => "not_wasm",
            Rejection::CoreModule => "core_module",
            Rejection::Broken { .. } => "broken",
            Rejection::WrongWorld { .. } => "wrong_world",
            Rejection::WrongTypes { .. } => "wrong_types",
            Rejection::Wasi { .. } => "wasi",
            Rejection::Import { .. } => "import",
            Rejection::TooLarge { .. } => "too_large",
            Rejection::CompileTime { .. } => "compile_time",
            Rejection::CompileMemory { .. } => "compile_memory",
            Rejection::CodeTooLarge { .. } => "code_too_large",
            Rejection::Crashed { .. } => "crashed",
            Rejection::NoCompiler { .. } => "no_compiler",
            Rejection::Busy => "busy",
            Rejection::TooMuchMemory { .. } => "too_much_memory",
            Rejection::TooMany { .. } => "too_many_parts",
            Rejection::NotSigned { .. } => "not_signed",
            Rejection::Settings { .. } | Rejection::SettingFaults { .. } | Rejection::NoSettings => {
                "settings"
            }
            Rejection::Manifest { .. } => "manifest",
            Rejection::Configure(_) => "configure",
            Rejection::Reads(_) | Rejection::Unlisted { .. } => "reads",
            Rejection::SelfTest { .. } => "self_test",
            Rejection::Nondeterministic { .. } => "nondeterministic",
        }
    }
    /// Whether the rejection is about this moment, and says nothing about the component.
    pub fn is_passing(&self) -> bool {
        matches!(self, Rejection::Busy | Rejection::NoCompiler { .. })
    }
}
