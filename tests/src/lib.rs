//! Cross-crate tests: oracle, property, cross-backend, training. The tests are in `tests/`; the
//! code that they share is here.

pub mod conformance;
pub mod hardening;
pub mod hooked;
pub mod oracle;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
