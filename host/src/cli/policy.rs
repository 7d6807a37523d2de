//! `policy`: write, check and replace policies.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use clap::Subcommand;
use hyper::Method;
use serde_json::{Value, json};

use super::client::{Client, encode_path};
use super::failure::Failure;
use super::{Options, output};
use crate::policy::Language;

mod canary;
mod compared;
mod cost;
mod diff;
mod registry;
mod replay;
mod routed;
mod scenario;
mod shadow;
mod tools;
mod trial;

/// A command about policies.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// Create a policy that builds and passes its tests
    ///
    /// The policy gives each tenant locks of its own. Its README says what it needs to be built.
    ///
    /// Example: lockkeeper policy new tenants
    ///
    /// Example: lockkeeper policy new tenants --lang js
    New {
        /// Name of the policy and of its folder
        name: String,
        /// Language of the policy
        #[arg(long, value_enum, default_value = "rust")]
        lang: Language,
    },
    /// Build a policy's crate, or a core module, into a component
    ///
    /// A core module comes from the compiler of any language. It exports the functions of a policy by the names of the
    /// canonical ABI, such as `lockkeeper:policy/naming@0.1.0#plan`, as well as `memory` and `cabi_realloc`. If it imports
    /// functions of wasi_snapshot_preview1, they report that there is nothing: no files, no clock, no random numbers.
    ///
    /// Example: lockkeeper policy build tenants
    ///
    /// Example: lockkeeper policy build tenants.core.wasm --output tenants.wasm
    Build {
        /// The folder of the crate, or the file of the core module
        #[arg(default_value = ".", value_name = "CRATE|MODULE")]
        source: PathBuf,
        /// Output file [default: NAME.wasm in the crate's folder, or beside NAME.core.wasm]
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Check a component as a proxy would, and report every reason to refuse it
    ///
    /// Example: lockkeeper policy check tenants/tenants.wasm
    Check {
        /// The component: a file, or builtin:NAME
        #[arg(value_name = "FILE")]
        source: String,
        /// The policy's settings as JSON, or @FILE
        #[arg(long, value_name = "JSON", default_value = "{}")]
        settings: String,
    },
    /// Give a component a manifest, which says what the component is
    ///
    /// `policy build` does this for a crate or a module that has a file `manifest.json` beside it. This command is for
    /// components that other tools have built. The manifest has the name and the version of the policy, what it does, where
    /// its source is, and the settings that it takes, as JSON Schema. Proxies show it, and check the settings by it.
    ///
    /// Example: lockkeeper policy annotate tenants.wasm --manifest manifest.json
    Annotate {
        /// The component, which is replaced by the one with the manifest
        #[arg(value_name = "FILE")]
        component: PathBuf,
        /// The manifest
        #[arg(long, value_name = "FILE", default_value = "manifest.json")]
        manifest: PathBuf,
        /// Write the component here instead
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Attach a minisign signature to a component
    ///
    /// A policy with `signers` in config.toml loads only components that so many of them have signed as `approvals` says. A signer
    /// signs the component for one policy, on any machine, with minisign:
    ///
    ///   minisign -S -t policy=default -m fair.wasm
    ///
    /// Several signers sign the component as it was built, before a signature is attached.
    ///
    /// Example: lockkeeper policy sign fair.wasm --signature fair.wasm.minisig
    Sign {
        /// The component, which is replaced by the signed one
        #[arg(value_name = "FILE")]
        component: PathBuf,
        /// A signature file of minisign; several with commas
        #[arg(long, value_name = "FILE", value_delimiter = ',', required = true)]
        signature: Vec<PathBuf>,
        /// Write the signed component here instead
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Publish a component in an OCI registry, beside container images
    ///
    /// Other WebAssembly tools can pull it as well. The signatures and the manifest are in the component, so they go with it.
    /// Without a version in the reference, the version of the manifest is used. The credentials are those that `docker login`
    /// stores. For a registry with a private certificate authority, set SSL_CERT_FILE to a file with all authorities to trust.
    /// Prints the reference with a digest, which always stands for this component.
    ///
    /// Example: lockkeeper policy publish tenants.wasm ghcr.io/acme/tenants
    Publish {
        /// The component
        #[arg(value_name = "FILE")]
        component: PathBuf,
        /// Where it is published
        #[command(flatten)]
        place: registry::Place,
    },
    /// Get a component from an OCI registry
    ///
    /// A digest in the reference binds the registry to what was published; a version gives what the registry has under it now. The
    /// file is replaced if it exists. `policy check` says whether a proxy would load it; `policy push` makes it live.
    ///
    /// Example: lockkeeper policy pull ghcr.io/acme/tenants:1.2.0
    Pull {
        /// Where it is
        #[command(flatten)]
        place: registry::Place,
        /// Output file [default: NAME.wasm]
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Show the plan that a component makes for a request
    ///
    /// Loads the component under the default limits of a proxy and asks it for a plan; no lock is taken. With
    /// --request, the request is one of a guarded route. With --config, the request goes through the routes of that
    /// file, and the route and its policy are shown as well. Exits with 6 if the policy refuses the request or no
    /// route matches, and with 1 if the policy fails.
    ///
    /// Example: lockkeeper policy try orders.wasm --request 'POST /orders/42/pay' --path '/orders/{id}/pay'
    ///
    /// Example: lockkeeper policy try --config config.toml --request 'POST /orders/42/pay'
    Try(Box<trial::TryArgs>),
    /// Replay recorded requests under another policy, and compare
    ///
    /// Runs requests that a proxy has recorded (`recording.dir`), in virtual time: once under the recorded policy, and once
    /// under the candidate. Says which resources no longer exclude each other, which plans change, and how long each group of
    /// clients waits. Exits with 7 if the candidate does what --fail-on names.
    ///
    /// Example: lockkeeper policy replay fair.wasm --recording recordings --by label:tenant
    ///
    /// Example: lockkeeper policy replay fair.wasm --recording recordings --fail-on lost-exclusion,fault,p99:1.2x
    Replay(Box<replay::ReplayArgs>),
    /// Test a policy with the requests of scenario files
    ///
    /// A scenario file has requests that clients send, and what must become of them: plans, waits, shares, and properties such
    /// as "two tenants never share a key". The requests run in virtual time, through the lock table of the proxy. Without a
    /// scenario, those of the folder `scenarios` are tested that is beside the component, or in the folder of the crate. A
    /// crate is built first. Exits with 7 if a policy does not do what a scenario expects.
    ///
    /// Example: lockkeeper policy test tenants
    ///
    /// Example: lockkeeper policy test builtin:fair-groups crowd.toml
    Test(Box<scenario::TestArgs>),
    /// Say how two policies differ
    ///
    /// Asks both for plans of the same requests, those of scenario files or of a recording. Says which resources no longer
    /// exclude each other, and which parts of the plans change. Nothing is run: `policy replay` says how long clients wait.
    ///
    /// Example: lockkeeper policy diff builtin:default fair scenarios --fail-on lost-exclusion
    Diff(Box<diff::DiffArgs>),
    /// Measure what the calls of a policy cost
    ///
    /// Runs the requests of scenario files or of a recording, and measures each call of the policy in a fresh instance: its
    /// time, and its fuel. The same call uses the same fuel on each machine. Exits with 7 if a call uses more fuel than
    /// --max-fuel.
    ///
    /// Example: lockkeeper policy bench fair --max-fuel 20000
    Bench(Box<cost::BenchArgs>),
    /// Make a component the live generation of a policy
    ///
    /// Example: lockkeeper policy push default tenants/tenants.wasm
    Push {
        /// Name of the policy, as in config.toml
        name: String,
        /// The component: a file, or builtin:NAME
        #[arg(value_name = "FILE")]
        source: String,
    },
    /// Ask a component what the live one is asked, and compare
    ///
    /// The proxy asks the component beside its clients' requests, which do not wait for it, with the same requests, queues and
    /// leases. The component decides nothing. Says which resources would no longer exclude each other, which plans and decisions differ,
    /// and which calls fail. Only the requests at this proxy are seen. Waits for the end of the shadow; Ctrl-C ends it. Exits
    /// with 7 if the component does what --fail-on names.
    ///
    /// Example: lockkeeper policy shadow default fair.wasm --share 10% --for 10m --fail-on lost-exclusion,fault
    ///
    /// Example: lockkeeper policy shadow default
    Shadow(Box<shadow::ShadowArgs>),
    /// Let a component decide for a share of the keys, and watch it
    ///
    /// All requests go on taking the keys that the live component names, so nothing loses its exclusion. For a share of the
    /// keys, requests also take the keys that the new component names, and the new component decides how long leases last,
    /// how long requests wait and who is next. If the component does what --guard names, the proxies roll it back by
    /// themselves; `policy abort` does so at any time, and `policy promote` makes the component live.
    ///
    /// Example: lockkeeper policy canary default fair.wasm --share 5% --steps 25%,100% --every 10m --guard faults=0,p99=1.5x
    Canary(Box<canary::CanaryArgs>),
    /// Make the canary of a policy live
    ///
    /// Example: lockkeeper policy promote default
    Promote {
        /// Name of the policy, as in config.toml
        name: String,
    },
    /// End the canary of a policy, or its change in progress; what is live stays
    ///
    /// Example: lockkeeper policy abort default
    Abort {
        /// Name of the policy, as in config.toml
        name: String,
    },
    /// List the policies of a proxy
    List,
    /// Restore a policy's previous generation, or end a change in progress or a canary
    ///
    /// One previous generation is kept, so a second rollback undoes the first. While a change is in progress (see
    /// `policy list`), a rollback cancels it; so does pushing the live component again.
    ///
    /// Example: lockkeeper policy rollback default
    Rollback {
        /// Name of the policy, as in config.toml
        name: String,
    },
}

/// The time-out of a push or rollback. Compiling a component and waiting for all proxies take time.
const PUSH_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs a command about policies.
pub async fn run(command: PolicyCommand, options: &Options) -> Result<(), Failure> {
    match command {
        PolicyCommand::New { name, lang } => {
            let made = tools::scaffold(&name, lang)?;
            let (dir, build) = (made.display(), lang.build());
            let text = format!("wrote {dir}, which needs no checkout; next: cd {dir} && {build}");
            report(options, &json!({"directory": made, "build": build}), &text);
        }
        PolicyCommand::Build { source, output } => {
            let (component, default) =
                if source.is_file() { tools::encode(&source)? } else { tools::build(&source)? };
            let file = output.unwrap_or(default);
            write(&file, &component)?;
            let text = format!("built {} ({} bytes)", file.display(), component.len());
            report(options, &json!({"file": file, "bytes": component.len()}), &text);
        }
        PolicyCommand::Check { source, settings } => {
            let (_, component) = tools::component(&source)?;
            let found = tools::check(&component, &trial::settings(&settings)?)?;
            report(options, &found, &found_fine(&source, &found));
        }
        PolicyCommand::Annotate { component, manifest, output } => {
            let annotated = tools::annotated(&read(&component)?, &manifest)?;
            let file = output.unwrap_or(component);
            write(&file, &annotated)?;
            let text = format!("{} has the manifest of {} now", file.display(), manifest.display());
            report(options, &json!({"file": file, "bytes": annotated.len()}), &text);
        }
        PolicyCommand::Sign { component, signature, output } => {
            let signed = tools::signed(&read(&component)?, &signature)?;
            let file = output.unwrap_or(component);
            write(&file, &signed.component)?;
            let text = match signed.count {
                1 => format!("{} has a signature now", file.display()),
                count => format!("{} has {count} signatures now", file.display()),
            };
            report(options, &json!({"file": file, "signatures": signed.count}), &text);
        }
        PolicyCommand::Publish { component, place } => {
            let stored = registry::publish(read(&component)?, &place).await?;
            let text = format!("published {} as {}", component.display(), stored.pinned);
            report(options, &stored.json(&component), &text);
        }
        PolicyCommand::Pull { place, output } => {
            let stored = registry::pull(&place).await?;
            let file = output.unwrap_or_else(|| registry::file_of(&place));
            write(&file, &stored.component)?;
            let (bytes, digest) = (stored.component.len(), output::short_digest(&json!(stored.digest)));
            let text = format!("wrote {}: {digest}, {bytes} bytes, from {}", file.display(), stored.pinned);
            report(options, &stored.json(&file), &text);
        }
        PolicyCommand::Try(args) => trial::run(*args, options.json)?,
        PolicyCommand::Test(args) => scenario::run(&args, options.json)?,
        PolicyCommand::Diff(args) => diff::run(&args, options.json)?,
        PolicyCommand::Bench(args) => cost::run(&args, options.json)?,
        PolicyCommand::Replay(args) => replay::run(&args, options.json)?,
        PolicyCommand::Push { name, source } => {
            let path = format!("/v1/policies/{}", encode_path(&name));
            let component = tools::component(&source)?.1.into();
            let answer = Client::new(&options.admin, options)?
                .call(Method::PUT, &path, component, PUSH_TIMEOUT)
                .await?;
            report(options, &answer, &outcome(&name, &answer));
        }
        PolicyCommand::Rollback { name } => post(&name, "rollback", options).await?,
        PolicyCommand::Canary(args) => {
            let answer = canary::run(&args, options).await?;
            report(options, &answer, &outcome(&args.name, &answer));
        }
        PolicyCommand::Shadow(args) => shadow::run(&args, options).await?,
        PolicyCommand::Promote { name } => post(&name, "promote", options).await?,
        PolicyCommand::Abort { name } => post(&name, "abort", options).await?,
        PolicyCommand::List => {
            let answer = Client::new(&options.admin, options)?.get("/v1/policies").await?;
            if options.json {
                output::json(&answer);
            } else {
                list(&answer);
            }
        }
    }
    Ok(())
}

/// Asks the proxy to do something with a policy.
async fn post(name: &str, what: &str, options: &Options) -> Result<(), Failure> {
    let path = format!("/v1/policies/{}/{what}", encode_path(name));
    let client = Client::new(&options.admin, options)?;
    let answer = client.call(Method::POST, &path, Bytes::new(), PUSH_TIMEOUT).await?;
    report(options, &answer, &outcome(name, &answer));
    Ok(())
}

fn found_fine(source: &str, found: &Value) -> String {
    let digest = output::short_digest(&found["digest"]);
    let mut text = format!(
        "{source} is fine: {digest}, {} bytes, decides {}",
        found["bytes"],
        listed(&found["hooks"], ", ")
    );
    if let Some(manifest) = found["manifest"].as_object() {
        let name = format!("{} {}", output::shown(&manifest["name"]), output::shown(&manifest["version"]));
        let more = ["description", "source"].into_iter().filter_map(|key| manifest.get(key));
        let more: String = more.map(|text| format!("; {}", output::shown(text))).collect();
        text.push_str(&format!("\nmanifest: {name}{more}"));
    }
    if found["reads"].is_array() {
        text.push_str(&format!("\nplan reads: {}", listed(&found["reads"], ", ")));
    }
    for note in found["notes"].as_array().into_iter().flatten() {
        text.push_str(&format!("\nnote: {}", output::shown(note)));
    }
    text
}

fn listed(texts: &Value, between: &str) -> String {
    texts.as_array().into_iter().flatten().map(output::shown).collect::<Vec<_>>().join(between)
}

fn list(answer: &Value) {
    let row = |policy: &Value| {
        vec![
            output::shown(&policy["name"]),
            output::shown(&policy["manifest"]["version"]),
            output::short_digest(&policy["digest"]),
            output::shown(&policy["generation"]),
            output::shown(&policy["faults"]),
            listed(&policy["hooks"], ","),
            output::shown(&policy["fleet"]["phase"]),
            output::shown(&policy["fleet"]["seq"]),
            pending(&policy["fleet"]),
            output::shown(&policy["last_error"]),
        ]
    };
    let rows: Vec<_> = answer["policies"].as_array().into_iter().flatten().map(row).collect();
    output::table(
        &[
            "NAME",
            "VERSION",
            "DIGEST",
            "GENERATION",
            "FAULTS",
            "HOOKS",
            "PHASE",
            "SEQ",
            "CHANGE",
            "LAST ERROR",
        ],
        &rows,
    );
}

/// The component that will go live, and the proxies that it waits for.
fn pending(record: &Value) -> String {
    let waits_for = listed(&record["waits_for"], ", ");
    if let Some(canary) = record["canary"].as_object() {
        let digest = output::short_digest(&canary["digest"]);
        let share = canary["share"].as_f64().unwrap_or_default();
        let waits_for = listed(&record["waits_for"], ", ");
        let waits_for =
            if waits_for.is_empty() { waits_for } else { format!("; waits for proxy {waits_for}") };
        return format!("canary {digest} for {share}% of the keys{waits_for}");
    }
    let mut text = match record["candidate"].is_null() {
        false => format!("to {}", output::short_digest(&record["candidate"])),
        true if waits_for.is_empty() => return "-".to_owned(),
        true => "followed".to_owned(),
    };
    if !waits_for.is_empty() {
        text.push_str(&format!("; waits for proxy {waits_for}"));
    }
    if let Some(why) = record["held_up"].as_str() {
        text.push_str(&format!(" (this one: {why})"));
    }
    text
}

fn outcome(name: &str, answer: &Value) -> String {
    let digest = output::short_digest(&answer["digest"]);
    let generation = &answer["generation"];
    match answer["outcome"].as_str() {
        Some("unchanged") => format!("{name} is {digest} already (generation {generation})"),
        Some("under_way") => format!(
            "the change of {name} goes on; it waits for proxy {} (see `lockkeeper fleet`)",
            listed(&answer["waits_for"], ", ")
        ),
        Some("called_off") => format!(
            "{} is called off; {name} stays {digest} (generation {generation})",
            output::short_digest(&answer["candidate"])
        ),
        Some("canary") => {
            format!("a canary of {name} has begun; `lockkeeper policy list` shows it, {name} stays {digest}")
        }
        Some("rolled_back") => format!("{name} is back at {digest} (generation {generation})"),
        _ => format!("{name} is now {digest} (generation {generation})"),
    }
}

fn report(options: &Options, as_json: &Value, text: &str) {
    if options.json {
        output::json(as_json);
    } else {
        output::line(text);
    }
}

fn write(file: &Path, content: &[u8]) -> Result<(), Failure> {
    std::fs::write(file, content)
        .map_err(|error| Failure::Other(format!("cannot write {}: {error}", file.display())))
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|error| Failure::Other(format!("cannot read {}: {error}", file.display())))
}
