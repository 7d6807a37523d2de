//! Searches for bytes that break a property of `lockkeeper::fuzz`: the one that the environment variable `PROPERTY`
//! names. Without the variable, lists the properties. `cargo xtask fuzz` builds and runs this program.

#![no_main]

use std::sync::OnceLock;

use arbitrary::Unstructured;
use lockkeeper::fuzz::{Holds, PROPERTIES};

static HOLDS: OnceLock<Holds> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        let name = std::env::var("PROPERTY").unwrap_or_default();
        match PROPERTIES.iter().find(|property| property.name == name) {
            Some(property) => HOLDS.get_or_init(|| property.holds),
            None => {
                PROPERTIES.iter().for_each(|property| println!("{}", property.name));
                std::process::exit(i32::from(!name.is_empty()))
            }
        };
    },
    |bytes: &[u8]| {
        let holds = HOLDS.get().expect("the property was found at the start");
        // Too few bytes for an input are no input.
        let _ = holds(&mut Unstructured::new(bytes));
    }
);
