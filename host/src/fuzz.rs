//! Properties that hold for any input of a parser, as functions of bytes.
//!
//! `cargo test` tries each of them on random bytes for a moment, and `cargo xtask fuzz` searches with libFuzzer for
//! bytes that break one.

mod answers;
mod calls;
mod components;
mod configurations;
mod gate;
mod input;
mod json;
mod lines;
mod paths;
mod queries;
mod readers;
mod rows;
mod statements;

pub use input::Holds;

/// A property, by its name on the command line. Its function panics if the property does not hold for the input that
/// is made of these bytes.
pub struct Property {
    /// The name.
    pub name: &'static str,
    /// Checks the property.
    pub holds: Holds,
}

/// All properties.
pub const PROPERTIES: [Property; 11] = [
    Property { name: "paths", holds: paths::hold },
    Property { name: "queries", holds: queries::hold },
    Property { name: "gate", holds: gate::hold },
    Property { name: "json", holds: json::hold },
    Property { name: "calls", holds: calls::hold },
    Property { name: "answers", holds: answers::hold },
    Property { name: "rows", holds: rows::hold },
    Property { name: "statements", holds: statements::hold },
    Property { name: "configurations", holds: configurations::hold },
    Property { name: "lines", holds: lines::hold },
    Property { name: "components", holds: components::hold },
];
