//! Descriptions of matrices for the bulk copy engine, which moves boxes of them and takes what lies
//! outside as zero.
//!
//! Deliberately absent: which box goes where.

use cudarc::driver::sys;
use half::bf16;

use crate::{Error, Matrix, device::driver_error, launch::Argument};

/// Where rows of a matrix that the copy engine moves must begin.
pub(crate) const ALIGNMENT: usize = 16;

/// A row-major matrix, moved in boxes of 64 (128 bytes) or fewer columns and `rows` rows, swizzled
/// in shared memory by 128 bytes.
pub(crate) fn swizzled(matrix: Matrix<bf16>, rows: u32) -> Result<Argument, Error> {
    assert!(matrix.is_aligned(ALIGNMENT) && matrix.elements() > 0 && rows <= 256, "checked before");
    let [height, width] = matrix.shape().map(|length| length as u64);
    // A single row may have any stride, which the driver would check all the same.
    let stride = if height == 1 { width.next_multiple_of(8) } else { matrix.stride() as u64 };
    let mut map = std::mem::MaybeUninit::uninit();
    // SAFETY: every array has as many elements as there are dimensions, two (strides: one less);
    // the driver checks their values and only writes the map.
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
    .map_err(|error| driver_error("describing a matrix to the copy engine".into(), error))?;
    // SAFETY: the call succeeded, so the map is written.
    Ok(Argument::TensorMap(unsafe { map.assume_init() }))
}
