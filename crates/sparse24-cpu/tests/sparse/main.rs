//! Every sparse kernel against core, bit for bit: all element types, hostile values, ragged and
//! empty shapes, strides, thread counts and SIMD levels.

mod compress;
mod elementwise;
mod hostile;
mod methods;
mod mvue;
mod search;
