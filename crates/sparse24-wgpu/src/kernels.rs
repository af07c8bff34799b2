//! The table of all kernels: dispatch and tests go through it.

/// An entry point in WGSL, in a file that opens with its contract.
#[derive(Debug)]
pub struct Kernel {
    /// Name of the entry point.
    pub name: &'static str,
    /// The source, with what it uses.
    pub source: &'static str,
    /// Bindings that it reads; they come first.
    pub inputs: usize,
    /// Bindings that it writes.
    pub outputs: usize,
}

macro_rules! kernels {
    ($($constant:ident = $name:literal in [$($file:literal),*], $inputs:literal -> $outputs:literal;)*) => {
        $(pub(crate) static $constant: Kernel = Kernel {
            name: $name,
            source: concat!(
                include_str!("../kernels/interface.wgsl"),
                $(include_str!(concat!("../kernels/", $file, ".wgsl"))),*
            ),
            inputs: $inputs,
            outputs: $outputs,
        };)*

        /// Every kernel.
        pub static KERNELS: &[&Kernel] = &[$(&$constant),*];
    };
}

kernels! {
    MASK_SEARCH = "mask_search" in ["soft", "tile", "mask_search"], 1 -> 1;
    ROW_MASK_SEARCH = "row_mask_search" in ["soft", "tile", "mask_search"], 1 -> 1;
    COLUMN_MASK_SEARCH = "column_mask_search" in ["soft", "tile", "mask_search"], 1 -> 1;
    PERMUTED_MASK = "permuted_mask" in ["tile", "permuted_mask"], 3 -> 1;
    COMPRESS_WEIGHT = "compress_weight" in ["tile", "compress_weight"], 2 -> 1;
    SOFT_THRESHOLD = "soft_threshold" in ["tile", "compress_weight"], 2 -> 1;
    MVUE_COMPRESS = "mvue_compress" in ["soft", "philox", "mvue_compress"], 1 -> 1;
    FLIP_COUNT = "flip_count" in ["flip_count"], 2 -> 1;
    DROPOUT = "dropout" in ["philox", "dropout"], 0 -> 1;
    COPY = "copy" in ["copy"], 1 -> 1;
    FILL = "fill" in ["fill"], 0 -> 1;
}
