// Reading four neighbours from places of any alignment.

alias Part = f32;

fn part_at(place: u32) -> u32 {
    return place;
}

// Of the parts at four successive places.
fn joined(a: Part, b: Part, c: Part, d: Part) -> vec4<f32> {
    return vec4<f32>(a, b, c, d);
}
