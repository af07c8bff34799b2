//! Tensor maps: descriptions of matrices for TMA, which copies boxes of them and reads zeros out of
//! bounds.

use cudarc::driver::sys::{self, CUtensorMap};
use half::bf16;

use crate::{Matrix, Result, error::driver_error};

/// Alignment of rows that TMA copies, in bytes.
pub(crate) const ALIGNMENT: usize = 16;

/// A row-major matrix, copied in boxes of at most 64 columns (128 bytes) and `rows` rows, with the
/// 128-byte swizzle in shared memory.
pub(crate) fn swizzled(matrix: Matrix<bf16>, rows: u32) -> Result<CUtensorMap> {
    assert!(matrix.is_aligned(ALIGNMENT) && matrix.elements() > 0 && rows <= 256, "checked before");
    let [height, width] = matrix.shape().map(|length| length as u64);
    // The driver checks the stride even of a single row, where it does not matter.
    let stride = if height == 1 { width.next_multiple_of(8) } else { matrix.stride() as u64 };
    let mut map = std::mem::MaybeUninit::uninit();
    // SAFETY: every array has an element per dimension (strides: one less); the driver checks their
    // values and only writes the map.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.address as *mut std::ffi::c_void,
            [width, height].as_ptr(),
            [stride * size_of::<bf16>() as u64].as_ptr(),
            [64, rows].as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|error| driver_error("encoding a tensor map", error))?;
    // SAFETY: the call succeeded, so the map is initialized.
    Ok(unsafe { map.assume_init() })
}
