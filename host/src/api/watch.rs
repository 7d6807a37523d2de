//! `GET /v1/watch`: events of keys, as server-sent events.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::json;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio_util::sync::CancellationToken;

use crate::config::Verb;
use crate::fronts::time;
use crate::http::{Body, Problem, Query, Response};
use crate::lock::Key;
use crate::service::{Notice, NoticeKind, Principal, Service};

/// After this long without an event, a comment is sent, so that both ends notice a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The most events in one chunk of the stream.
const MAX_BATCH: usize = 64;

/// Streams the events of all keys that begin with `prefix`.
pub fn watch(
    service: &Service,
    stop: &CancellationToken,
    principal: Principal,
    query: Option<&str>,
) -> Result<Response, Problem> {
    let query = Query::parse(query, &["prefix"])?;
    let prefix = query.text("prefix").unwrap_or_default();
    if prefix.len() > Key::MAX_BYTES {
        let bound = format!("at most {} bytes", Key::MAX_BYTES);
        return Err(Problem::invalid("prefix", format!("must have {bound}")).with("bound", bound));
    }
    let (notices, prefix) = (service.watch(), prefix.to_owned());
    let watcher = Watcher { notices, prefix, principal, stop: stop.clone(), greeted: false };
    let mut response = Response::new(Body::stream(stream::unfold(watcher, Watcher::next)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

struct Watcher {
    notices: Receiver<Notice>,
    prefix: String,
    principal: Principal,
    stop: CancellationToken,
    greeted: bool,
}

impl Watcher {
    /// The next chunk of the stream, with the watcher that produces the chunk after it.
    async fn next(mut self) -> Option<(Bytes, Watcher)> {
        if !self.greeted {
            self.greeted = true;
            return Some((Bytes::from_static(b": watching\n\n"), self));
        }
        let stop = self.stop.clone();
        loop {
            let principal = self.principal.clone();
            let piece = tokio::select! {
                biased;
                () = stop.cancelled() => return None,
                // Before the events: a client without rights must see none of them.
                now = principal.changed() => {
                    self.principal = now?;
                    continue;
                }
                piece = self.piece() => piece?,
                () = tokio::time::sleep(KEEP_ALIVE) => ": keep-alive\n\n".to_owned(),
            };
            return Some((piece.into(), self));
        }
    }

    /// Waits for at least one event, and adds all events that are already there. `None` after the last event.
    async fn piece(&mut self) -> Option<String> {
        let mut piece = String::new();
        while piece.is_empty() {
            match self.notices.recv().await {
                Ok(notice) => self.add(&mut piece, &notice),
                Err(RecvError::Lagged(missed)) => piece.push_str(&lagged(missed)),
                Err(RecvError::Closed) => return None,
            }
        }
        for _ in 1..MAX_BATCH {
            match self.notices.try_recv() {
                Ok(notice) => self.add(&mut piece, &notice),
                Err(TryRecvError::Lagged(missed)) => piece.push_str(&lagged(missed)),
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        Some(piece)
    }

    fn add(&self, piece: &mut String, notice: &Notice) {
        let key = notice.key.as_str();
        if key.starts_with(&self.prefix) && self.principal.may(Verb::Watch, key) {
            piece.push_str(&event(notice));
        }
    }
}

fn event(notice: &Notice) -> String {
    let name = match notice.kind {
        NoticeKind::Granted => "granted",
        NoticeKind::Released => "released",
        NoticeKind::Expired => "expired",
        NoticeKind::HandedOff => "handed_off",
        NoticeKind::Forced => "forced",
        NoticeKind::Lost => "lost",
    };
    let data = json!({
        "event": name,
        "key": notice.key.as_str(),
        "owner": notice.owner,
        "token": notice.token.map_or(0, |token| token.0),
        "at": time::rfc3339(notice.at_us),
    });
    format!("event: {name}\ndata: {data}\n\n")
}

fn lagged(missed: u64) -> String {
    format!("event: lagged\ndata: {{\"event\":\"lagged\",\"missed\":{missed}}}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Token;

    fn notice(key: &str) -> Notice {
        Notice {
            key: Key::new(key).unwrap(),
            kind: NoticeKind::HandedOff,
            owner: "w\n2".into(),
            token: Some(Token(7)),
            at_us: 0,
        }
    }

    fn watcher(prefix: &str, notices: Receiver<Notice>) -> Watcher {
        Watcher {
            notices,
            prefix: prefix.to_owned(),
            principal: Principal::Anonymous,
            stop: CancellationToken::new(),
            greeted: true,
        }
    }

    #[tokio::test]
    async fn events_are_filtered_by_prefix_and_written_on_one_line_each() {
        let (send, notices) = tokio::sync::broadcast::channel(8);
        for key in ["a/1", "b/1", "a/2"] {
            send.send(notice(key)).unwrap();
        }
        let (piece, _) = watcher("a/", notices).next().await.unwrap();
        let text = String::from_utf8(piece.to_vec()).unwrap();
        assert_eq!(text.matches("event: handed_off\ndata: {").count(), 2, "{text}");
        assert_eq!(text.lines().count(), 6, "{text}");
        assert!(!text.contains("b/1"), "{text}");
    }

    #[tokio::test]
    async fn a_lagging_watcher_gets_the_number_of_missed_events() {
        let (send, notices) = tokio::sync::broadcast::channel(2);
        for _ in 0..5 {
            send.send(notice("a")).unwrap();
        }
        let (piece, _) = watcher("", notices).next().await.unwrap();
        let text = String::from_utf8(piece.to_vec()).unwrap();
        assert!(text.starts_with("event: lagged\ndata: {\"event\":\"lagged\",\"missed\":3}\n\n"), "{text}");
    }

    #[tokio::test]
    async fn a_shutdown_ends_the_event_stream() {
        let (_send, notices) = tokio::sync::broadcast::channel(2);
        let watcher = watcher("", notices);
        watcher.stop.cancel();
        assert!(watcher.next().await.is_none());
    }
}
