// gemm: C[m,n] = A[m,k] B[k,n] + bias, or C += it
// in   A, B f32, any strides; bias f32 [n]
// out  C f32 [m,n], overwritten and never read, or added to
// pre  a grid ceil(n/64) wide
// acc  f32, k ascending: one accumulator per element
// ref  loops in f64

struct Constants {
    m: u32,
    n: u32,
    k: u32,
    a_offset: u32,
    a_row: u32,
    a_column: u32,
    b_offset: u32,
    b_row: u32,
    b_column: u32,
    c_offset: u32,
    c_stride: u32,
    bias_offset: u32,
    biased: u32,
    adds: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> a: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

// Tiles of 16 along k and 64 along m or n, four elements of the latter together.
var<workgroup> a_tile: array<vec4<f32>, 256>;
var<workgroup> b_tile: array<vec4<f32>, 256>;

fn a_at(i: u32, k: u32) -> f32 {
    let value = a[c.a_offset + min(i, c.m - 1u) * c.a_row + min(k, c.k - 1u) * c.a_column];
    return select(0.0, value, i < c.m && k < c.k);
}

fn b_at(k: u32, j: u32) -> f32 {
    let value = b[c.b_offset + min(k, c.k - 1u) * c.b_row + min(j, c.n - 1u) * c.b_column];
    return select(0.0, value, j < c.n && k < c.k);
}

// The part of a tile that an invocation loads, [along k, four along m or n]: neighbours load
// neighbouring memory.
fn part(t: u32, k_is_contiguous: bool) -> vec2<u32> {
    return select(vec2<u32>(t / 16u, t % 16u), vec2<u32>(t % 16u, t / 16u), k_is_contiguous);
}

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

@compute @workgroup_size(256)
fn gemm(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let group = flat(id, groups, 1u);
    let columns = (c.n + 63u) / 64u;
    let first_row = group / columns * 64u;
    let first_column = group % columns * 64u;
    let of_a = part(t, c.a_column == 1u);
    let of_b = part(t, c.b_row == 1u);
    let row = t / 16u;
    let column = t % 16u;
    var sum0 = vec4<f32>();
    var sum1 = vec4<f32>();
    var sum2 = vec4<f32>();
    var sum3 = vec4<f32>();
    for (var first = 0u; first < c.k; first += 16u) {
        let i = first_row + 4u * of_a.y;
        let j = first_column + 4u * of_b.y;
        let a_k = first + of_a.x;
        let b_k = first + of_b.x;
        let from_a = vec4<f32>(a_at(i, a_k), a_at(i + 1u, a_k), a_at(i + 2u, a_k), a_at(i + 3u,
            a_k));
        let from_b = vec4<f32>(b_at(b_k, j), b_at(b_k, j + 1u), b_at(b_k, j + 2u), b_at(b_k, j
            + 3u));
        workgroupBarrier();
        a_tile[16u * of_a.x + of_a.y] = from_a;
        b_tile[16u * of_b.x + of_b.y] = from_b;
        workgroupBarrier();
        for (var k = 0u; k < 16u; k += 1u) {
            let x = a_tile[16u * k + row];
            let y = b_tile[16u * k + column];
            sum0 += x.x * y;
            sum1 += x.y * y;
            sum2 += x.z * y;
            sum3 += x.w * y;
        }
    }
    let i = first_row + 4u * row;
    let j = first_column + 4u * column;
    store(i, j, sum0);
    store(i + 1u, j, sum1);
    store(i + 2u, j, sum2);
    store(i + 3u, j, sum3);
}
