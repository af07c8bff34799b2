//! cuSPARSELt, the competitor for sparse products, loaded at run time if it is installed. It is
//! used in benchmarks only: its format is private, and its compression too slow for gradients.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_void},
    rc::Rc,
};

use half::bf16;

use super::timing::Contestant;
use crate::{Device, Error, Matrix, library::Library, loader::functions, spmm24::Form};

/// Bytes of its workspace.
const WORKSPACE: usize = 256 << 20;

// cuSPARSELt's constants.
const BF16: c_int = 14;
const COLUMNS_FIRST: c_int = 1;
const ROWS_FIRST: c_int = 2;
const AS_IT_IS: c_int = 0;
const TWO_OF_FOUR: c_int = 0;
const IN_F32: c_int = 2;
const ANY_ALGORITHM: c_int = 0;
const OPERAND_ALIGNMENT: u32 = 16;

/// Memory for one of its opaque structures, of 512 to 11024 bytes depending on the release.
#[repr(C, align(16))]
struct Opaque(UnsafeCell<[u8; 16 << 10]>);

impl Opaque {
    fn new() -> Box<Self> {
        Box::new(Self(UnsafeCell::new([0; 16 << 10])))
    }

    fn pointer(&self) -> Thing {
        self.0.get().cast()
    }
}

/// A pointer to an opaque structure, or to memory.
type Thing = *mut c_void;

functions! { Library::CusparseLt;
    cusparseLtInit(handle: Thing) -> c_int;
    cusparseLtDestroy(handle: Thing) -> c_int;
    cusparseLtGetProperty(part: c_int, number: *mut c_int) -> c_int;
    cusparseLtStructuredDescriptorInit(handle: Thing, matrix: Thing, rows: i64, columns: i64,
        stride: i64, alignment: u32, element: c_int, order: c_int, sparsity: c_int) -> c_int;
    cusparseLtDenseDescriptorInit(handle: Thing, matrix: Thing, rows: i64, columns: i64,
        stride: i64, alignment: u32, element: c_int, order: c_int) -> c_int;
    cusparseLtMatDescriptorDestroy(matrix: Thing) -> c_int;
    cusparseLtMatmulDescriptorInit(handle: Thing, product: Thing, turned_a: c_int, turned_b: c_int,
        a: Thing, b: Thing, c: Thing, d: Thing, sums: c_int) -> c_int;
    cusparseLtMatmulAlgSelectionInit(handle: Thing, selection: Thing, product: Thing,
        algorithm: c_int) -> c_int;
    cusparseLtMatmulPlanInit(handle: Thing, plan: Thing, product: Thing, selection: Thing) -> c_int;
    cusparseLtMatmulPlanDestroy(plan: Thing) -> c_int;
    cusparseLtSpMMACompressedSize(handle: Thing, plan: Thing, bytes: *mut usize, room: *mut usize)
        -> c_int;
    cusparseLtSpMMACompress(handle: Thing, plan: Thing, a: Thing, to: Thing, room: Thing,
        stream: Thing) -> c_int;
    cusparseLtMatmulSearch(handle: Thing, plan: Thing, alpha: Thing, a: Thing, b: Thing,
        beta: Thing, c: Thing, d: Thing, workspace: Thing, streams: *mut Thing, count: i32)
        -> c_int;
    cusparseLtMatmul(handle: Thing, plan: Thing, alpha: Thing, a: Thing, b: Thing, beta: Thing,
        c: Thing, d: Thing, workspace: Thing, streams: *mut Thing, count: i32) -> c_int;
}

/// cuSPARSELt, opened for the current device.
#[derive(Clone)]
pub(super) struct CusparseLt(Rc<Opened>);

struct Opened {
    handle: Box<Opaque>,
    release: String,
}

/// Operands of D`[m,n]` = A`[m,k]` B`[k,n]`, with the memory layout of the product's form.
pub(super) struct Operands<'a> {
    pub(super) form: Form,
    pub(super) shape: [usize; 3],
    /// A, dense in memory and 2:4 along its rows.
    pub(super) a: Matrix<bf16>,
    /// B and D of each set of buffers.
    pub(super) sets: &'a [[Matrix<bf16>; 2]],
}

impl CusparseLt {
    pub(super) fn load(device: &Device) -> Result<Self, String> {
        load().and_then(|()| device.bind()).map_err(|error| error.to_string())?;
        let handle = Opaque::new();
        // SAFETY: the context is bound, and the buffer is large enough for a handle.
        succeeded(unsafe { cusparseLtInit(handle.pointer()) }, "opening it")?;
        let mut release = [0; 3];
        for (part, number) in (0..).zip(&mut release) {
            // SAFETY: the library writes a number.
            succeeded(unsafe { cusparseLtGetProperty(part, number) }, "its release")?;
        }
        let release = release.map(|number| number.to_string()).join(".");
        Ok(Self(Rc::new(Opened { handle, release })))
    }

    pub(super) fn release(&self) -> String {
        self.0.release.clone()
    }

