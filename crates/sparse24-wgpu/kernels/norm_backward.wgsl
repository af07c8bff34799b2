// norm_backward: dx = rstd * (g - mean(g) - n * mean(g n)), g = dy * gamma, n = (x - mean) * rstd
// norm_sums: the sums of dy * n and of dy over each block of 64 rows
// in   dy, x f32 [p,d]; stats f32 [p,2]; gamma f32 [d]
// out  dx f32 [p,d], overwritten and never read, or added to; sums f32 [ceil(p/64),2,d],
//      overwritten
// pre  norm_backward: a workgroup per row; norm_sums: an invocation per sum
// acc  f32: sums of every 64th element, then a tree; rows in order
// ref  sparse24_cpu::norm

struct Constants {
    dy_offset: u32,
    dy_stride: u32,
    x_offset: u32,
    x_stride: u32,
    stats_offset: u32,
    stats_stride: u32,
    gamma_offset: u32,
    dx_offset: u32,
    dx_stride: u32,
    rows: u32,
    columns: u32,
    adds: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> stats: array<f32>;
@group(0) @binding(5) var<storage, read> gamma: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn norm_backward(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = flat(id, groups, 1u);
    // No return: outside of branches, a software adapter reads shared values faster.
    let columns = select(0u, c.columns, row < c.rows);
    let start = c.x_offset + row * c.x_stride;
    let upper = c.dy_offset + row * c.dy_stride;
    let mean = stats[c.stats_offset + row * c.stats_stride];
    let rstd = stats[c.stats_offset + row * c.stats_stride + 1u];
    var sum = 0.0;
    var along = 0.0;
    for (var j = lane; j < columns; j += 64u) {
        let g = dy[upper + j] * gamma[c.gamma_offset + j];
        sum += g;
        along += g * ((x[start + j] - mean) * rstd);
    }
    let mean_g = workgroup_sum(lane, sum) / f32(c.columns);
    let mean_gn = workgroup_sum(lane, along) / f32(c.columns);
    for (var j = lane; j < columns; j += 64u) {
        let g = dy[upper + j] * gamma[c.gamma_offset + j];
        let dx = rstd * (g - mean_g - (x[start + j] - mean) * rstd * mean_gn);
        let to = c.dx_offset + row * c.dx_stride + j;
        if c.adds != 0u {
            out[to] += dx;
        } else {
            out[to] = dx;
        }
    }
}

@compute @workgroup_size(64)
fn norm_sums(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let block = number / c.columns;
    let j = number % c.columns;
    let first = 64u * block;
    if first >= c.rows {
        return;
    }
    var dgamma = 0.0;
    var dbeta = 0.0;
    for (var row = first; row < min(first + 64u, c.rows); row += 1u) {
        let mean = stats[c.stats_offset + row * c.stats_stride];
        let rstd = stats[c.stats_offset + row * c.stats_stride + 1u];
        let gradient = dy[c.dy_offset + row * c.dy_stride + j];
        dgamma += gradient * ((x[c.x_offset + row * c.x_stride + j] - mean) * rstd);
        dbeta += gradient;
    }
    out[2u * block * c.columns + j] = dgamma;
    out[(2u * block + 1u) * c.columns + j] = dbeta;
}
