//! Writing compressed matrices, row by row.

use rayon::prelude::*;
use sparse24_core::{Element, compressed::Compressed24, group::Pattern};

/// Overwrites every group of `out` with the kept pair that `kept(row, group)` returns.
pub(crate) fn write<T: Element>(
    out: &mut Compressed24<T>,
    kept: impl Fn(usize, usize) -> (Pattern, [T; 2]) + Sync,
) {
    let ([m, k], stride) = (out.shape(), out.metadata_stride());
    if m == 0 || k == 0 {
        return;
    }
    let (values, metadata) = out.parts_mut();
    let values = values.into_slice().expect("values are row-major").par_chunks_mut(k / 2);
    values.zip(metadata.par_chunks_mut(stride)).enumerate().for_each(
        |(row, (values, metadata))| {
            metadata.fill(0);
            for (group, values) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let pattern;
                (pattern, *values) = kept(row, group);
                metadata[group / 2] |= pattern.nibble() << (4 * (group % 2));
            }
        },
    );
}
