// gemm_fours: reads A and B by vec4 loads; offsets and strides are multiples of 4

@group(0) @binding(2) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> b: array<vec4<f32>>;

// The places of the vec4s that hold rows or columns i to i + 3 and k to k + 3 of an operand.
// Indices beyond the last are replaced by the last.
fn places(offset: u32, i: u32, i_step: u32, count: u32, k: u32, k_step: u32) -> vec4<u32> {
    let four = vec4<u32>(0u, 1u, 2u, 3u);
    let of_i = min(i + four, vec4<u32>(count - 1u));
    let of_k = min(k + four, vec4<u32>(c.k - 1u));
    let along_k = of_i * i_step + min(k, c.k - 1u) / 4u * 4u;
    let along_i = of_k * k_step + min(i, count - 1u) / 4u * 4u;
    return (offset + select(along_i, along_k, vec4<bool>(k_step == 1u))) / 4u;
}

// Four values of k, each with four rows or columns; zero beyond the last k.
fn turned(read: mat4x4<f32>, k: u32, k_step: u32) -> mat4x4<f32> {
    var of_k = read;
    if k_step == 1u {
        of_k = transpose(read);
    }
    if k + 4u > c.k {
        let zero = vec4<f32>();
        of_k = mat4x4<f32>(
            select(zero, of_k[0], k < c.k),
            select(zero, of_k[1], k + 1u < c.k),
            select(zero, of_k[2], k + 2u < c.k),
            zero,
        );
    }
    return of_k;
}

// Splits a number below 8 LANES into the indices of four values of k and of four rows or columns.
// Consecutive numbers store to consecutive memory.
fn block(number: u32) -> vec2<u32> {
    return vec2<u32>(number / LANES % 4u, number % LANES + number / (4u * LANES) * LANES);
}

fn fill_a(number: u32, first_row: u32, first: u32) {
    let at = block(number);
    let k = first + 4u * at.x;
    let read = places(c.a_offset, first_row + 4u * at.y, c.a_row, c.m, k, c.a_column);
    let x = turned(mat4x4<f32>(a[read.x], a[read.y], a[read.z], a[read.w]), k, c.a_column);
    let to = 4u * WIDTH * at.x + at.y;
    a_tile[to] = x[0];
    a_tile[to + WIDTH] = x[1];
    a_tile[to + 2u * WIDTH] = x[2];
    a_tile[to + 3u * WIDTH] = x[3];
}

fn fill_b(number: u32, first_column: u32, first: u32) {
    let at = block(number);
    let k = first + 4u * at.x;
    let read = places(c.b_offset, first_column + 4u * at.y, c.b_column, c.n, k, c.b_row);
    let y = turned(mat4x4<f32>(b[read.x], b[read.y], b[read.z], b[read.w]), k, c.b_row);
    let to = 4u * WIDTH * at.x + at.y;
    b_tile[to] = y[0];
    b_tile[to + WIDTH] = y[1];
    b_tile[to + 2u * WIDTH] = y[2];
    b_tile[to + 3u * WIDTH] = y[3];
}

// With 8 LANES invocations, each fills a part of both operands; with twice as many, of one of them.
fn fill(t: u32, first_row: u32, first_column: u32, first: u32) {
    let number = t % (8u * LANES);
    if LANES == 8u || t < 8u * LANES {
        fill_a(number, first_row, first);
    }
    if LANES == 8u || t >= 8u * LANES {
        fill_b(number, first_column, first);
    }
}
