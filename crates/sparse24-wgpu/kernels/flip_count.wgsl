// flip_count: the number of bits in which two masks differ
// in   a, b: tiles, two per word
// out  count u32 [1], added to
// pre  fewer than 2^32 elements
// acc  integers: the order of additions does not matter
// ref  sparse24_core::flip::flip_count, bit for bit

struct Constants {
    words: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> a: array<u32>;
@group(0) @binding(3) var<storage, read> b: array<u32>;
@group(0) @binding(4) var<storage, read_write> count: array<atomic<u32>>;

@compute @workgroup_size(64)
fn flip_count(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let word = flat(id, groups, 64u);
    if word < c.words {
        let flips = countOneBits(a[word] ^ b[word]);
        if flips > 0u {
            atomicAdd(&count[0], flips);
        }
    }
}