    /// A product with the algorithm that cuSPARSELt's search finds, or why it refuses.
    pub(super) fn product(
        &self,
        device: &mut Device,
        operands: &Operands<'_>,
    ) -> Result<Contestant, String> {
        let Operands { form, shape: [m, n, k], a, sets } = *operands;
        let handle = self.0.handle.pointer();
        let mut plan =
            Plan { library: self.clone(), matrices: Vec::new(), made: Vec::new(), planned: false };
        // D^T and B^T lie row-major in the transposed form, which is D and B column-major.
        let (order, stride_b, stride_d) = match form {
            Form::Transposed => (COLUMNS_FIRST, k, m),
            Form::Straight => (ROWS_FIRST, n, n),
        };
        let [rows, columns, inner] = [m, n, k].map(|length| length as i64);
        let a_descriptor = plan.matrix(|to| {
            // SAFETY: the buffer is large enough for a descriptor, here and below.
            unsafe {
                cusparseLtStructuredDescriptorInit(
                    handle,
                    to,
                    rows,
                    inner,
                    inner,
                    OPERAND_ALIGNMENT,
                    BF16,
                    ROWS_FIRST,
                    TWO_OF_FOUR,
                )
            }
        })?;
        let b_descriptor =
            // SAFETY: as above.
            plan.matrix(|to| unsafe {
                cusparseLtDenseDescriptorInit(
                    handle, to, inner, columns, stride_b as i64, OPERAND_ALIGNMENT, BF16, order,
                )
            })?;
        let d_descriptor =
            // SAFETY: as above.
            plan.matrix(|to| unsafe {
                cusparseLtDenseDescriptorInit(
                    handle, to, rows, columns, stride_d as i64, OPERAND_ALIGNMENT, BF16, order,
                )
            })?;
        let [product, selection, planned] = [0; 3].map(|_| plan.make());
        // SAFETY: the buffers are large enough, and those that are read were initialized.
        unsafe {
            let (b, d) = (b_descriptor, d_descriptor);
            succeeded(
                cusparseLtMatmulDescriptorInit(
                    handle,
                    product,
                    AS_IT_IS,
                    AS_IT_IS,
                    a_descriptor,
                    b,
                    d,
                    d,
                    IN_F32,
                ),
                "describing the product",
            )?;
            succeeded(
                cusparseLtMatmulAlgSelectionInit(handle, selection, product, ANY_ALGORITHM),
                "its algorithms",
            )?;
            succeeded(cusparseLtMatmulPlanInit(handle, planned, product, selection), "its plan")?;
        }
        plan.planned = true;
        let (mut size, mut room) = (0, 0);
        succeeded(
            // SAFETY: the plan was made, and two numbers are written.
            unsafe { cusparseLtSpMMACompressedSize(handle, planned, &mut size, &mut room) },
            "the compressed size",
        )?;
        let mut memory = |bytes: usize| {
            device.alloc::<u8>("cuSPARSELt", [1, bytes.max(256)]).map_err(|error| error.to_string())
        };
        let [compressed, room, workspace] =
            [memory(size)?, memory(room)?, memory(WORKSPACE)?].map(address);
        let mut stream: Thing = device.stream().cast();
        succeeded(
            // SAFETY: A has the described shape, and outputs have the requested sizes.
            unsafe {
                cusparseLtSpMMACompress(handle, planned, address(a), compressed, room, stream)
            },
            "compressing",
        )?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [alpha, beta] = [&one, &zero].map(|number| (&raw const *number).cast_mut().cast());
        let [b, d] = sets[0].map(address);
        // SAFETY: operands have the described shapes, and nothing else uses D meanwhile.
        let searched = unsafe {
            cusparseLtMatmulSearch(
                handle,
                planned,
                alpha,
                compressed,
                b,
                beta,
                d,
                d,
                workspace,
                &mut stream,
                1,
            )
        };
        succeeded(searched, "its search")?;
        let pairs: Vec<[Thing; 2]> = sets.iter().map(|set| set.map(address)).collect();
        let launch = move |device: &mut Device, set: usize| {
            device.bind()?;
            let handle = &plan.library.0.handle;
            let (planned, mut stream): (Thing, Thing) = (planned, device.stream().cast());
            let (one, zero) = (1.0_f32, 0.0_f32);
            let [alpha, beta] = [&one, &zero].map(|number| (&raw const *number).cast_mut().cast());
            let [b, d] = pairs[set];
            // SAFETY: as above; the device holds the memory until it is reset, after which no
            // contestant is used.
            let status = unsafe {
                cusparseLtMatmul(
                    handle.pointer(),
                    planned,
                    alpha,
                    compressed,
                    b,
                    beta,
                    d,
                    d,
                    workspace,
                    &mut stream,
                    1,
                )
            };
            succeeded(status, "a product")
                .map_err(|code| Error::Driver { what: "cuSPARSELt".into(), code })
        };
        Ok(Contestant { name: "cuSPARSELt".into(), sets: sets.len(), launch: Box::new(launch) })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: it was opened once, and is not used afterwards.
        let _ = unsafe { cusparseLtDestroy(self.handle.pointer()) };
    }
}

/// The structures of a product, destroyed on drop.
struct Plan {
    library: CusparseLt,
    matrices: Vec<Box<Opaque>>,
    /// The product, its algorithms, its plan.
    made: Vec<Box<Opaque>>,
    planned: bool,
}

impl Plan {
    fn make(&mut self) -> Thing {
        self.made.push(Opaque::new());
        self.made.last().expect("it was just pushed").pointer()
    }

    fn matrix(&mut self, describe: impl FnOnce(Thing) -> c_int) -> Result<Thing, String> {
        let descriptor = Opaque::new();
        succeeded(describe(descriptor.pointer()), "describing a matrix")?;
        self.matrices.push(descriptor);
        Ok(self.matrices.last().expect("it was just pushed").pointer())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each was created once and is destroyed once, the plan first.
        unsafe {
            if let Some(plan) = self.made.last().filter(|_| self.planned) {
                cusparseLtMatmulPlanDestroy(plan.pointer());
            }
            for matrix in &self.matrices {
                cusparseLtMatDescriptorDestroy(matrix.pointer());
            }
        }
    }
}

fn address<T: crate::Scalar>(matrix: Matrix<T>) -> Thing {
    matrix.span().start as Thing
}

fn succeeded(status: c_int, what: &str) -> Result<(), String> {
    if status == 0 {
        Ok(())
    } else {
        Err(format!("cuSPARSELt: {what} failed with status {status}"))
    }
}
