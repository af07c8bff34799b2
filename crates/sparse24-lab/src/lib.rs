//! Many training runs: the search for the decay factor lambda, studies of several arms and seeds,
//! their statistics, and reports.
//!
//! | module | contents |
//! | --- | --- |
//! | [`search`] | the search for lambda by flip rate |
//! | [`study`] | arms times seeds, compared pairwise |
//! | [`series`] | several runs side by side in one folder |
//! | [`report`] | one offline page about one or several runs |
//! | [`statistics`] | means, quantiles and confidence intervals |

pub mod report;
pub mod search;
pub mod series;
pub mod statistics;
pub mod study;

pub use sparse24_run::Error;
