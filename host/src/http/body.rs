//! Bodies: sending them, and reading them within limits.

use std::any::Any;
use std::borrow::Cow;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderValue};

use super::activity::UnderWay;

/// A request whose body has not been read. It is boxed because each asynchronous function that takes it reserves space for
/// it twice, until the function returns.
pub type Request = Box<hyper::Request<Incoming>>;
/// An answer with its body.
pub type Response = hyper::Response<Body>;

/// The body of an answer: bytes, a stream of bytes that ends when the client goes away, or the body of another server
/// as it arrives.
pub struct Body {
    content: Content,
    /// Keeps the request counted as in progress until its answer has been sent.
    under_way: Option<UnderWay>,
    /// Keeps the request counted for its client until then.
    counted: Option<Arc<dyn Any + Send + Sync>>,
}

/// The longest part of a body that is handed over at once, in bytes. The rest waits until the client has room for it, so what
/// it does not read stays here and counts for the client.
const PART: usize = 16 * 1024;

enum Content {
    Full(Bytes),
    Stream(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
    Proxied(Pin<Box<dyn HttpBody<Data = Bytes, Error = BrokenBody> + Send>>),
}

/// An answer that cannot be completed. The client is cut off so that it does not take the part for the whole: over
/// HTTP/1 the connection is closed in the middle of the body, over HTTP/2 the stream is reset.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
pub struct BrokenBody(Cow<'static, str>);

impl BrokenBody {
    /// An answer that breaks off for the given reason.
    pub fn new(why: impl Into<Cow<'static, str>>) -> BrokenBody {
        BrokenBody(why.into())
    }
}

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The body exceeds the size limit.
    #[error("the body is over {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The body did not arrive in time.
    #[error("the body did not arrive within {} ms", limit.as_millis())]
    Slow {
        /// The time that the body had.
        limit: Duration,
    },
    /// The connection failed before the end of the body.
    #[error("the body broke off: {}", cause(.0))]
    Broken(#[source] hyper::Error),
}

impl Body {
    /// A body of some bytes.
    pub fn full(bytes: impl Into<Bytes>) -> Body {
        Body::of(Content::Full(bytes.into()))
    }

    /// A body that ends when `stream` ends or the client goes away.
    pub fn stream(stream: impl Stream<Item = Bytes> + Send + 'static) -> Body {
        Body::of(Content::Stream(Box::pin(stream)))
    }

    /// Passes on another body as it arrives, with its trailers. A known length is announced to the client.
    pub fn proxied(body: impl HttpBody<Data = Bytes, Error = BrokenBody> + Send + 'static) -> Body {
        Body::of(Content::Proxied(Box::pin(body)))
    }

    fn of(content: Content) -> Body {
        Body { content, under_way: None, counted: None }
    }

    /// Keeps `counted` until the answer has been sent. Until then, the request counts for its client.
    pub fn counts(&mut self, counted: Option<Arc<dyn Any + Send + Sync>>) {
        self.counted = counted;
    }

    pub(super) fn keep(&mut self, under_way: UnderWay) {
        self.under_way = Some(under_way);
    }
}

/// A 200 answer with a JSON body.
pub fn json(value: &impl serde::Serialize) -> Response {
    let mut bytes = Vec::with_capacity(384);
    // Serialization fails only for maps whose keys are not text, and there are none here.
    let _ = serde_json::to_writer(&mut bytes, value);
    let mut response = Response::new(Body::full(bytes));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Reads a whole body of at most `limit` bytes within `timeout`.
///
/// A body that announces a greater length is refused unread.
pub async fn read_body(request: Request, limit: usize, timeout: Duration) -> Result<Bytes, BodyError> {
    let body = request.into_body();
    if body.size_hint().lower() > limit as u64 {
        return Err(BodyError::TooLarge { limit });
    }
    match tokio::time::timeout(timeout, collect(body, limit)).await {
        Ok(read) => read,
        Err(_elapsed) => Err(BodyError::Slow { limit: timeout }),
    }
}

async fn collect(mut body: Incoming, limit: usize) -> Result<Bytes, BodyError> {
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(BodyError::Broken)?.into_data() else { continue };
        if first.len() + all.len() + data.len() > limit {
            return Err(BodyError::TooLarge { limit });
        }
        // Almost every body is one frame, which is returned without a copy.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

/// The cause that the connection's task gives is more specific than the body's error.
fn cause(error: &hyper::Error) -> &dyn Error {
    error.source().unwrap_or(error)
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        let next = match &mut self.content {
            Content::Full(bytes) if bytes.is_empty() => None,
            Content::Full(bytes) => Some(bytes.split_to(bytes.len().min(PART))),
            Content::Stream(stream) => ready!(stream.as_mut().poll_next(cx)),
            Content::Proxied(body) => return body.as_mut().poll_frame(cx),
        };
        Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Full(bytes) => bytes.is_empty(),
            Content::Stream(_) => false,
            Content::Proxied(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream(_) => SizeHint::default(),
            Content::Proxied(body) => body.size_hint(),
        }
    }
}
