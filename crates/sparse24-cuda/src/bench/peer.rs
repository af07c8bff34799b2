//! cuSPARSELt, the peer of sparse products, where the machine has it: loaded at run time, with declarations of our own for what is called.
//!
//! Its handles are bytes of which it alone knows the meaning; there is room for those of every release. Deliberately absent: any use outside of
//! a bench, since its format is private and its compression too slow for gradients.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_void},
    rc::Rc,
};

use half::bf16;

use super::timing::Contestant;
use crate::{Device, Error, Matrix, library, spmm24::Form};

const FILES: [&str; 2] = ["libcusparseLt.so.0", "libcusparseLt.so"];

/// Bytes that its kernels may work in.
const WORKSPACE: usize = 256 << 20;

// The library's numbers.
const BF16: c_int = 14;
const COLUMNS_FIRST: c_int = 1;
const ROWS_FIRST: c_int = 2;
const AS_IT_IS: c_int = 0;
const TWO_OF_FOUR: c_int = 0;
const IN_F32: c_int = 2;
const ANY_ALGORITHM: c_int = 0;
const OPERAND_ALIGNMENT: u32 = 16;

/// Memory for one of the library's own things, whose size differs between its releases: 512 bytes in some, 11024 in others.
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

/// A pointer to a thing of the library's.
type Thing = *mut c_void;
type Status = c_int;

macro_rules! functions {
    ($($name:ident = $symbol:literal($($argument:ty),*);)+) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> Status,)+
            _library: libloading::Library,
        }

        impl Functions {
            fn of(library: libloading::Library) -> Result<Self, String> {
                $(
                    // SAFETY: the library's header declares it so.
                    let $name = *unsafe { library.get($symbol) }.map_err(|_| format!("it lacks {:?}", $symbol))?;
                )+
                Ok(Self { $($name,)+ _library: library })
            }
        }
    };
}

functions! {
    init = c"cusparseLtInit"(Thing);
    destroy = c"cusparseLtDestroy"(Thing);
    property = c"cusparseLtGetProperty"(c_int, *mut c_int);
    sparse = c"cusparseLtStructuredDescriptorInit"(Thing, Thing, i64, i64, i64, u32, c_int, c_int, c_int);
    dense = c"cusparseLtDenseDescriptorInit"(Thing, Thing, i64, i64, i64, u32, c_int, c_int);
    product = c"cusparseLtMatmulDescriptorInit"(Thing, Thing, c_int, c_int, Thing, Thing, Thing, Thing, c_int);
    selection = c"cusparseLtMatmulAlgSelectionInit"(Thing, Thing, Thing, c_int);
    plan = c"cusparseLtMatmulPlanInit"(Thing, Thing, Thing, Thing);
    drop_plan = c"cusparseLtMatmulPlanDestroy"(Thing);
    drop_matrix = c"cusparseLtMatDescriptorDestroy"(Thing);
    compressed_size = c"cusparseLtSpMMACompressedSize"(Thing, Thing, *mut usize, *mut usize);
    compress = c"cusparseLtSpMMACompress"(Thing, Thing, Thing, Thing, Thing, Thing);
    search = c"cusparseLtMatmulSearch"(Thing, Thing, Thing, Thing, Thing, Thing, Thing, Thing, Thing, *mut Thing, i32);
    multiply = c"cusparseLtMatmul"(Thing, Thing, Thing, Thing, Thing, Thing, Thing, Thing, Thing, *mut Thing, i32);
}

/// The library, opened for the device that was current.
#[derive(Clone)]
pub(super) struct CusparseLt(Rc<Opened>);

struct Opened {
    functions: Functions,
    handle: Box<Opaque>,
    release: String,
}

/// Operands of D`[m,n]` = A`[m,k]` B`[k,n]`, in the order in memory that the product's form has.
pub(super) struct Operands<'a> {
    pub(super) form: Form,
    pub(super) shape: [usize; 3],
    /// A, dense in memory and 2:4 along its rows.
    pub(super) a: Matrix<bf16>,
    /// B and D, a pair a set of buffers.
    pub(super) sets: &'a [[Matrix<bf16>; 2]],
}

impl CusparseLt {
    /// Finds it as CUDA's own libraries are found.
    pub(super) fn load(device: &Device) -> Result<Self, String> {
        let (library, file) = library::open(&FILES).map_err(|tried| {
            let tried = tried.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
            format!("cuSPARSELt was not found: tried {tried}; `pip install nvidia-cusparselt-cu13` brings it")
        })?;
        let told = |problem: String| format!("cuSPARSELt ({}): {problem}", file.display());
        let (functions, handle) = (Functions::of(library).map_err(told)?, Opaque::new());
        device.bind().map_err(|error| told(error.to_string()))?;
        // SAFETY: the context is bound, and there is room for a handle.
        succeeded(unsafe { (functions.init)(handle.pointer()) }, "opening it").map_err(told)?;
        let mut release = [0; 3];
        for (part, number) in (0..).zip(&mut release) {
            // SAFETY: the library writes a number.
            succeeded(unsafe { (functions.property)(part, number) }, "its release").map_err(told)?;
        }
        let release = release.map(|number| number.to_string()).join(".");
        Ok(Self(Rc::new(Opened { functions, handle, release })))
    }

    /// Its release.
    pub(super) fn release(&self) -> String {
        self.0.release.clone()
    }

