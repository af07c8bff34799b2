// squared_error: the loss (z - t)^2 of each row; overwrites z with its gradient
// in   targets, the bits of f32 t [p]; a target of 0xffffffff contributes nothing
// out  z, the bits of f32 [p,1], in place; losses f32 [p], overwritten
// pre  an invocation per row
// acc  f32
// ref  sparse24_cpu::loss

struct Constants {
    logits_offset: u32,
    logits_stride: u32,
    targets_offset: u32,
    losses_offset: u32,
    rows: u32,
    columns: u32,
    trains: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read_write> logits: array<u32>;
@group(0) @binding(4) var<storage, read_write> losses: array<u32>;

@compute @workgroup_size(64)
fn squared_error(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = flat(id, groups, 64u);
    if row >= c.rows {
        return;
    }
    let at = c.logits_offset + row * c.logits_stride;
    let wanted = targets[c.targets_offset + row];
    let z = logits[at];
    let ignored = wanted == IGNORE;
    let difference = bitcast<f32>(z) - bitcast<f32>(select(wanted, 0u, ignored));
    let sound = is_finite(z) && is_finite(select(wanted, 0u, ignored));
    let loss = select(NAN, bitcast<u32>(difference * difference), sound);
    losses[c.losses_offset + row] = select(loss, 0u, ignored);
    if c.trains != 0u {
        logits[at] = select(bitcast<u32>(2.0 * state.loss_scale * difference), 0u, ignored);
    }
}
