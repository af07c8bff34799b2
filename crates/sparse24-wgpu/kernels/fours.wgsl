// Reads four consecutive elements by one vec4 load: offsets, strides and widths are multiples of 4.

alias Part = vec4<f32>;

fn part_at(place: u32) -> u32 {
    return place / 4u;
}

// The elements at four successive places, whose parts are all the same vec4.
fn joined(a: Part, b: Part, c: Part, d: Part) -> vec4<f32> {
    return a;
}
