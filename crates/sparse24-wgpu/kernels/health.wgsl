// The norm of all gradients and the flag for numbers that are not finite: src/health.rs.

const HEALTHY: u32 = 0xffffffffu;
const NORM: u32 = 0xfffffffeu;
const LOSS: u32 = 0u;

fn is_finite(bits: u32) -> bool {
    return (bits & 0x7f800000u) != 0x7f800000u;
}
