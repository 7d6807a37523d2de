//! Connects the component's exports to the [`Policy`] trait.

use crate::bindings::{backoff, fairness, naming, renewal, response, settings};
use crate::{Plan, Policy, Refusal, Request};

/// Makes the crate a policy. `export!(MyPolicy)` exports `plan` and the settings. Name further hooks after the type,
/// any of these: `export!(MyPolicy, fairness, backoff, renewal, response)`.
///
/// Outside WebAssembly the macro expands to nothing, so tests run natively.
#[macro_export]
macro_rules! export {
    ($policy:ident $(, $hook:ident)* $(,)?) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            $crate::__export_hook!($policy naming);
            $crate::__export_hook!($policy settings);
            $($crate::__export_hook!($policy $hook);)*
        };
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export_hook {
    ($policy:ident naming) => {
        $crate::bindings::naming::export!($policy with_types_in $crate::bindings::naming);
    };
    ($policy:ident settings) => {
        $crate::bindings::settings::export!($policy with_types_in $crate::bindings::settings);
    };
    ($policy:ident fairness) => {
        $crate::bindings::fairness::export!($policy with_types_in $crate::bindings::fairness);
    };
    ($policy:ident backoff) => {
        $crate::bindings::backoff::export!($policy with_types_in $crate::bindings::backoff);
    };
    ($policy:ident renewal) => {
        $crate::bindings::renewal::export!($policy with_types_in $crate::bindings::renewal);
    };
    ($policy:ident response) => {
        $crate::bindings::response::export!($policy with_types_in $crate::bindings::response);
    };
    ($policy:ident $other:ident) => {
        compile_error!(concat!(
            "`", stringify!($other), "` is no hook; there are fairness, backoff, renewal and response"
        ));
    };
}

impl<P: Policy> naming::exports::lockkeeper::policy::naming::Guest for P {
    fn plan(settings: Vec<u8>, request: Request) -> Result<Plan, Refusal> {
        P::plan(&crate::settings::decode::<P::Settings>(&settings), &request)
    }
}

impl<P: Policy> fairness::exports::lockkeeper::policy::fairness::Guest for P {
    fn choose(settings: Vec<u8>, queue: crate::fairness::Queue) -> u32 {
        P::choose(&crate::settings::decode::<P::Settings>(&settings), &queue)
    }
}

impl<P: Policy> backoff::exports::lockkeeper::policy::backoff::Guest for P {
    fn contended(settings: Vec<u8>, contention: crate::backoff::Contention) -> crate::backoff::Decision {
        P::contended(&crate::settings::decode::<P::Settings>(&settings), &contention)
    }
}

impl<P: Policy> renewal::exports::lockkeeper::policy::renewal::Guest for P {
    fn due(settings: Vec<u8>, expiring: crate::renewal::Expiring) -> crate::renewal::Decision {
        P::renewal_due(&crate::settings::decode::<P::Settings>(&settings), &expiring)
    }
}

impl<P: Policy> response::exports::lockkeeper::policy::response::Guest for P {
    fn contended(
        settings: Vec<u8>,
        request: Request,
        contention: crate::response::Contention,
    ) -> crate::response::Answer {
        P::response(&crate::settings::decode::<P::Settings>(&settings), &request, &contention)
    }
}

impl<P: Policy> settings::exports::lockkeeper::policy::settings::Guest for P {
    fn configure(table: String) -> Result<Vec<u8>, String> {
        crate::settings::configure::<P>(&table)
    }
}
