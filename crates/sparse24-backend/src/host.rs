//! Memory of the host that may be refused.

use crate::{Error, Region, Result, bytes, error::less_memory};

/// The elements of a matrix, all zero. Unlike `vec![0; n]`, it does not abort without memory.
///
/// # Errors
/// [`Error::Device`] names the matrix.
pub fn zeros<T: Clone + Default>(
    name: &str,
    [rows, columns]: [usize; 2],
    region: Region,
) -> Result<Vec<T>> {
    let elements = rows.saturating_mul(columns);
    let mut data = Vec::new();
    data.try_reserve_exact(elements)
        .map_err(|_| full(name, bytes([rows, columns], size_of::<T>() as u64), region))?;
    data.resize(elements, T::default());
    Ok(data)
}

/// The error where memory does not suffice.
pub(crate) fn full(name: &str, bytes: u64, region: Region) -> Error {
    let (mib, advice) = (bytes >> 20, less_memory(region.name()));
    Error::Device(format!("{name} needs {mib} MiB of memory, which are not free; {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_host_has_is_refused() {
        let error = zeros::<f32>("w", [1 << 40, 1 << 20], Region::Parameters).unwrap_err();
        assert!(error.to_string().starts_with("w needs 4398046511104 MiB"), "{error}");
    }
}
