use super::Fault;

/// Why a policy was not loaded: one sentence that states the fault and its remedy. The live generation stays live.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    #[error("there is no policy `{name}`: add [policies.{name}] to config.toml")]
    Unknown { name: String },
    #[error(
        "there is no `builtin:{name}`: there are builtin:default, builtin:fair-groups and builtin:backoff"
    )]
    NoBuiltin { name: String },
    #[error("cannot read {path}: {detail}")]
    Unreadable { path: String, detail: String },
    #[error(
        "this is not WebAssembly: it begins with {start}; build the policy with `lockkeeper policy build`"
    )]
    NotWasm { start: String },
    #[error("this is a core module, not a component: build the policy with `lockkeeper policy build`")]
    CoreModule,
    #[error(
        "this is WebAssembly that cannot be loaded: {detail}; it may be cut short, or use a feature that \
         this proxy does not have: build it again with `lockkeeper policy build`"
    )]
    Broken { detail: String },
    #[error(
        "this component is not a policy: it does not export `naming.plan` of {package}; it exports \
         {exports}: call `lockkeeper_sdk::export!` in the crate"
    )]
    WrongWorld { package: &'static str, exports: String },
    #[error(
        "the component's `{interface}` is not that of {package}: {detail}; build it with the SDK of this \
         proxy's version"
    )]
    WrongTypes { package: &'static str, interface: String, detail: String },
    #[error(
        "the policy imports {import}, which is WASI: policies have no system to call; build it for \
         wasm32-unknown-unknown with `lockkeeper policy build`"
    )]
    Wasi { import: String },
    #[error("the policy imports {import}: a policy decides from its arguments alone; remove the import")]
    Import { import: String },
    #[error(
        "the component has more than the {max} bytes that are allowed: build it with `lockkeeper policy build`, or raise `engine.max_component_bytes`"
    )]
    TooLarge { max: usize },
    #[error(
        "the policy needs {bytes} bytes of memory from the start, and {max} are allowed: shrink its static data, or raise `engine.memory_bytes`"
    )]
    TooMuchMemory { bytes: u64, max: usize },
    #[error("the policy has {memories} memories, and one is allowed")]
    Memories { memories: usize },
    #[error("the settings were refused: {message}; mend them in the policy's settings table")]
    Settings { message: String },
    #[error("the policy takes no settings (it exports no `settings`): empty its settings table")]
    NoSettings,
    #[error("`configure` failed: {0}; the policy must return an error instead")]
    Configure(Fault),
    #[error("the policy failed a trial request ({trial}): {fault}; try it natively with `cargo test`")]
    SelfTest { trial: &'static str, fault: Fault },
    #[error(
        "the policy gave two answers to the same question ({trial}): a decision must depend on nothing but its input"
    )]
    Nondeterministic { trial: &'static str },
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
            Rejection::TooMuchMemory { .. } | Rejection::Memories { .. } => "too_much_memory",
            Rejection::Settings { .. } | Rejection::NoSettings => "settings",
            Rejection::Configure(_) => "configure",
            Rejection::SelfTest { .. } => "self_test",
            Rejection::Nondeterministic { .. } => "nondeterministic",
        }
    }
}
