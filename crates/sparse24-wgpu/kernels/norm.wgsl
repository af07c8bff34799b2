// norm_forward: y = (x - mean) * rstd * gamma + beta for each row
// in   x f32 [p,d]; gamma, beta f32 [d]
// out  y f32 [p,d]; stats f32 [p,2]: mean and rstd = 1 / sqrt(variance + epsilon); overwritten
// pre  a workgroup per row
// acc  f32: sums of every 64th element, then a tree
// ref  sparse24_cpu::norm

struct Constants {
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    stats_offset: u32,
    stats_stride: u32,
    gamma_offset: u32,
    beta_offset: u32,
    rows: u32,
    columns: u32,
    biased: u32,
    epsilon: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> gamma: array<f32>;
@group(0) @binding(4) var<storage, read> beta: array<f32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;
@group(0) @binding(6) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(64)
fn norm_forward(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = flat(id, groups, 1u);
    // No return: outside of branches, a software adapter reads shared values faster.
    let columns = select(0u, c.columns, row < c.rows);
    let start = c.x_offset + row * c.x_stride;
    var sum = 0.0;
    for (var j = lane; j < columns; j += 64u) {
        sum += x[start + j];
    }
    let mean = workgroup_sum(lane, sum) / f32(c.columns);
    var squares = 0.0;
    for (var j = lane; j < columns; j += 64u) {
        squares += (x[start + j] - mean) * (x[start + j] - mean);
    }
    let variance = workgroup_sum(lane, squares) / f32(c.columns);
    let rstd = 1.0 / sqrt(variance + c.epsilon);
    for (var j = lane; j < columns; j += 64u) {
        var value = (x[start + j] - mean) * rstd * gamma[c.gamma_offset + j];
        if c.biased != 0u {
            value += beta[c.beta_offset + j];
        }
        y[c.y_offset + row * c.y_stride + j] = value;
    }
    if lane == 0u && row < c.rows {
        stats[c.stats_offset + row * c.stats_stride] = mean;
        stats[c.stats_offset + row * c.stats_stride + 1u] = rstd;
    }
}
