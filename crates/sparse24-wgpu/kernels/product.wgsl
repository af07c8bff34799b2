// The constants of a product: C[m,n] = A[m,k] B[k,n].

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
    // The first value of k, where a product takes several calls.
    first: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;

