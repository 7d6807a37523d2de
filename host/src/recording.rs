//! Recordings of lock requests: what clients asked for, what their policy answered, and how it ended.
//!
//! A recording is a folder of files with one JSON object a line ([`Line`]), and the components of the policies. A proxy with
//! `[recording]` writes one; [`crate::replay`] runs other policies on it. The keys of a policy are sampled, never its requests:
//! either all requests for a key are recorded or none, because half of a queue says nothing about its waits.
//!
//! | file | content |
//! | --- | --- |
//! | `line` | the lines of a file |
//! | `mask` | names that are replaced by keyed hashes |
//! | `recorder`, `entry` | what a running proxy tells, without waiting |
//! | `writer` | the thread that writes the files |
//! | `reader` | a recording, read again |

mod entry;
mod line;
mod mask;
mod reader;
mod recorder;
mod writer;

pub use line::{Ask, End, Header, Http, LeaseName, Line, Pairs, PlanLine, PolicyLine, StoreTimes};
pub use reader::{ReadError, RecordedPolicy, Recording, read};
pub use recorder::{Asking, Recorder, Share};
