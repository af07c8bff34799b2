// cross_entropy: the loss of each row of logits; overwrites the logits with its gradient
// in   targets u32 [p]; a target of 0xffffffff contributes nothing; if rows are mixed, second
//      targets u32 [p] and the shares of the first targets f32 [p]
// out  logits, the bits of f32 [p,V], in place; losses f32 [p], overwritten
// pre  a workgroup per row
// acc  f32: sums of every 64th element, then a tree
// ref  sparse24_cpu::loss

struct Constants {
    logits_offset: u32,
    logits_stride: u32,
    targets_offset: u32,
    losses_offset: u32,
    rows: u32,
    columns: u32,
    trains: u32,
    smoothing: f32,
    mixes: u32,
    seconds_offset: u32,
    shares_offset: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read> seconds: array<u32>;
@group(0) @binding(4) var<storage, read> shares: array<f32>;
@group(0) @binding(5) var<storage, read_write> logits: array<u32>;
@group(0) @binding(6) var<storage, read_write> losses: array<u32>;

fn logit(place: u32) -> f32 {
    return bitcast<f32>(logits[place]);
}

@compute @workgroup_size(64)
fn cross_entropy(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = flat(id, groups, 1u);
    // No return: outside of branches, a software adapter reads shared values faster.
    let columns = select(0u, c.columns, row < c.rows);
    let start = c.logits_offset + row * c.logits_stride;
    let target_id = targets[c.targets_offset + row];
    let ignored = target_id == IGNORE;
    var second_id = target_id;
    var share = 1.0;
    if c.mixes != 0u {
        second_id = seconds[c.seconds_offset + row];
        share = shares[c.shares_offset + row];
    }
    var maximum = -3e38;
    var broken = 0.0;
    for (var j = lane; j < columns; j += 64u) {
        maximum = max(maximum, logit(start + j));
        broken += select(1.0, 0.0, is_finite(logits[start + j]));
    }
    maximum = workgroup_max(lane, maximum);
    broken = workgroup_sum(lane, broken);
    var sum = 0.0;
    var below = 0.0;
    for (var j = lane; j < columns; j += 64u) {
        sum += exp_of(logit(start + j) - maximum);
        below += logit(start + j) - maximum;
    }
    sum = workgroup_sum(lane, sum);
    below = workgroup_sum(lane, below);
    let known = max(target_id, second_id) < c.columns && broken == 0.0;
    if lane == 0u && row < c.rows {
        let first = logit(start + min(target_id, c.columns - 1u)) - maximum;
        let second = logit(start + min(second_id, c.columns - 1u)) - maximum;
        let hit = share * first + (1.0 - share) * second;
        let expected = (1.0 - c.smoothing) * hit + c.smoothing * below / f32(c.columns);
        let loss = select(NAN, bitcast<u32>(log_of(sum) - expected), known);
        losses[c.losses_offset + row] = select(loss, 0u, ignored);
    }
    workgroupBarrier();
    storageBarrier();
    if c.trains == 0u {
        return;
    }
    let scale = state.loss_scale;
    let inverse = scale / sum;
    let floor_of = scale * c.smoothing / f32(c.columns);
    for (var j = lane; j < columns; j += 64u) {
        var gradient = exp_of(logit(start + j) - maximum) * inverse - floor_of;
        if j == target_id {
            gradient -= scale * (1.0 - c.smoothing) * share;
        }
        if j == second_id {
            gradient -= scale * (1.0 - c.smoothing) * (1.0 - share);
        }
        logits[start + j] = select(bitcast<u32>(gradient), 0u, ignored);
    }
}
