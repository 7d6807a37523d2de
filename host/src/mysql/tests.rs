//! Experiments on servers that somebody has started.
