// Reads four consecutive elements by scalar loads, with any alignment.

alias Part = f32;

fn part_at(place: u32) -> u32 {
    return place;
}

// The elements at four successive places.
fn joined(a: Part, b: Part, c: Part, d: Part) -> vec4<f32> {
    return vec4<f32>(a, b, c, d);
}
