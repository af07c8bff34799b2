//! Every sparse kernel against core, bit for bit: all element types, hostile values, ragged and
//! empty shapes, strides, numbers of threads and SIMD levels.

mod compress;
mod hostile;
mod methods;
mod mvue;
mod search;
