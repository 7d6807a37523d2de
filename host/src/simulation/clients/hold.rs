//! Locks that are held for as long as a connection is open.

use rand::Rng;
use tokio::sync::{mpsc, oneshot};

use super::{Client, VERY_LONG_WORK_MS};
use crate::clock;
use crate::service::{AcquireError, HoldEvent, Lease, Request};
use crate::simulation::world::Proxy;

/// A message of a held connection.
enum Told {
    Granted(Lease),
    Refused(AcquireError),
    Event(HoldEvent),
}

impl Client {
    /// Holds the lock for as long as a connection is open.
    pub(super) async fn hold(&mut self, request: &Request) {
        let proxy = self.proxy();
        self.note(&format!("holds a connection to proxy {} for {}", proxy.index, request.resource));
        let (tell, mut told) = mpsc::unbounded_channel();
        let (close, closed) = oneshot::channel();
        let asked_at = clock::now();
        self.shared.checks.lock().asks(&request.owner, (proxy.index, proxy.life));
        let (process, connection) =
            (proxy.process.clone(), connection(proxy.clone(), request.clone(), tell, closed));
        let connection = tokio::spawn(async move { process.run(connection).await });
        let lease = match told.recv().await {
            Some(Told::Granted(lease)) => lease,
            Some(Told::Refused(error)) => {
                return self.note(&format!("is refused {}: {error}", request.resource));
            }
            _ => return,
        };
        self.granted(&proxy, request, &lease, asked_at);
        let longest_ms = if self.random.random_ratio(self.long_holds_percent, 100) {
            VERY_LONG_WORK_MS
        } else {
            5 * self.work_ms(request)
        };
        let until = clock::now().plus_ms(self.random.random_range(0..longest_ms));
        let goes_on = loop {
            let event = tokio::select! {
                biased;
                event = told.recv() => event,
                () = clock::sleep_until(until) => break false,
            };
            match event {
                Some(Told::Event(HoldEvent::Renewed(renewed))) => {
                    self.renewed(request, &lease, renewed.valid_until);
                }
                Some(Told::Event(HoldEvent::Lost { valid_until, .. })) => {
                    self.lost(request, &lease, valid_until);
                    // The client stops its work before the end.
                    let left_ms = u64::from(valid_until.ms_since(clock::now()));
                    self.pause(left_ms + 1).await;
                    break false;
                }
                Some(Told::Event(HoldEvent::Draining { .. })) => break true,
                _ => break false,
            }
        };
        if goes_on {
            self.shared.tally.count("a held lease goes on elsewhere");
            self.work(&proxy, request, &lease).await;
            return self.release(&proxy, request, &lease).await;
        }
        self.let_go(request, &lease);
        let _ = close.send(());
        let _ = connection.await;
    }
}

/// The proxy's side of a held connection.
async fn connection(
    proxy: Proxy,
    request: Request,
    tell: mpsc::UnboundedSender<Told>,
    mut closed: oneshot::Receiver<()>,
) {
    let mut hold = match proxy.service.hold(request).await {
        Ok(hold) => hold,
        Err(error) => return drop(tell.send(Told::Refused(error))),
    };
    let _ = tell.send(Told::Granted(hold.lease.clone()));
    loop {
        let event = tokio::select! {
            biased;
            _ = &mut closed => return,
            () = proxy.draining.cancelled() => hold.drain(),
            event = hold.next() => event,
        };
        let is_last = !matches!(event, HoldEvent::Renewed(_));
        let _ = tell.send(Told::Event(event));
        if is_last {
            // The client may count on the lease until it closes the connection, or until the end that it was told.
            let _ = closed.await;
            return;
        }
    }
}
