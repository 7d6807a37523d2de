//! Promise 1, with all kinds of faults at once.

use crate::harness::{Habits, Proxy, Settings, World, crash, database, folder, fresh, own_server};

/// A proxy that uses row locks for resources named `row…`, and named locks for all others.
async fn proxy_of_sessions(url: &str) -> Proxy {
    let policy = |name: &str, primitive: &str| {
        format!(
            "[policies.{name}]\npath = \"builtin:default\"\nsettings = {{ primitive = \"{primitive}\" }}\n"
        )
    };
    let routes = "[[routes]]\nresource = \"row*\"\npolicy = \"row\"\n";
    let sections = policy("default", "advisory") + &policy("row", "row") + routes;
    Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await
}

on_both! {
    /// Promise 1: while proxies and the server are killed and restarted, the times in which clients are certain of a
    /// key never overlap, and tokens are in the order of the grants.
    async fn certain_holders_never_overlap(kind: Kind) {
        let dir = folder();
        let server = own_server(kind, dir.path()).await;
        let (mut one, other) = (Proxy::start(server.url()).await, Proxy::start(server.url()).await);
        let world = World::start(&[one.api_address(), other.api_address()]);
        world.another_round().await;
        crash(&server).await;
        world.another_round().await;
        one.kill();
        world.another_round().await;
        one = Proxy::start(server.url()).await;
        world.set_address(0, one.api_address());
        crash(&server).await;
        world.another_round().await;
        world.finish().await;
        server.stop().await;
    }

    /// Promise 1 for locks that end with their proxy: when the proxy is killed, others get the locks at once, and the
    /// proxy's clients are certain only until then.
    async fn holders_of_session_locks_never_overlap(kind: Kind) {
        let url = database(kind).await;
        let (mut one, other) = (proxy_of_sessions(&url).await, proxy_of_sessions(&url).await);
        let resources = ["row", "row", "name"].map(fresh).to_vec();
        let habits = Habits { resources, ..Habits::default() };
        let world = World::with(&[one.api_address(), other.api_address()], habits);
        for _ in 0..3 {
            world.another_round().await;
            world.killed(one.api_address());
            one.kill();
            one = proxy_of_sessions(&url).await;
            world.set_address(0, one.api_address());
        }
        world.another_round().await;
        world.finish().await;
    }
}
