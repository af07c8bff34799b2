// Philox4x32-10: sparse24_core::philox, with the counter [call, site, micro-step, step].

// The high word of a * b.
fn multiply_high(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u);
}

fn philox(call: u32, site: u32) -> vec4<u32> {
    var x = vec4<u32>(call, site, state.micro_step, state.step);
    var key = vec2<u32>(state.seed_low, state.seed_high);
    for (var round = 0u; round < 10u; round += 1u) {
        x = vec4<u32>(
            multiply_high(x.z, 0xcd9e8d57u) ^ x.y ^ key.x,
            x.z * 0xcd9e8d57u,
            multiply_high(x.x, 0xd2511f53u) ^ x.w ^ key.y,
            x.x * 0xd2511f53u,
        );
        key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return x;
}
