//! Many training runs: the search for the decay factor lambda, studies of several arms and seeds,
//! their statistics, and reports.
//!
//! | module | contents |
//! | --- | --- |
//! | [`search`] | the search for lambda by flip rate |
//! | [`study`] | arms times seeds, compared in pairs |
//! | [`runs`] | several runs in one folder |
//! | [`paper`] | the paper's tables and figures, with ours beside them |
//! | [`report`] | a page, or one figure, of one or several runs |
//! | [`statistics`] | means, quantiles and confidence intervals |

mod count;
pub mod paper;
pub mod report;
pub mod runs;
pub mod search;
pub mod statistics;
pub mod study;

pub use count::counted;
pub use sparse24_run::Error;

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;
