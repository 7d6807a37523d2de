//! The store on MySQL and MariaDB.

pub mod managed;