    /// A product by the algorithm that its own search finds, its sparse operand compressed; or why it does not take it.
    pub(super) fn product(&self, device: &mut Device, operands: &Operands<'_>) -> Result<Contestant, String> {
        let Operands { form, shape: [m, n, k], a, sets } = *operands;
        let (of, handle) = (&self.0.functions, self.0.handle.pointer());
        let mut plan = Plan { library: self.clone(), matrices: Vec::new(), made: Vec::new(), planned: false };
        // D^T and B^T lie row-major in the transposed form, which is D and B column-major.
        let (order, stride_b, stride_d) = match form {
            Form::Transposed => (COLUMNS_FIRST, k, m),
            Form::Straight => (ROWS_FIRST, n, n),
        };
        let [rows, columns, inner] = [m, n, k].map(|length| length as i64);
        let a_descriptor = plan.matrix(|to| {
            // SAFETY: there is room for a descriptor, of which it writes no more than it needs; as below.
            unsafe { (of.sparse)(handle, to, rows, inner, inner, OPERAND_ALIGNMENT, BF16, ROWS_FIRST, TWO_OF_FOUR) }
        })?;
        let b_descriptor =
            // SAFETY: as above.
            plan.matrix(|to| unsafe { (of.dense)(handle, to, inner, columns, stride_b as i64, OPERAND_ALIGNMENT, BF16, order) })?;
        let d_descriptor =
            // SAFETY: as above.
            plan.matrix(|to| unsafe { (of.dense)(handle, to, rows, columns, stride_d as i64, OPERAND_ALIGNMENT, BF16, order) })?;
        let [product, selection, planned] = [0; 3].map(|_| plan.make());
        // SAFETY: there is room for each, and those that are read were made.
        unsafe {
            let (b, d) = (b_descriptor, d_descriptor);
            succeeded((of.product)(handle, product, AS_IT_IS, AS_IT_IS, a_descriptor, b, d, d, IN_F32), "describing the product")?;
            succeeded((of.selection)(handle, selection, product, ANY_ALGORITHM), "its algorithms")?;
            succeeded((of.plan)(handle, planned, product, selection), "its plan")?;
        }
        plan.planned = true;
        let (mut size, mut room) = (0, 0);
        // SAFETY: the plan was made, and two numbers are written.
        succeeded(unsafe { (of.compressed_size)(handle, planned, &mut size, &mut room) }, "the compressed size")?;
        let mut memory = |bytes: usize| device.alloc::<u8>("cuSPARSELt", [1, bytes.max(256)]).map_err(|error| error.to_string());
        let [compressed, room, workspace] = [memory(size)?, memory(room)?, memory(WORKSPACE)?].map(address);
        let mut stream: Thing = device.stream().cast();
        // SAFETY: A has the shape described, and outputs the sizes asked for.
        succeeded(unsafe { (of.compress)(handle, planned, address(a), compressed, room, stream) }, "compressing")?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [alpha, beta] = [&one, &zero].map(|number| (&raw const *number).cast_mut().cast());
        let [b, d] = sets[0].map(address);
        // SAFETY: operands have the shapes described; D is read and written by nobody else meanwhile.
        let searched = unsafe { (of.search)(handle, planned, alpha, compressed, b, beta, d, d, workspace, &mut stream, 1) };
        succeeded(searched, "its search")?;
        let pairs: Vec<[Thing; 2]> = sets.iter().map(|set| set.map(address)).collect();
        let launch = move |device: &mut Device, set: usize| {
            device.bind()?;
            let Opened { functions: of, handle, .. } = &*plan.library.0;
            let (planned, mut stream): (Thing, Thing) = (planned, device.stream().cast());
            let (one, zero) = (1.0_f32, 0.0_f32);
            let [alpha, beta] = [&one, &zero].map(|number| (&raw const *number).cast_mut().cast());
            let [b, d] = pairs[set];
            // SAFETY: as above; the memory is the device's until it is reset, which ends all contestants' use.
            let status = unsafe { (of.multiply)(handle.pointer(), planned, alpha, compressed, b, beta, d, d, workspace, &mut stream, 1) };
            succeeded(status, "a product").map_err(|code| Error::Driver { what: "cuSPARSELt".into(), code })
        };
        Ok(Contestant { name: "cuSPARSELt".into(), sets: sets.len(), launch: Box::new(launch) })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: it was opened once, and nothing uses it afterwards.
        unsafe { (self.functions.destroy)(self.handle.pointer()) };
    }
}

/// The library's things that a product needs, taken apart in the end.
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

    fn matrix(&mut self, describe: impl FnOnce(Thing) -> Status) -> Result<Thing, String> {
        let descriptor = Opaque::new();
        succeeded(describe(descriptor.pointer()), "describing a matrix")?;
        self.matrices.push(descriptor);
        Ok(self.matrices.last().expect("it was just pushed").pointer())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let of = &self.library.0.functions;
        // SAFETY: each was made once and is taken apart once, the plan before what it was made of.
        unsafe {
            if let Some(plan) = self.made.last().filter(|_| self.planned) {
                (of.drop_plan)(plan.pointer());
            }
            for matrix in &self.matrices {
                (of.drop_matrix)(matrix.pointer());
            }
        }
    }
}

fn address<T: crate::Scalar>(matrix: Matrix<T>) -> Thing {
    matrix.span().start as Thing
}

fn succeeded(status: Status, what: &str) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{what} failed with status {status}")) }
}
