//! Activations and their gradients.

use sparse24_core::op::Activation;

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// The number of an activation in `activated.wgsl`, and whether it is gated.
fn constants_of(activation: Activation) -> [u32; 2] {
    let place = Activation::ALL.iter().position(|&known| known == activation);
    let place = place.expect("ALL has every activation") as u32;
    [place, u32::from(activation.columns_in() == 2)]
}

/// H = act(Z): z `[p, f * activation.columns_in()]`, h `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree; failures of earlier work.
pub fn activation_forward(
    device: &mut Device,
    activation: Activation,
    z: Matrix,
    h: Matrix,
) -> Result<(), Error> {
    let ([p, f], elements) = (h.shape, h.elements());
    check_shape("activation forward", "z", [p, f * activation.columns_in()], z)?;
    let sizes = [f as u32, elements as u32];
    let constants = [z.place(), h.place(), sizes, constants_of(activation)].concat();
    device.run(&kernels::ACTIVATION_FORWARD, [z, h], &constants, elements.div_ceil(WORKGROUP))
}

/// dZ = dH * act'(Z), for gated activations one gradient per half of Z: dh `[p, f]`, z and dz
/// `[p, f * activation.columns_in()]`.
///
/// # Errors
/// Like [`activation_forward`].
pub fn activation_backward(
    device: &mut Device,
    activation: Activation,
    dh: Matrix,
    z: Matrix,
    dz: Matrix,
) -> Result<(), Error> {
    let ([p, f], elements) = (dh.shape, dh.elements());
    check_shape("activation backward", "z", [p, f * activation.columns_in()], z)?;
    check_shape("activation backward", "dz", z.shape, dz)?;
    let sizes = [f as u32, elements as u32];
    let constants = [dh.place(), z.place(), dz.place(), sizes, constants_of(activation)].concat();
    device.run(&kernels::ACTIVATION_BACKWARD, [dh, z, dz], &constants, elements.div_ceil(WORKGROUP))
}

#[cfg(test)]
mod tests {
    use sparse24_core::op::Activation;

    /// `activated` in `activated.wgsl` has these numbers.
    #[test]
    fn activations_have_their_numbers() {
        use Activation::{Geglu, Gelu, GeluErf, Relu, Swiglu, Tanh};
        assert_eq!(Activation::ALL, [Gelu, GeluErf, Geglu, Swiglu, Tanh, Relu]);
    }
}
