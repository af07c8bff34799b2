// norm_largest: the largest magnitude of a gradient, and the flag if it is not finite
// norm_squares: the sum of squares of every 4096 elements, divided by 4^e, where 2^e is the power
//      of two of the largest magnitude of all gradients
// norm_total: the L2 norm, from those sums
// in   g, the bits of f32 [n]
// out  scratch u32: the largest magnitude's bits, zero before; then the sums f32, overwritten;
//      health: the norm, and the flag
// pre  norm_largest and norm_squares: a workgroup per 4096 elements; norm_total: one workgroup
// acc  f32: sums of every 64th element, then a tree; scaling by powers of two is exact, and only
//      the norm itself can overflow
// ref  loops in f64

struct Constants {
    g_offset: u32,
    // Elements of g; in norm_total, the number of sums.
    elements: u32,
    // Place of the first sum in the scratch.
    first: u32,
    row: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> g: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> health: array<atomic<u32>>;

@compute @workgroup_size(64)
fn norm_largest(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let block = flat(id, groups, 1u);
    var largest = 0u;
    for (var i = 4096u * block + lane; i < min(4096u * (block + 1u), c.elements); i += 64u) {
        largest = max(largest, g[c.g_offset + i] & 0x7fffffffu);
    }
    if largest > 0u {
        atomicMax(&scratch[0], largest);
    }
    if !is_finite(largest) {
        atomicMin(&health[1], 1u + c.row);
    }
}

// 127 + e for the largest magnitude, clamped so that 2^e and 2^-e are normal numbers.
fn exponent() -> u32 {
    return clamp(atomicLoad(&scratch[0]) >> 23u, 1u, 253u);
}

@compute @workgroup_size(64)
fn norm_squares(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let block = flat(id, groups, 1u);
    if 4096u * block >= c.elements {
        return;
    }
    let factor = bitcast<f32>((254u - exponent()) << 23u);
    var sum = 0.0;
    for (var i = 4096u * block + lane; i < min(4096u * (block + 1u), c.elements); i += 64u) {
        let scaled = bitcast<f32>(g[c.g_offset + i]) * factor;
        sum += scaled * scaled;
    }
    sum = workgroup_sum(lane, sum);
    if lane == 0u {
        atomicStore(&scratch[c.first + block], bitcast<u32>(sum));
    }
}

@compute @workgroup_size(64)
fn norm_total(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var i = lane; i < c.elements; i += 64u) {
        sum += bitcast<f32>(atomicLoad(&scratch[c.first + i]));
    }
    sum = workgroup_sum(lane, sum);
    if lane != 0u {
        return;
    }
    let root = bitcast<u32>(sqrt(sum));
    // The exponent of the norm.
    let scaled = (root >> 23u) + exponent();
    var norm = 0u;
    if scaled >= 382u || !is_finite(atomicLoad(&scratch[0])) {
        norm = 0x7f800000u;
        atomicMin(&health[1], NORM);
    } else if scaled > 127u {
        norm = (root & 0x7fffffu) | ((scaled - 127u) << 23u);
    }
    atomicStore(&health[0], norm);
}
