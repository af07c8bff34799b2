//! Core against exhaustive enumeration: patterns, ternary tiles, uniforms, bits of metadata.
//!
//! Expected values come from `sparse24_tests::oracle`, which shares no table with the crates under
//! test.

mod oracle {
    mod mutation;
    mod mvue;
    mod search;
}
