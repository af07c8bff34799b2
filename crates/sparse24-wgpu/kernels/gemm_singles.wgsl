// gemm_singles: reads A and B by scalar loads, with any strides, for output tiles of 64x64

@group(0) @binding(2) var<storage, read> a: array<f32>;
@group(0) @binding(3) var<storage, read> b: array<f32>;

fn a_at(i: u32, k: u32) -> f32 {
    let value = a[c.a_offset + min(i, c.m - 1u) * c.a_row + min(k, c.k - 1u) * c.a_column];
    return select(0.0, value, i < c.m && k < c.k);
}

fn b_at(k: u32, j: u32) -> f32 {
    let value = b[c.b_offset + min(k, c.k - 1u) * c.b_row + min(j, c.n - 1u) * c.b_column];
    return select(0.0, value, j < c.n && k < c.k);
}

// Splits a number into the index of k and that of four rows or columns. Consecutive numbers load
// consecutive memory.
fn part(number: u32, k_is_contiguous: bool) -> vec2<u32> {
    let along = vec2<u32>(number / 16u, number % 16u);
    return select(along, along.yx, k_is_contiguous);
}

fn load_a(first_row: u32, first: u32, at: vec2<u32>) {
    let i = first_row + 4u * at.y;
    let k = first + at.x;
    a_tile[16u * at.x + at.y] =
        vec4<f32>(a_at(i, k), a_at(i + 1u, k), a_at(i + 2u, k), a_at(i + 3u, k));
}

fn load_b(first_column: u32, first: u32, at: vec2<u32>) {
    let j = first_column + 4u * at.y;
    let k = first + at.x;
    b_tile[16u * at.x + at.y] =
        vec4<f32>(b_at(k, j), b_at(k, j + 1u), b_at(k, j + 2u), b_at(k, j + 3u));
}

fn fill(t: u32, first_row: u32, first_column: u32, first: u32) {
    for (var number = t; number < 256u; number += 64u) {
        load_a(first_row, first, part(number, c.a_column == 1u));
        load_b(first_column, first, part(number, c.b_row == 1u));
    }
}
