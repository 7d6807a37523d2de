//! The code that `wit_bindgen` generates from the worlds, one module for each hook.
//!
//! The export macro of a world carries the section that describes that world, so a component exports only the hooks
//! whose macro its crate invokes. All modules share the types that `naming` generates.

#![allow(clippy::all, missing_docs, unused_qualifications)]

/// The bindings of `naming`, and the types that all hooks share.
pub mod naming {
    wit_bindgen::generate!({
        world: "naming-hook",
        path: "wit",
        pub_export_macro: true,
        additional_derives: [PartialEq],
    });
}

macro_rules! hook {
    ($module:ident, $world:literal) => {
        /// The bindings of one hook.
        pub mod $module {
            wit_bindgen::generate!({
                world: $world,
                path: "wit",
                pub_export_macro: true,
                additional_derives: [PartialEq],
                with: {
                    "lockkeeper:policy/types@0.1.0": crate::bindings::naming::lockkeeper::policy::types,
                },
            });
        }
    };
}

hook!(fairness, "fairness-hook");
hook!(backoff, "backoff-hook");
hook!(renewal, "renewal-hook");
hook!(response, "response-hook");

/// The bindings of `settings`.
pub mod settings {
    wit_bindgen::generate!({
        world: "settings-hook",
        path: "wit",
        pub_export_macro: true,
    });
}
