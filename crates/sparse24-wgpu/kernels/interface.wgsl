// The interface of every kernel.
//
// Bind group 0 has the constants of a call at binding 0, the step state at binding 1, then the
// inputs and the outputs. The constants include the offset and the stride of each matrix, in
// elements.

// The numbers that change from step to step.
struct StepState {
    seed_low: u32,
    seed_high: u32,
    step: u32,
    micro_step: u32,
    learning_rate: f32,
    // Adam's 1 - beta^step.
    first_correction: f32,
    second_correction: f32,
    loss_scale: f32,
}
@group(0) @binding(1) var<uniform> state: StepState;

// The index of an invocation or workgroup in a grid that continues in y.
fn flat(id: vec3<u32>, groups: vec3<u32>, size: u32) -> u32 {
    return id.y * groups.x * size + id.x;
}

// The bits of a NaN, and a target that contributes nothing.
const NAN: u32 = 0x7fc00000u;
const IGNORE: u32 = 0xffffffffu;
