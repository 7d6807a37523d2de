use crate::{Label, Mode, Request};

impl Request {
    /// An exclusive request without owner, labels, ttl or wait, for tests.
    pub fn new(name: impl Into<String>) -> Request {
        Request {
            name: name.into(),
            owner: String::new(),
            mode: Mode::Exclusive,
            ttl: None,
            wait: None,
            labels: Vec::new(),
            http: None,
            seed: 0,
        }
    }

    /// The value of the first label with this name.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|label| label.name == name).map(|label| label.value.as_str())
    }

    /// Adds a label to the request.
    pub fn with_label(mut self, name: impl Into<String>, value: impl Into<String>) -> Request {
        self.labels.push(Label { name: name.into(), value: value.into() });
        self
    }

    /// Sets the mode.
    pub fn with_mode(self, mode: Mode) -> Request {
        Request { mode, ..self }
    }

    /// Sets the ttl, in milliseconds.
    pub fn with_ttl(self, ttl: u32) -> Request {
        Request { ttl: Some(ttl), ..self }
    }

    /// Sets the longest wait, in milliseconds; 0 makes a single attempt.
    pub fn with_wait(self, wait: u32) -> Request {
        Request { wait: Some(wait), ..self }
    }
}
