//! Descriptors of products for cuBLASLt, and its algorithms for them.
//!
//! cuBLASLt is column-major, so it sees a row-major matrix as its transpose with the same stride:
//! D^T = op(A) op(B), see [`Product`].

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use cudarc::cublaslt::sys::{
    self,
    cublasComputeType_t::CUBLAS_COMPUTE_32F,
    cublasLtEpilogue_t::*,
    cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
    cublasLtMatmulDescAttributes_t::*,
    cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t::*,
    cublasLtReductionScheme_t::*,
    cublasStatus_t,
    cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F},
};
use sparse24_core::op::Accumulate;

use super::{
    cublaslt::{self, blas_error, check, succeeded},
    key::{Key, Product},
};
use crate::{Device, Error, Result, device::without_captures};

/// Bytes of the workspace.
pub(super) const WORKSPACE: usize = 32 << 20;

/// `cublasOperation_t`, for which cudarc's cublaslt module has no type.
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;

/// Alignment of the first element of each operand, in bytes.
const ALIGNMENT: usize = 16;
/// Number of candidates that are measured.
const CANDIDATES: usize = 16;

pub(super) struct Addresses {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) d: u64,
    pub(super) bias: u64,
    pub(super) workspace: u64,
}

#[derive(Debug)]
pub(super) struct Handle(cublasLtHandle_t);

// SAFETY: any thread may use the handle, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    pub(super) fn new(device: &Device) -> Result<Self> {
        cublaslt::load()?;
        device.bind()?;
        let mut handle = null_mut();
        let _alone = without_captures();
        // SAFETY: the library is loaded, and the context bound.
        check(unsafe { cublaslt::cublasLtCreate(&mut handle) }, || "opening cuBLASLt".into())?;
        Ok(Self(handle))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _alone = without_captures();
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { cublaslt::cublasLtDestroy(self.0) };
    }
}

#[derive(Debug)]
pub(super) struct Descriptors {
    product: sys::cublasLtMatmulDesc_t,
    /// Layouts of A, B and D.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

// SAFETY: descriptors are tied to no thread.
unsafe impl Send for Descriptors {}

impl Descriptors {
    pub(super) fn new(key: &Key) -> Result<Self> {
        let [m, n, k] = key.sizes.map(|size| size as u64);
        let (transposed_a, transposed_b, output) = match key.product {
            Product::Forward | Product::ForwardBias => (TRANSPOSED, AS_IT_IS, CUDA_R_16BF),
            Product::Dgrad => (AS_IT_IS, AS_IT_IS, CUDA_R_16BF),
            Product::Wgrad => (AS_IT_IS, TRANSPOSED, CUDA_R_32F),
        };
        let turned = |operation, [rows, columns]: [u64; 2]| {
            if operation == TRANSPOSED { [columns, rows] } else { [rows, columns] }
        };
        let shapes = [turned(transposed_a, [m, k]), turned(transposed_b, [k, n]), [m, n]];
        let mut of = Self { product: null_mut(), layouts: [null_mut(); 3] };
        let said = |status| check(status, || format!("describing {key}"));
        for (i, element) in [CUDA_R_16BF, CUDA_R_16BF, output].into_iter().enumerate() {
            let ([rows, columns], stride) = (shapes[i], key.strides[i] as i64);
            // SAFETY: the library is loaded, and writes a pointer.
            said(unsafe {
                cublaslt::cublasLtMatrixLayoutCreate(
                    &mut of.layouts[i],
                    element,
                    rows,
                    columns,
                    stride,
                )
            })?;
        }
        // SAFETY: the library is loaded, and writes a pointer.
        said(unsafe {
            cublaslt::cublasLtMatmulDescCreate(&mut of.product, CUBLAS_COMPUTE_32F, CUDA_R_32F)
        })?;
        let epilogue = match key.product {
            Product::ForwardBias => CUBLASLT_EPILOGUE_BIAS,
            Product::Forward | Product::Dgrad | Product::Wgrad => CUBLASLT_EPILOGUE_DEFAULT,
        };
        said(of.set(CUBLASLT_MATMUL_DESC_TRANSA, &transposed_a))?;
        said(of.set(CUBLASLT_MATMUL_DESC_TRANSB, &transposed_b))?;
        said(of.set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue))?;
        Ok(of)
    }

    /// The caller passes a value of the attribute's type.
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> cublasStatus_t {
        // SAFETY: the descriptor is alive, and the library copies as many bytes as the value has.
        unsafe {
            cublaslt::cublasLtMatmulDescSetAttribute(
                self.product,
                attribute,
                (&raw const *value).cast(),
                size_of::<T>(),
            )
        }
    }

