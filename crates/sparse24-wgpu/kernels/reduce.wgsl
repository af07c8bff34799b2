// Sums and maxima over the 64 invocations of a workgroup, in a fixed order. Each invocation reads
// all values, at indices that are known when the kernel is compiled: further barriers would cost
// more, above all on a CPU.

var<workgroup> lanes: array<f32, 64>;

fn share(lane: u32, x: f32) {
    workgroupBarrier();
    lanes[lane] = x;
    workgroupBarrier();
}

fn four_lanes(i: u32) -> vec4<f32> {
    return vec4<f32>(lanes[i], lanes[i + 1u], lanes[i + 2u], lanes[i + 3u]);
}

fn sum_of_16(i: u32) -> vec4<f32> {
    return (four_lanes(i) + four_lanes(i + 4u)) + (four_lanes(i + 8u) + four_lanes(i + 12u));
}

fn max_of_16(i: u32) -> vec4<f32> {
    return max(
        max(four_lanes(i), four_lanes(i + 4u)),
        max(four_lanes(i + 8u), four_lanes(i + 12u)),
    );
}

fn workgroup_sum(lane: u32, x: f32) -> f32 {
    share(lane, x);
    let sums = (sum_of_16(0u) + sum_of_16(16u)) + (sum_of_16(32u) + sum_of_16(48u));
    return (sums.x + sums.y) + (sums.z + sums.w);
}

fn workgroup_max(lane: u32, x: f32) -> f32 {
    share(lane, x);
    let most = max(max(max_of_16(0u), max_of_16(16u)), max(max_of_16(32u), max_of_16(48u)));
    return max(max(most.x, most.y), max(most.z, most.w));
}
