// Sums and maxima over the 64 invocations of a workgroup, in a fixed order.

var<workgroup> lanes: array<f32, 64>;

fn workgroup_sum(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    lanes[lane] = x;
    for (var width = 32u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lane < width {
            lanes[lane] += lanes[lane + width];
        }
    }
    workgroupBarrier();
    return lanes[0];
}

fn workgroup_max(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    lanes[lane] = x;
    for (var width = 32u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lane < width {
            lanes[lane] = max(lanes[lane], lanes[lane + width]);
        }
    }
    workgroupBarrier();
    return lanes[0];
}
