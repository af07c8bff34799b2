//! The table of all kernels: dispatch and tests go through it.

/// An entry point in WGSL, in a file that opens with its contract.
#[derive(Debug)]
pub struct Kernel {
    /// Name of the entry point.
    pub name: &'static str,
    /// The source, preceded by the files that it uses.
    pub source: &'static str,
    /// Number of bindings that it reads; they come first.
    pub inputs: usize,
    /// Number of bindings that it writes.
    pub outputs: usize,
}

/// The most that a kernel needs, which every device that conforms to WebGPU offers: bytes of
/// workgroup memory, storage buffers, invocations of a workgroup, in all and in x, and workgroups.
pub const NEEDS: [(&str, u32); 5] = [
    ("max_compute_workgroup_storage_size", 16384),
    ("max_storage_buffers_per_shader_stage", 8),
    ("max_compute_invocations_per_workgroup", 256),
    ("max_compute_workgroup_size_x", 256),
    ("max_compute_workgroups_per_dimension", MOST_GROUPS),
];

/// The most workgroups of a call in each dimension.
pub const MOST_GROUPS: u32 = 65535;

macro_rules! kernels {
    ($(
        $constant:ident = $name:literal in [$($file:literal),*],
            $inputs:literal -> $outputs:literal;
    )*) => {
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
    MVUE_APPROXIMATE = "mvue_approximate" in ["soft", "philox", "mvue_approximate"], 1 -> 1;
    FLIP_COUNT = "flip_count" in ["flip_count"], 2 -> 1;
    DROPOUT = "dropout" in ["philox", "dropout"], 0 -> 1;
    DROP_SEQUENCES = "drop_sequences" in ["philox", "dropout"], 0 -> 1;
    COPY = "copy" in ["copy"], 1 -> 1;
    FILL = "fill" in ["fill"], 0 -> 1;
    GEMM = "gemm" in ["tile64", "product", "gemm", "gemm_singles"], 3 -> 1;
    GEMM_FOURS = "gemm" in ["tile64", "product", "gemm", "gemm_fours"], 3 -> 1;
    GEMM_LARGE = "gemm" in ["tile128", "product", "gemm", "gemm_fours"], 3 -> 1;
    GEMM_SOFTWARE = "gemm_software" in ["product", "gemm_software"], 3 -> 1;
    ADD = "add" in ["add"], 2 -> 1;
    ACTIVATION_FORWARD = "activation_forward" in ["math", "activated", "activation"], 1 -> 1;
    ACTIVATION_BACKWARD = "activation_backward"
        in ["math", "activated", "activation_backward"], 2 -> 1;
    NORM_FORWARD = "norm_forward" in ["reduce", "norm"], 3 -> 2;
    NORM_BACKWARD = "norm_backward" in ["reduce", "norm_backward"], 4 -> 1;
    NORM_SUMS = "norm_sums" in ["reduce", "norm_backward"], 4 -> 1;
    COLUMN_SUMS = "column_sums" in ["column_sums"], 1 -> 1;
    ROW_BLOCK_SUMS = "row_block_sums" in ["column_sums"], 1 -> 1;
    ATTENTION_FORWARD = "attention_forward"
        in ["math", "philox", "singles", "attention", "attention_forward"], 4 -> 2;
    ATTENTION_FORWARD_FOURS = "attention_forward"
        in ["math", "philox", "fours", "attention", "attention_forward"], 4 -> 2;
    ATTENTION_FORWARD_SOFTWARE = "attention_forward_software" in ["math", "philox", "fours",
        "attention", "attention_software", "attention_forward_software"], 4 -> 2;
    ATTENTION_DELTA = "attention_delta" in ["attention_delta"], 2 -> 1;
    ATTENTION_DQ = "attention_dq"
        in ["math", "philox", "singles", "attention", "attention_backward"], 7 -> 1;
    ATTENTION_DQ_FOURS = "attention_dq"
        in ["math", "philox", "fours", "attention", "attention_backward"], 7 -> 1;
    ATTENTION_DKV = "attention_dkv"
        in ["math", "philox", "singles", "attention", "attention_backward"], 7 -> 1;
    ATTENTION_DKV_FOURS = "attention_dkv"
        in ["math", "philox", "fours", "attention", "attention_backward"], 7 -> 1;
    ATTENTION_DQ_SOFTWARE = "attention_dq_software" in ["math", "philox", "fours", "attention",
        "attention_software", "attention_backward_software"], 7 -> 1;
    ATTENTION_DKV_SOFTWARE = "attention_dkv_software" in ["math", "philox", "fours", "attention",
        "attention_software", "attention_backward_software"], 7 -> 1;
    EMBED_FORWARD = "embed_forward" in ["embedding"], 3 -> 1;
    EMBED_BACKWARD = "embed_backward" in ["embed_backward"], 2 -> 1;
    POSITION_GRAD = "position_grad" in ["embed_backward"], 2 -> 1;
    GATHER_ROWS = "gather_rows" in ["rows"], 2 -> 1;
    SCATTER_ROWS = "scatter_rows" in ["rows"], 2 -> 1;
    SCALE = "scale" in ["scale"], 2 -> 1;
    SCALE_GRAD = "scale_grad" in ["reduce", "scale_grad"], 2 -> 1;
    CROSS_ENTROPY = "cross_entropy" in ["math", "reduce", "health", "loss"], 3 -> 2;
    SQUARED_ERROR = "squared_error" in ["health", "squared_error"], 1 -> 2;
    SPAN_LOSS = "span_loss" in ["math", "reduce", "health", "span_loss"], 2 -> 2;
    LOSS_SUM = "loss_sum" in ["reduce", "health", "loss_sum"], 1 -> 2;
    NORM_LARGEST = "norm_largest" in ["reduce", "health", "grad_norm"], 1 -> 2;
    NORM_SQUARES = "norm_squares" in ["reduce", "health", "grad_norm"], 1 -> 2;
    NORM_TOTAL = "norm_total" in ["reduce", "health", "grad_norm"], 1 -> 2;
    MOVING_AVERAGE = "moving_average" in ["health", "average"], 2 -> 1;
    OPTIMIZER_STEP = "optimizer_step" in ["tile", "health", "optimizer"], 3 -> 3;
}
