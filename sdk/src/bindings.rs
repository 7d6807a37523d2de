//! What `wit_bindgen` makes of the worlds, one module a hook.
//!
//! The export macro of a world carries the section that describes it, so a component exports only
//! the hooks whose macro its crate invokes. All share the types that `naming` generates.

#![allow(clippy::all, missing_docs, unused_qualifications)]

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

pub mod settings {
    wit_bindgen::generate!({
        world: "settings-hook",
        path: "wit",
        pub_export_macro: true,
    });
}
