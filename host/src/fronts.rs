//! What several fronts need: requests and answers as clients see them. A front imports no other front.
//!
//! | what | file |
//! | --- | --- |
//! | whether an HTTP request is answered, and who sent it | `admission` |
//! | the paths of a front, and what each needs | `routes` |
//! | why a request has no effect, for any protocol | `refusal`, made of each error in `errors` |
//! | a refusal as an HTTP problem | `problem` |
//! | the fields of a JSON body, and their bounds | `fields` |
//! | lease ids, modes | `lease_id`, `mode` |

pub(crate) mod admission;
mod errors;
pub mod fields;
pub mod lease_id;
pub mod mode;
mod problem;
mod refusal;
pub mod routes;

pub use admission::{Access, Admitted};
pub use refusal::{Code, Hint, Refusal};
