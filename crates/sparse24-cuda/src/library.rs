//! The shared libraries that are loaded at run time: their file names, and how to install them.

use std::fmt;

/// A shared library that is loaded at run time ([`Library::load`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    /// The CUDA driver.
    Driver,
    /// NVRTC, the kernel compiler.
    Nvrtc,
    /// cuBLASLt, for dense products.
    CublasLt,
    /// NCCL, which moves gradients between GPUs; one GPU does not need it.
    Nccl,
    /// cuSPARSELt, a competitor in benchmarks only.
    CusparseLt,
}

impl Library {
    /// The libraries that training on one GPU needs.
    pub const ALL: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::CublasLt];

    /// File names, in the order in which they are tried.
    #[must_use]
    pub const fn file_names(self) -> &'static [&'static str] {
        match self {
            // cudarc tries these two names in this order, so the file reported is the one called.
            Self::Driver => &["libcuda.so", "libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::CusparseLt => &["libcusparseLt.so.0", "libcusparseLt.so"],
        }
    }

    /// How to install it.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Driver => "install the NVIDIA driver, release 580 or later",
            Self::Nvrtc => {
                "install CUDA 13, or `pip install nvidia-cuda-nvrtc` and add its lib folder to \
                 SPARSE24_CUDA_LIBRARIES"
            }
            Self::CublasLt => {
                "install CUDA 13, or `pip install nvidia-cublas` and add its lib folder to \
                 SPARSE24_CUDA_LIBRARIES"
            }
            Self::Nccl => {
                "install NCCL 2.18 or later, as by `pip install nvidia-nccl-cu13`, and add its \
                 lib folder to SPARSE24_CUDA_LIBRARIES"
            }
            Self::CusparseLt => {
                "`pip install nvidia-cusparselt-cu13` and add its lib folder to \
                 SPARSE24_CUDA_LIBRARIES"
            }
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "the CUDA driver",
            Self::Nvrtc => "the CUDA kernel compiler (NVRTC)",
            Self::CublasLt => "the dense product library (cuBLASLt)",
            Self::Nccl => "the communication library (NCCL)",
            Self::CusparseLt => "the sparse product library (cuSPARSELt)",
        })
    }
}
