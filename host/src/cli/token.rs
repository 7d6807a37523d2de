//! `lockkeeper token`: makes credentials.

use clap::Subcommand;
use serde_json::json;

use super::failure::Failure;
use super::{Options, output};
use crate::auth::new_token;

/// A command that makes credentials.
#[derive(Subcommand, Clone, Copy, Debug)]
pub enum TokenCommand {
    /// Print a new token, and the line for it in the file of principals
    ///
    /// The token goes to the client, into a file that only the client can read (--credentials-file). The line goes into
    /// the file that `auth.file` of config.toml names. The proxies know the token by its SHA-256 alone, so it cannot be
    /// shown again.
    ///
    /// Example: lockkeeper token new
    New,
}

/// Runs the command.
pub fn run(command: TokenCommand, options: &Options) -> Result<(), Failure> {
    let TokenCommand::New = command;
    let token = new_token();
    if options.json {
        output::json(&json!({"token": token.token, "id": token.id, "sha256": token.sha256}));
        return Ok(());
    }
    println!("{}", token.token);
    eprintln!("For the client alone. In the file of principals:");
    eprintln!("tokens = [{{ id = \"{}\", sha256 = \"{}\" }}]", token.id, token.sha256);
    Ok(())
}
