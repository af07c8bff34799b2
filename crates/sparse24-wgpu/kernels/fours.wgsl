// Reading four neighbours at once: offsets, strides and widths are multiples of 4.

alias Part = vec4<f32>;

fn part_at(place: u32) -> u32 {
    return place / 4u;
}

// Of the parts at four successive places, which are one.
fn joined(a: Part, b: Part, c: Part, d: Part) -> vec4<f32> {
    return a;
}
