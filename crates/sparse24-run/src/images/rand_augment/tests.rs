//! The operations against Pillow 13.0, as timm 1.0 calls it.

use super::*;

fn picture() -> RgbImage {
    RgbImage::from_fn(9, 7, |x, y| {
        Rgb([0, 1, 2].map(|c| ((x * 37 + y * 91 + c * 53 + x * y * 17) % 256 / 2 + 30 * c) as u8))
    })
}

/// The values of an image, row by row, as the digits of a number to the base 31, modulo 2^32.
fn folded(image: &RgbImage) -> u32 {
    let digit = |sum: u32, &value: &u8| sum.wrapping_mul(31).wrapping_add(value.into());
    image.as_raw().iter().fold(0, digit)
}

#[test]
fn operations_are_those_of_pillow() {
    let picture = picture();
    let mut wrong = Vec::new();
    for (operation, level, expected) in [
        (Operation::AutoContrast, 9.0, 0x90037cb3),
        (Operation::AutoContrast, 4.7, 0x90037cb3),
        (Operation::Equalize, 9.0, 0x41af3f6e),
        (Operation::Equalize, 4.7, 0x41af3f6e),
        (Operation::Invert, 9.0, 0xc66f7d51),
        (Operation::Invert, 4.7, 0xc66f7d51),
        (Operation::Rotate, -4.7, 0xff7c1e7c),
        (Operation::Posterize, 9.0, 0x0a45e900),
        (Operation::Posterize, 4.7, 0x79436fc0),
        (Operation::Solarize, 9.0, 0xff3e60fd),
        (Operation::Solarize, 4.7, 0x020fc9ca),
        (Operation::SolarizeAdd, 9.0, 0xb9ff525b),
        (Operation::SolarizeAdd, 4.7, 0x1ad0bd8b),
        (Operation::Color, 9.0, 0xe73037ea),
        (Operation::Color, -4.7, 0x0b634c80),
        (Operation::Contrast, 9.0, 0xabf9c2ed),
        (Operation::Contrast, -4.7, 0x699d069a),
        (Operation::Brightness, 9.0, 0x8df9e20a),
        (Operation::Brightness, -4.7, 0xa0b6f8ba),
        (Operation::Sharpness, 9.0, 0xd2d3e05d),
        (Operation::Sharpness, -4.7, 0x072b2dd1),
        (Operation::ShearX, 9.0, 0x9e8c25da),
        (Operation::ShearX, -4.7, 0x56398ab3),
        (Operation::ShearY, 9.0, 0x58ff60db),
        (Operation::ShearY, -4.7, 0xa2340f40),
        (Operation::TranslateX, 9.0, 0xe9a0801b),
        (Operation::TranslateX, -4.7, 0x7c7fa8e6),
        (Operation::TranslateY, 9.0, 0x9a4f1f60),
        (Operation::TranslateY, -4.7, 0xc9918763),
    ] {
        let found = operation.apply(picture.clone(), level);
        if folded(&found) != expected {
            wrong.push((operation, level, found.into_raw()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
