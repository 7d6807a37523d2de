//! What several fronts need: requests and answers as clients see them. A front imports no other front.
//!
//! | what | file |
//! | --- | --- |
//! | why a request has no effect, for any protocol | `refusal` |
//! | a refusal as an HTTP problem | `problem` |
//! | the fields of a JSON body, and their bounds | `fields` |
//! | lease ids, modes, times | `lease_id`, `mode`, `time` |

pub mod fields;
pub mod lease_id;
pub mod mode;
mod problem;
mod refusal;
pub mod time;

pub use refusal::{Code, Refusal};
