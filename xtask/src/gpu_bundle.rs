//! stub
use crate::Result;
pub(crate) fn run(_a: &[String]) -> Result<std::process::ExitCode> {
    Err("no".into())
}
