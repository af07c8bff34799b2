// loss_sum: the sum of losses; in training, a sum that is not finite raises the flag
// in   losses, the bits of f32 [p]
// out  loss f32 [1], overwritten; health
// pre  one workgroup
// acc  f32: sums of every 64th loss, then a tree
// ref  sparse24_backend::op::HeadLoss

struct Constants {
    losses_offset: u32,
    loss_offset: u32,
    rows: u32,
    trains: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> losses: array<u32>;
@group(0) @binding(3) var<storage, read_write> loss: array<u32>;
@group(0) @binding(4) var<storage, read_write> health: array<atomic<u32>>;

@compute @workgroup_size(64)
fn loss_sum(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    var broken = 0.0;
    for (var i = lane; i < c.rows; i += 64u) {
        let bits = losses[c.losses_offset + i];
        if is_finite(bits) {
            sum += bitcast<f32>(bits);
        } else {
            broken += 1.0;
        }
    }
    sum = workgroup_sum(lane, sum);
    broken = workgroup_sum(lane, broken);
    if lane == 0u {
        let bits = select(bitcast<u32>(sum), NAN, broken > 0.0);
        loss[c.loss_offset] = bits;
        if c.trains != 0u && !is_finite(bits) {
            atomicMin(&health[1], LOSS);
        }
    }
}