    /// Algorithms that repeat their bits, in cuBLASLt's order of preference.
    pub(super) fn candidates(
        &self,
        handle: &Handle,
        key: &Key,
    ) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        let said = |status| check(status, || format!("choosing algorithms for {key}"));
        let preference = Preference::new().map_err(|code| refused(key, code))?;
        said(preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE as u64)))?;
        // The other schemes add partial sums in the output: in bf16, or in no fixed order.
        let scheme = if key.product == Product::ForwardBias {
            CUBLASLT_REDUCTION_SCHEME_NONE
        } else {
            CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
        };
        said(preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &(scheme as u32)))?;
        for attribute in [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            said(preference.set(attribute, &(ALIGNMENT as u32)))?;
        }
        // SAFETY: all fields are numbers, and zero is a valid status.
        let mut found: [cublasLtMatmulHeuristicResult_t; CANDIDATES] =
            unsafe { std::mem::zeroed() };
        let mut count: c_int = 0;
        let [a, b, d] = self.layouts;
        // SAFETY: descriptors are alive, and the buffer holds the requested number of results.
        let status = unsafe {
            let (asked, results) = (CANDIDATES as c_int, found.as_mut_ptr());
            cublaslt::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.product,
                a,
                b,
                d,
                d,
                preference.0,
                asked,
                results,
                &mut count,
            )
        };
        check(status, || format!("{key}"))?;
        let found = &found[..usize::try_from(count).unwrap_or(0)];
        let usable = found
            .iter()
            .filter(|found| found.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS)
            .map(|found| found.algo);
        Ok(usable.filter(|algorithm| serves(key, algorithm)).collect())
    }

    /// Accepts an algorithm that cuBLASLt supports for this product, that repeats its bits, and for
    /// which the workspace suffices.
    pub(super) fn accept(
        &self,
        handle: &Handle,
        key: &Key,
        algorithm: &cublasLtMatmulAlgo_t,
    ) -> Result<(), cublasStatus_t> {
        // SAFETY: all fields are numbers, and zero is a valid status.
        let mut result: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let [a, b, d] = self.layouts;
        // SAFETY: descriptors are alive, and the library writes one result.
        succeeded(unsafe {
            cublaslt::cublasLtMatmulAlgoCheck(
                handle.0,
                self.product,
                a,
                b,
                d,
                d,
                algorithm,
                &mut result,
            )
        })?;
        succeeded(result.state)?;
        if serves(key, algorithm) && result.workspaceSize <= WORKSPACE {
            Ok(())
        } else {
            Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)
        }
    }

    pub(super) fn multiply(
        &self,
        device: &Device,
        handle: &Handle,
        algorithm: &cublasLtMatmulAlgo_t,
        at: &Addresses,
        accumulate: Accumulate,
    ) -> Result<(), cublasStatus_t> {
        if at.bias != 0 {
            succeeded(self.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias))?;
        }
        let (one, factor) = (1.0_f32, if accumulate == Accumulate::Add { 1.0_f32 } else { 0.0 });
        let [a, b, d] = self.layouts;
        let [from_a, from_b, to, workspace] =
            [at.a, at.b, at.d, at.workspace].map(|address| address as *mut c_void);
        let (one, factor) = ((&raw const one).cast(), (&raw const factor).cast());
        let stream = device.stream().cast();
        // SAFETY: descriptors are alive; the caller checked that operands lie in live memory and
        // have the described shapes; the factors are read before the call returns.
        succeeded(unsafe {
            cublaslt::cublasLtMatmul(
                handle.0,
                self.product,
                one,
                from_a,
                a,
                from_b,
                b,
                factor,
                to,
                d,
                to,
                d,
                algorithm,
                workspace,
                WORKSPACE,
                stream,
            )
        })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: it was created once and is destroyed once.
            let _ = unsafe { cublaslt::cublasLtMatrixLayoutDestroy(layout) };
        }
        if !self.product.is_null() {
            // SAFETY: it was created once and is destroyed once.
            let _ = unsafe { cublaslt::cublasLtMatmulDescDestroy(self.product) };
        }
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, cublasStatus_t> {
        let mut preference = null_mut();
        // SAFETY: the library is loaded, and writes a pointer.
        succeeded(unsafe { cublaslt::cublasLtMatmulPreferenceCreate(&mut preference) })?;
        Ok(Self(preference))
    }

    /// The caller passes a value of the attribute's type.
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> cublasStatus_t {
        // SAFETY: the preference is alive, and the library copies as many bytes as the value has.
        unsafe {
            cublaslt::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                (&raw const *value).cast(),
                size_of::<T>(),
            )
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { cublaslt::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// Whether the algorithm has no split-K, or adds its partial sums in f32 and in order. With a bias
/// it must have none: the bias would be added after rounding, and the sum rounded again.
fn serves(key: &Key, algorithm: &cublasLtMatmulAlgo_t) -> bool {
    let (mut scheme, mut written) = (u32::MAX, 0);
    // SAFETY: the attribute is a u32.
    let status = unsafe {
        let to = (&raw mut scheme).cast();
        cublaslt::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
            to,
            size_of::<u32>(),
            &mut written,
        )
    };
    let whole = scheme == CUBLASLT_REDUCTION_SCHEME_NONE as u32;
    let in_order = scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32
        && key.product != Product::ForwardBias;
    status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && (whole || in_order)
}

pub(super) fn refused(key: &Key, status: cublasStatus_t) -> Error {
    blas_error(key.to_string(), status)
}
