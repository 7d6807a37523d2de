//! Which of the servers of `store.url` is in use, and what happens before another server is used.
//!
//! With a single server, there is nothing to choose. Of several servers, at most one may be writable at a time;
//! the operator must ensure this. The proxy does the rest:
//!
//! - It uses the server whose record has the highest floor: the server that last granted leases. A promoted
//!   replica has the record of the server that it replicated from.
//! - A connection belongs to one server generation. When another server is chosen, all connections are given
//!   up.
//! - Every second, all servers are probed. The probe renews the in-use heartbeat of the server in use. If
//!   another server was chosen later, the proxy moves to it. The nodes of a Galera cluster share one record,
//!   which names the chosen node.
//! - A server whose heartbeat is not fresh may have been out of use while another server granted leases. The
//!   first connection to such a server finds out before the server is used.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`election`] | every decision, pure: the server to use, and what a new connection must change in the record |
//! | [`servers`] | the server in use, its generation, and the last probes |
//! | [`prober`] | probes the servers, and finds a server for a new connection |
//! | [`takeover`] | carries out what a new connection must do before its server may grant leases |
//! | [`identity`] | the record and the heartbeat in the tables |

pub mod election;
pub mod identity;
pub mod prober;
pub mod servers;
pub mod takeover;
