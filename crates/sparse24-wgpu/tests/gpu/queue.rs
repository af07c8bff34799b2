//! Memory, copies, recorded work and refusals.

use sparse24_core::{
    mvue::Estimator,
    philox::{Purpose, Site},
};
use sparse24_wgpu::{
    Device, Error, Matrix,
    average::moving_average,
    elementwise::{copy, fill},
    mvue::mvue_compress,
};

use crate::{Bits, alloc, loaded, open};

#[test]
fn bits_survive_copies() {
    let Some(mut device) = open() else { return };
    for shape in [[0, 5], [1, 1], [3, 7], [64, 64]] {
        let [rows, columns] = shape;
        let values = Bits::Any.words(rows * columns, 3);
        let wide = alloc(&mut device, [rows, columns + 2]);
        let inner = Matrix { offset: 1, shape, ..wide };
        let packed = alloc(&mut device, shape);
        fill(&mut device, wide, 7).unwrap();
        device.upload(inner, &values).unwrap();
        copy(&mut device, inner, packed).unwrap();
        assert_eq!(device.download(packed).unwrap(), values);
        fill(&mut device, inner, 8).unwrap();
        let other = alloc(&mut device, shape);
        copy(&mut device, packed, other).unwrap();
        copy(&mut device, other, inner).unwrap();
        let found = device.download(wide).unwrap();
        for (row, found) in found.chunks(columns + 2).enumerate() {
            assert_eq!([found[0], found[columns + 1]], [7, 7]);
            assert_eq!(found[1..=columns], values[row * columns..][..columns]);
        }
    }
}

#[test]
fn work_is_in_order_and_copies_are_of_their_time() {
    let Some(mut device) = open() else { return };
    let x = alloc(&mut device, [1, 1000]);
    // More calls than a page of constants or a submission has.
    let mut copies = Vec::new();
    for value in 0..1500 {
        fill(&mut device, x, value).unwrap();
        if value % 500 == 0 {
            copies.push((value, device.copy_out(&[x, x]).unwrap()));
        }
    }
    assert_eq!(device.download(x).unwrap(), [1499; 1000]);
    for (value, copied) in copies {
        assert_eq!(copied.read().unwrap(), [vec![value; 1000], vec![value; 1000]]);
    }
}

#[test]
fn large_copies_are_staged() {
    let Some(mut device) = open() else { return };
    // 72 MB: more than the uploads that wait at once, and, five times, more than one stage of a
    // copy.
    let shape = [3, 6_000_001];
    let values = Bits::Any.words(shape[0] * shape[1], 4);
    let x = loaded(&mut device, shape, &values);
    let last = Matrix { offset: 1, shape: [3, 6_000_000], ..x };
    let copied = device.copy_out(&[x, x, x, last, x]).unwrap().read().unwrap();
    assert!([0, 1, 2, 4].iter().all(|&i| copied[i] == values));
    let rows = values.chunks(shape[1]);
    assert!(copied[3].iter().eq(rows.flat_map(|row| &row[1..])));
}

#[test]
fn recorded_work_is_done_again() {
    let Some(mut device) = open() else { return };
    let [x, y] = [0; 2].map(|_| alloc(&mut device, [1, 8]));
    device.start_recording();
    for value in 0..600 {
        fill(&mut device, y, value).unwrap();
    }
    copy(&mut device, x, y).unwrap();
    let recorded = device.end_recording();
    for value in [5, 6] {
        for _ in 0..600 {
            fill(&mut device, x, value).unwrap();
        }
        device.replay(&recorded).unwrap();
        assert_eq!(device.download(y).unwrap(), [value; 8]);
    }
    let y = device.realloc(y, "y", [2, 8]).unwrap();
    assert_eq!(device.held("test"), 4 * (8 + 16));
    device.replay(&recorded).unwrap();
    assert_eq!(device.download(y).unwrap(), [0; 16], "recorded work keeps the former memory");
}

#[test]
fn refusals_name_what_is_wrong() {
    let Some(mut device) = open() else { return };
    let most = (device.largest() / 4) as usize;
    let error = device.alloc("too large", [1, most + 1], "test").expect_err("beyond the limit");
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let Err(error @ Error::NoAdapter { .. }) = Device::open(99) else {
        panic!("adapter 99 was opened");
    };
    assert!(error.to_string().contains(&device.name()), "{error}");
    let [a, b] = [[2, 3], [3, 2]].map(|shape| alloc(&mut device, shape));
    assert!(matches!(copy(&mut device, a, b), Err(Error::Shape { .. })));
    let site = Site::new(Purpose::Mvue, 1);
    let gaps = Matrix { shape: [2, 2], ..a };
    let inside = Matrix { offset: 1, ..a.reshaped([1, 2]) };
    for refused in [
        moving_average(&mut device, gaps, gaps, 0.5, b),
        mvue_compress(&mut device, gaps, Estimator::Exact, site, gaps),
        mvue_compress(&mut device, inside, Estimator::Exact, site, inside),
    ] {
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    fill(&mut device, a, 1).unwrap();
    assert_eq!(device.download(a).unwrap(), [1; 6], "a refused call leaves the device usable");
}
