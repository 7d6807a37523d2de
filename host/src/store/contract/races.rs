//! Two stores, like two proxies, that use the same keys.

use std::sync::atomic::AtomicUsize;

use super::*;

const ROUNDS: usize = 40;
const RACERS: usize = 4;

pub async fn all(one: Arc<dyn Store>, other: Arc<dyn Store>) {
    each_store_knows_the_leases_of_the_other_store(&*one, &*other).await;
    readers_of_two_stores_keep_writers_out(&*one, &*other).await;
    of_one_key(&one, &other).await;
    racing_claims_for_several_keys_do_not_deadlock(&one, &other).await;
}

/// For stores of which each knows the leases of all.
pub async fn of_one_key(one: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    a_stale_cached_row_is_not_trusted(&**one, &**other).await;
    racing_claims_for_one_key_have_one_holder_at_a_time(one, other).await;
}

pub async fn exclusion(one: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    racing_claims_for_one_key_have_one_holder_at_a_time(one, other).await;
    racing_claims_for_several_keys_do_not_deadlock(one, other).await;
}

pub async fn each_store_knows_the_leases_of_the_other_store(one: &dyn Store, other: &dyn Store) {
    let names = Names::new("fleet");
    let mine = Claim { request: Some("r".into()), ..claim(&[&names.key("k")], "me") };
    let grant = granted(one, &mine).await;
    held(other, &claim(&[&names.key("k")], "you")).await;
    let again = granted(other, &Claim { attempt: fresh(), ..mine.clone() }).await;
    assert_eq!((again.nonce, &again.tokens), (grant.nonce, &grant.tokens));
    let lease = lease(&mine, &grant);
    assert!(matches!(renew(other, &lease, 20_000).await, Outcome::Renewed { .. }));
    assert_eq!(release(other, &lease).await, RELEASED);
    assert_eq!(release(one, &lease).await, Outcome::Lost);
}

/// Each store releases its own grants.
pub async fn readers_of_two_stores_keep_writers_out(one: &dyn Store, other: &dyn Store) {
    let names = Names::new("readers");
    let key = names.key("k");
    let reader = || Claim { mode: Mode::Shared, ..claim(&[&key], "reader") };
    let writer = || claim(&[&key], "writer");
    for (here, there) in [(one, other), (other, one)] {
        let (first, second) = (reader(), reader());
        let first_grant = granted(here, &first).await;
        let second_grant = granted(there, &second).await;
        assert!(second_grant.tokens[0] > first_grant.tokens[0]);
        held(here, &writer()).await;
        held(there, &writer()).await;
        assert_eq!(release(here, &lease(&first, &first_grant)).await, RELEASED);
        held(here, &writer()).await;
        held(there, &writer()).await;
        assert_eq!(release(there, &lease(&second, &second_grant)).await, RELEASED);
        let alone = writer();
        let grant = granted(here, &alone).await;
        assert!(grant.tokens[0] > second_grant.tokens[0]);
        held(here, &reader()).await;
        held(there, &reader()).await;
        held(there, &writer()).await;
        assert_eq!(release(here, &lease(&alone, &grant)).await, RELEASED);
    }
}

/// One store repeatedly changes a key while the other has the row cached.
pub async fn a_stale_cached_row_is_not_trusted(one: &dyn Store, other: &dyn Store) {
    let names = Names::new("stale");
    let key = names.key("k");
    let rising = Rising::default();
    for n in 0..ROUNDS {
        let (here, there) = if n % 2 == 0 { (one, other) } else { (other, one) };
        let claim = claim(&[&key], "me");
        let grant = granted(here, &claim).await;
        rising.check(grant.tokens[0]);
        held(there, &super::claim(&[&key], "you")).await;
        let lease = lease(&claim, &grant);
        let releasing = if n % 3 == 0 { here } else { there };
        assert_eq!(release(releasing, &lease).await, RELEASED);
    }
}

pub async fn racing_claims_for_one_key_have_one_holder_at_a_time(
    one: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let names = Names::new("race");
    let inside = Arc::new(AtomicUsize::new(0));
    let rising = Arc::new(Rising::default());
    let key = names.key("k");
    let racers = (0..RACERS).map(|n| {
        let store = if n % 2 == 0 { one.clone() } else { other.clone() };
        let (inside, rising, key) = (inside.clone(), rising.clone(), key.clone());
        tokio::spawn(async move {
            let mut rounds = 0;
            while rounds < ROUNDS {
                let claim = claim(&[&key], &n.to_string());
                let Outcome::Granted(grant) = acquire(&*store, &claim).await else { continue };
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two hold {key}");
                rising.check(grant.tokens[0]);
                tokio::task::yield_now().await;
                assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                assert_eq!(release(&*store, &lease(&claim, &grant)).await, RELEASED);
                rounds += 1;
            }
        })
    });
    for racer in racers.collect::<Vec<_>>() {
        racer.await.expect("a racer found nothing wrong");
    }
}

/// Claims for keys in any order, including new keys: every deadlock ends.
pub async fn racing_claims_for_several_keys_do_not_deadlock(one: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    let names = Arc::new(Names::new("several-race"));
    let racers = (0..RACERS).map(|n| {
        let store = if n % 2 == 0 { one.clone() } else { other.clone() };
        let names = names.clone();
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                let picked = [round % 7, (round * 3 + n) % 7, 100 + round];
                let mut keys: Vec<String> = picked.iter().map(|pick| names.key(&pick.to_string())).collect();
                keys.sort();
                keys.dedup();
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                let claim = claim(&keys, &n.to_string());
                let Outcome::Granted(grant) = acquire(&*store, &claim).await else { continue };
                assert_eq!(release(&*store, &lease(&claim, &grant)).await, RELEASED);
            }
        })
    });
    for racer in racers.collect::<Vec<_>>() {
        racer.await.expect("a racer found nothing wrong");
    }
    let page = one.list(names.key(""), None, 100).await.expect("it lists");
    assert!(page.items.is_empty(), "everything was released");
}
