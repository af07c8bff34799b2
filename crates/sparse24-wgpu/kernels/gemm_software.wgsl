// gemm_software: C = A B + bias, or C += A B + bias, in one call per 64 values of k
// in   A, B f32, read by vec4 loads; bias f32 [n]
// out  C f32 [m,n]: the first call overwrites or adds to it, the others add to it
// pre  m a multiple of 32, n of 128, k of 64; offsets and strides are multiples of 4; output tiles
//      of 32 rows and 128 columns, a workgroup each
// acc  f32, k ascending: one accumulator per element, in C between two calls
// ref  loops in f64
//
// For adapters that run on a CPU. Lavapipe reads the memory of each invocation separately, except
// at an index that is known when the kernel is compiled, outside of loops and branches. So A is
// read at such indices, and all of the kernel is unrolled.

@group(0) @binding(2) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

// [32 rows, 64 values of k].
var<workgroup> a_tile: array<vec4<f32>, 512>;

fn turned(x: mat4x4<f32>, turn: bool) -> mat4x4<f32> {
    let y = transpose(x);
    let turns = vec4<bool>(turn);
    return mat4x4<f32>(
        select(x[0], y[0], turns),
        select(x[1], y[1], turns),
        select(x[2], y[2], turns),
        select(x[3], y[3], turns),
    );
}

// Copies a 4x4 block of A to a_tile; rows and of_k count blocks.
fn fill(rows: u32, of_k: u32, first_row: u32) {
    let i = first_row + 4u * rows;
    let at = (c.a_offset + i * c.a_row + (c.first + 4u * of_k) * c.a_column) / 4u;
    let step = select(c.a_column, c.a_row, c.a_column == 1u) / 4u;
    let read = mat4x4<f32>(a[at], a[at + step], a[at + 2u * step], a[at + 3u * step]);
    let x = turned(read, c.a_column != 1u);
    let to = 64u * rows + of_k;
    a_tile[to] = x[0];
    a_tile[to + 16u] = x[1];
    a_tile[to + 32u] = x[2];
    a_tile[to + 48u] = x[3];
}

fn begin_row(row: u32, place: u32, sums: ptr<function, array<vec4<f32>, 32>>) {
    let starts = c.first == 0u && c.adds == 0u;
    (*sums)[row] = select(out[place + row * (c.c_stride / 4u)], vec4<f32>(), vec4<bool>(starts));
}

fn end_row(row: u32, place: u32, offset: vec4<f32>, sums: ptr<function, array<vec4<f32>, 32>>) {
    let sum = (*sums)[row];
    let biased = c.biased != 0u && c.first + 64u == c.k;
    out[place + row * (c.c_stride / 4u)] = select(sum, sum + offset, vec4<bool>(biased));
}

fn begin_rows(row: u32, place: u32, sums: ptr<function, array<vec4<f32>, 32>>) {
    begin_row(row, place, sums);
    begin_row(row + 1u, place, sums);
    begin_row(row + 2u, place, sums);
    begin_row(row + 3u, place, sums);
    begin_row(row + 4u, place, sums);
    begin_row(row + 5u, place, sums);
    begin_row(row + 6u, place, sums);
    begin_row(row + 7u, place, sums);
}

fn end_rows(row: u32, place: u32, offset: vec4<f32>, sums: ptr<function, array<vec4<f32>, 32>>) {
    end_row(row, place, offset, sums);
    end_row(row + 1u, place, offset, sums);
    end_row(row + 2u, place, offset, sums);
    end_row(row + 3u, place, offset, sums);
    end_row(row + 4u, place, offset, sums);
    end_row(row + 5u, place, offset, sums);
    end_row(row + 6u, place, offset, sums);
    end_row(row + 7u, place, offset, sums);
}

// Adds the products of a row and four values of k.
fn add_row(row: u32, of_k: u32, y: mat4x4<f32>, sums: ptr<function, array<vec4<f32>, 32>>) {
    let x = a_tile[16u * row + of_k];
    var sum = (*sums)[row];
    sum += x.x * y[0];
    sum += x.y * y[1];
    sum += x.z * y[2];
    sum += x.w * y[3];
    (*sums)[row] = sum;
}

fn add_rows(row: u32, of_k: u32, y: mat4x4<f32>, sums: ptr<function, array<vec4<f32>, 32>>) {
    add_row(row, of_k, y, sums);
    add_row(row + 1u, of_k, y, sums);
    add_row(row + 2u, of_k, y, sums);
    add_row(row + 3u, of_k, y, sums);
    add_row(row + 4u, of_k, y, sums);
    add_row(row + 5u, of_k, y, sums);
    add_row(row + 6u, of_k, y, sums);
    add_row(row + 7u, of_k, y, sums);
}

fn add_four(of_k: u32, column: u32, sums: ptr<function, array<vec4<f32>, 32>>) {
    let at = (c.b_offset + (c.first + 4u * of_k) * c.b_row + column * c.b_column) / 4u;
    let step = select(c.b_row, c.b_column, c.b_row == 1u) / 4u;
    let read = mat4x4<f32>(b[at], b[at + step], b[at + 2u * step], b[at + 3u * step]);
    let y = turned(read, c.b_row == 1u);
    add_rows(0u, of_k, y, sums);
    add_rows(8u, of_k, y, sums);
    add_rows(16u, of_k, y, sums);
    add_rows(24u, of_k, y, sums);
}

// An invocation computes 32 rows of four columns.
@compute @workgroup_size(32)
fn gemm_software(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let group = flat(id, groups, 1u);
    let columns = c.n / 128u;
    let first_row = group / columns * 32u;
    let column = group % columns * 128u + 4u * t;
    var sums = array<vec4<f32>, 32>();
    fill(t / 16u, t % 16u, first_row);
    fill(2u + t / 16u, t % 16u, first_row);
    fill(4u + t / 16u, t % 16u, first_row);
    fill(6u + t / 16u, t % 16u, first_row);
    workgroupBarrier();
    let place = (c.c_offset + first_row * c.c_stride + column) / 4u;
    begin_rows(0u, place, &sums);
    begin_rows(8u, place, &sums);
    begin_rows(16u, place, &sums);
    begin_rows(24u, place, &sums);
    add_four(0u, column, &sums);
    add_four(1u, column, &sums);
    add_four(2u, column, &sums);
    add_four(3u, column, &sums);
    add_four(4u, column, &sums);
    add_four(5u, column, &sums);
    add_four(6u, column, &sums);
    add_four(7u, column, &sums);
    add_four(8u, column, &sums);
    add_four(9u, column, &sums);
    add_four(10u, column, &sums);
    add_four(11u, column, &sums);
    add_four(12u, column, &sums);
    add_four(13u, column, &sums);
    add_four(14u, column, &sums);
    add_four(15u, column, &sums);
    let at = c.bias_offset + column;
    let offset = vec4<f32>(bias[at], bias[at + 1u], bias[at + 2u], bias[at + 3u]);
    end_rows(0u, place, offset, &sums);
    end_rows(8u, place, offset, &sums);
    end_rows(16u, place, offset, &sums);
    end_rows(24u, place, offset, &sums);
}
