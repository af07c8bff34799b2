// Sums and maxima over the 64 invocations of a workgroup, in a fixed order: the upper half is added
// to the lower half, until one value is left. Each invocation reads all values, at indices that are
// known when the kernel is compiled: further barriers would cost more, above all on a CPU.

var<workgroup> lanes: array<f32, 64>;

fn share(lane: u32, x: f32) {
    workgroupBarrier();
    lanes[lane] = x;
    workgroupBarrier();
}

fn four_lanes(i: u32) -> vec4<f32> {
    return vec4<f32>(lanes[i], lanes[i + 1u], lanes[i + 2u], lanes[i + 3u]);
}

// The sums of values that are 16 apart.
fn sums_at(i: u32) -> vec4<f32> {
    return (four_lanes(i) + four_lanes(i + 32u)) + (four_lanes(i + 16u) + four_lanes(i + 48u));
}

fn maxima_at(i: u32) -> vec4<f32> {
    return max(
        max(four_lanes(i), four_lanes(i + 32u)),
        max(four_lanes(i + 16u), four_lanes(i + 48u)),
    );
}

fn workgroup_sum(lane: u32, x: f32) -> f32 {
    share(lane, x);
    let sums = (sums_at(0u) + sums_at(8u)) + (sums_at(4u) + sums_at(12u));
    return (sums.x + sums.z) + (sums.y + sums.w);
}

fn workgroup_max(lane: u32, x: f32) -> f32 {
    share(lane, x);
    let most = max(max(maxima_at(0u), maxima_at(4u)), max(maxima_at(8u), maxima_at(12u)));
    return max(max(most.x, most.y), max(most.z, most.w));
}
