//! `GET /v1/watch`: events of keys, as server-sent events.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::json;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio_util::sync::CancellationToken;

use crate::auth::{Counted, Quota};
use crate::clock;
use crate::config::Verb;
use crate::fronts::Refusal;
use crate::http::{Body, Kind, Problem, Query, Response};
use crate::lock::Key;
use crate::service::{Notice, NoticeKind, Principal, Service};

/// After this long without an event, a comment is sent, so that both ends notice a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The proxy has too many readers of events.
const TOO_MANY_WATCHERS: Kind =
    Kind::new("too_many_watchers", 429, "The proxy has too many readers of events");
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
    let counted = principal.take(Quota::Watchers).map_err(Refusal::from)?;
    let notices = service.watch().ok_or_else(|| {
        let detail = "the proxy has as many readers of events as it may have";
        let problem = Problem::new(TOO_MANY_WATCHERS, detail).with("bound", "limits.max_watchers");
        problem.retry_after_ms(1_000)
    })?;
    let prefix = prefix.to_owned();
    let watcher =
        Watcher { notices, prefix, principal, stop: stop.clone(), greeted: false, _counted: counted };
    let mut response = Response::new(Body::stream(stream::unfold(watcher, Watcher::next)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

struct Watcher {
    notices: Receiver<Arc<Notice>>,
    prefix: String,
    principal: Principal,
    stop: CancellationToken,
    greeted: bool,
    _counted: Option<Counted>,
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
            let piece: Bytes = tokio::select! {
                biased;
                () = stop.cancelled() => return None,
                // Before the events: a client without rights must see none of them.
                now = principal.changed() => {
                    self.principal = now?;
                    continue;
                }
                piece = self.piece() => piece?,
                () = tokio::time::sleep(KEEP_ALIVE) => Bytes::from_static(b": keep-alive\n\n"),
            };
            return Some((piece, self));
        }
    }

    /// Waits for at least one event, and adds all events that are already there. `None` after the last event.
    async fn piece(&mut self) -> Option<Bytes> {
        let first = loop {
            match self.notices.recv().await {
                Ok(notice) if self.sees(&notice) => break text(&notice),
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => break lagged(missed).into(),
                Err(RecvError::Closed) => return None,
            }
        };
        let mut more = BytesMut::new();
        for _ in 1..MAX_BATCH {
            let next = match self.notices.try_recv() {
                Ok(notice) if self.sees(&notice) => text(&notice),
                Ok(_) => continue,
                Err(TryRecvError::Lagged(missed)) => lagged(missed).into(),
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            };
            if more.is_empty() {
                more.extend_from_slice(&first);
            }
            more.extend_from_slice(&next);
        }
        Some(if more.is_empty() { first } else { more.freeze() })
    }

    fn sees(&self, notice: &Notice) -> bool {
        let key = notice.key.as_str();
        key.starts_with(&self.prefix) && self.principal.may(Verb::Watch, key)
    }
}

/// The text of a notice. It is written for its first reader, and the others share it.
fn text(notice: &Notice) -> Bytes {
    notice.text.get_or_init(|| event(notice).into()).clone()
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
        "at": clock::rfc3339(notice.at_us),
    });
    format!("event: {name}\ndata: {data}\n\n")
}

fn lagged(missed: u64) -> String {
    format!("event: lagged\ndata: {{\"event\":\"lagged\",\"missed\":{missed}}}\n\n")
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::lock::Token;

    fn notice(key: &str) -> Arc<Notice> {
        Arc::new(Notice {
            key: Key::new(key).unwrap(),
            kind: NoticeKind::HandedOff,
            owner: "w\n2".into(),
            token: Some(Token(7)),
            at_us: 0,
            text: OnceLock::new(),
        })
    }

    fn watcher(prefix: &str, notices: Receiver<Arc<Notice>>) -> Watcher {
        Watcher {
            notices,
            prefix: prefix.to_owned(),
            principal: Principal::ANONYMOUS,
            stop: CancellationToken::new(),
            greeted: true,
            _counted: None,
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
    async fn an_event_is_written_once_for_all_its_watchers() {
        let (send, notices) = tokio::sync::broadcast::channel(8);
        let other = watcher("a", notices.resubscribe());
        send.send(notice("a/1")).unwrap();
        let [(first, _), (second, _)] =
            [watcher("", notices).next().await.unwrap(), other.next().await.unwrap()];
        assert!(!first.is_empty());
        assert_eq!(first.as_ptr(), second.as_ptr(), "both have the same bytes in memory");
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
