// gemm: C[m,n] = A[m,k] B[k,n] + bias, or C += A B + bias
// in   A, B f32, as gemm_singles or gemm_fours reads them; bias f32 [n]
// out  C f32 [m,n], overwritten and never read, or added to
// pre  output tiles of 8 LANES rows and columns, a workgroup each
// acc  f32, k ascending: one accumulator per element
// ref  loops in f64

@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

// The operands of an output tile: [16 values of k, 8 LANES rows or columns], stored as vec4s.
const WIDTH: u32 = 2u * LANES;
var<workgroup> a_tile: array<vec4<f32>, 16u * WIDTH>;
var<workgroup> b_tile: array<vec4<f32>, 16u * WIDTH>;

fn store(i: u32, j: u32, values: vec4<f32>) {
    if i >= c.m {
        return;
    }
    for (var at = 0u; at < 4u; at += 1u) {
        if j + at < c.n {
            let place = c.c_offset + i * c.c_stride + j + at;
            var value = values[at];
            if c.biased != 0u {
                value += bias[c.bias_offset + j + at];
            }
            if c.adds != 0u {
                value += out[place];
            }
            out[place] = value;
        }
    }
}

fn store_four(i: u32, j: u32, values: mat4x4<f32>) {
    store(i, j, values[0]);
    store(i + 1u, j, values[1]);
    store(i + 2u, j, values[2]);
    store(i + 3u, j, values[3]);
}

// Adds the products of one k. The calls are unrolled, since naga adds a check to every iteration.
fn add_products(
    k: u32,
    row: u32,
    column: u32,
    sums00: ptr<function, mat4x4<f32>>,
    sums01: ptr<function, mat4x4<f32>>,
    sums10: ptr<function, mat4x4<f32>>,
    sums11: ptr<function, mat4x4<f32>>,
) {
    let x0 = a_tile[WIDTH * k + row];
    let x1 = a_tile[WIDTH * k + row + LANES];
    let y0 = b_tile[WIDTH * k + column];
    let y1 = b_tile[WIDTH * k + column + LANES];
    (*sums00)[0] += x0.x * y0;
    (*sums00)[1] += x0.y * y0;
    (*sums00)[2] += x0.z * y0;
    (*sums00)[3] += x0.w * y0;
    (*sums01)[0] += x0.x * y1;
    (*sums01)[1] += x0.y * y1;
    (*sums01)[2] += x0.z * y1;
    (*sums01)[3] += x0.w * y1;
    (*sums10)[0] += x1.x * y0;
    (*sums10)[1] += x1.y * y0;
    (*sums10)[2] += x1.z * y0;
    (*sums10)[3] += x1.w * y0;
    (*sums11)[0] += x1.x * y1;
    (*sums11)[1] += x1.y * y1;
    (*sums11)[2] += x1.z * y1;
    (*sums11)[3] += x1.w * y1;
}

// An invocation computes four rows and four columns of each quarter of an output tile.
@compute @workgroup_size(LANES * LANES)
fn gemm(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let group = flat(id, groups, 1u);
    let side = 8u * LANES;
    let columns = (c.n + side - 1u) / side;
    let first_row = group / columns * side;
    let first_column = group % columns * side;
    let row = t / LANES;
    let column = t % LANES;
    var sums00 = mat4x4<f32>();
    var sums01 = mat4x4<f32>();
    var sums10 = mat4x4<f32>();
    var sums11 = mat4x4<f32>();
    for (var first = 0u; first < c.k; first += 16u) {
        workgroupBarrier();
        fill(t, first_row, first_column, first);
        workgroupBarrier();
        add_products(0u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(1u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(2u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(3u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(4u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(5u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(6u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(7u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(8u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(9u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(10u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(11u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(12u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(13u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(14u, row, column, &sums00, &sums01, &sums10, &sums11);
        add_products(15u, row, column, &sums00, &sums01, &sums10, &sums11);
    }
    let i = first_row + 4u * row;
    let j = first_column + 4u * column;
    store_four(i, j, sums00);
    let half = 4u * LANES;
    store_four(i, j + half, sums01);
    store_four(i + half, j, sums10);
    store_four(i + half, j + half, sums11);
}
