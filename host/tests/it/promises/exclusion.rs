//! Promise 1, under everything that can go wrong at once.

use crate::harness::{Proxy, World, crash, folder, own_server};

on_both! {
    /// Promise 1: while proxies and the server are killed and started again, the times in which
    /// clients are certain of a key never overlap, and the tokens are in the order of the grants.
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
}
