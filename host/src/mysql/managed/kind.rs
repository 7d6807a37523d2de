//! The two kinds of server.

use std::fmt;

/// MySQL or MariaDB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// MySQL: `mysqld`.
    Mysql,
    /// MariaDB: `mariadbd`.
    Mariadb,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Mysql => "MySQL",
            Kind::Mariadb => "MariaDB",
        })
    }
}
