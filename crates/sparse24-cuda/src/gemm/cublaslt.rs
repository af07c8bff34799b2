//! Functions of cuBLASLt. Invariant: [`load`] succeeds before any other is called.

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasStatus_t, cudaDataType_t,
    cudaStream_t,
};

use crate::{Error, Result, library::Library, loader::functions};

type Layout = cublasLtMatrixLayout_t;

functions! { Library::CublasLt;
    cublasLtCreate(handle: *mut cublasLtHandle_t) -> cublasStatus_t;
    cublasLtDestroy(handle: cublasLtHandle_t) -> cublasStatus_t;
    cublasLtGetStatusName(status: cublasStatus_t) -> *const c_char;
    cublasLtGetVersion() -> usize;
    cublasLtMatmul(handle: cublasLtHandle_t, product: cublasLtMatmulDesc_t, alpha: *const c_void,
        a: *const c_void, of_a: Layout, b: *const c_void, of_b: Layout, beta: *const c_void,
        c: *const c_void, of_c: Layout, d: *mut c_void, of_d: Layout,
        algorithm: *const cublasLtMatmulAlgo_t, workspace: *mut c_void, bytes: usize,
        stream: cudaStream_t) -> cublasStatus_t;
    cublasLtMatmulAlgoCheck(handle: cublasLtHandle_t, product: cublasLtMatmulDesc_t, a: Layout,
        b: Layout, c: Layout, d: Layout, algorithm: *const cublasLtMatmulAlgo_t,
        result: *mut cublasLtMatmulHeuristicResult_t) -> cublasStatus_t;
    cublasLtMatmulAlgoConfigGetAttribute(algorithm: *const cublasLtMatmulAlgo_t,
        attribute: cublasLtMatmulAlgoConfigAttributes_t, to: *mut c_void, bytes: usize,
        written: *mut usize) -> cublasStatus_t;
    cublasLtMatmulAlgoGetHeuristic(handle: cublasLtHandle_t, product: cublasLtMatmulDesc_t,
        a: Layout, b: Layout, c: Layout, d: Layout, preference: cublasLtMatmulPreference_t,
        asked: c_int, results: *mut cublasLtMatmulHeuristicResult_t, count: *mut c_int)
        -> cublasStatus_t;
    cublasLtMatmulDescCreate(product: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t,
        scale: cudaDataType_t) -> cublasStatus_t;
    cublasLtMatmulDescDestroy(product: cublasLtMatmulDesc_t) -> cublasStatus_t;
    cublasLtMatmulDescSetAttribute(product: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t, value: *const c_void, bytes: usize)
        -> cublasStatus_t;
    cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t) -> cublasStatus_t;
    cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t) -> cublasStatus_t;
    cublasLtMatmulPreferenceSetAttribute(preference: cublasLtMatmulPreference_t,
        attribute: cublasLtMatmulPreferenceAttributes_t, value: *const c_void, bytes: usize)
        -> cublasStatus_t;
    cublasLtMatrixLayoutCreate(layout: *mut Layout, element: cudaDataType_t, rows: u64,
        columns: u64, stride: i64) -> cublasStatus_t;
    cublasLtMatrixLayoutDestroy(layout: Layout) -> cublasStatus_t;
}

pub(super) fn version() -> usize {
    // SAFETY: the call has no preconditions.
    unsafe { cublasLtGetVersion() }
}

pub(super) fn succeeded(status: cublasStatus_t) -> Result<(), cublasStatus_t> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(status) }
}

pub(super) fn check(status: cublasStatus_t, what: impl FnOnce() -> String) -> Result {
    succeeded(status).map_err(|status| blas_error(what(), status))
}

pub(super) fn blas_error(what: String, status: cublasStatus_t) -> Error {
    // SAFETY: for every status, the library returns a static NUL-terminated text.
    let name = unsafe { CStr::from_ptr(cublasLtGetStatusName(status)) };
    Error::Blas { what, code: name.to_string_lossy().into_owned() }
}
