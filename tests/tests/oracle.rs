//! Core against enumeration: every pattern, every ternary tile, every uniform, every bit of
//! metadata.
//!
//! Invariant: what is expected comes from `sparse24_tests::oracle`, which shares no table with the
//! crates under test.

mod oracle {
    mod mutation;
    mod mvue;
    mod search;
}
