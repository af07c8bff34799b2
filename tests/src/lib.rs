//! Cross-crate tests: oracle, property, cross-backend, training. The tests are in `tests/`; what they share is here.

pub mod oracle;
