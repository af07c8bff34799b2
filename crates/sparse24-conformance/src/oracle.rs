//! The operations of layers and of the optimizer in f64, exact or displaced by the errors of f32.

pub mod arithmetic;
pub mod layers;
pub mod optimizer;
