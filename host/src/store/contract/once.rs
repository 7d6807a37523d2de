//! A `once` is also a lease: the properties of leases, tested with claims of a `once`.

use std::num::NonZero;

use super::*;

pub async fn all(one: Arc<dyn Store>, other: Arc<dyn Store>) {
    let (one, other): (Arc<dyn Store>, Arc<dyn Store>) =
        (Arc::new(Changed { store: one, change: once }), Arc::new(Changed { store: other, change: once }));
    grants::of_one_exclusive_key(&*one).await;
    leases::all(&*one).await;
    listing::all(&*one).await;
    races::of_one_key(&one, &other).await;
    races::each_store_knows_the_leases_of_the_other_store(&*one, &*other).await;
}

/// Turns exclusive claims of one key into claims of a `once`.
fn once(claim: Claim) -> Claim {
    let is_once = claim.mode == Mode::Exclusive && claim.keys.len() == 1;
    Claim { keep_ms: NonZero::new(60_000).filter(|_| is_once), ..claim }
}
