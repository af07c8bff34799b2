//! Thrift's compact protocol, in which footers and the headers of pages are written.
//!
//! Invariant: time is linear in the bytes read, and nesting beyond [`DEPTH`] is refused.

/// Most levels of groups of columns, and of values within a value that is skipped.
pub(super) const DEPTH: usize = 64;

pub(super) const BYTES: u8 = 8;
pub(super) const LIST: u8 = 9;
pub(super) const STRUCT: u8 = 12;

/// Takes a number in seven bits of each byte, the lowest first.
pub(super) fn number(data: &mut &[u8]) -> Option<u64> {
    let length = data.iter().take(10).position(|byte| byte & 0x80 == 0)? + 1;
    let bytes = data.split_off(..length)?;
    Some(bytes.iter().rev().fold(0, |n: u64, byte| n << 7 | u64::from(byte & 0x7f)))
}

type Member<'a> = dyn FnMut(usize, u8, &mut &[u8]) -> Option<()> + 'a;

/// The integers and booleans among the members of a struct, by id.
pub(super) type Numbers = [Option<i64>; 12];

/// Gives the id and the kind of each member of a struct to `take`, which takes its data.
pub(super) fn members(data: &mut &[u8], take: &mut Member<'_>) -> Option<()> {
    let mut id = 0;
    loop {
        let head = *data.split_off_first()?;
        match head >> 4 {
            _ if head == 0 => return Some(()),
            0 => id = u16::try_from(number(data)? / 2).ok()?.into(),
            step => id += usize::from(step),
        }
        take(id, head & 15, data)?;
    }
}

/// The numbers of a struct; `take` handles other members.
pub(super) fn numbers(data: &mut &[u8], take: &mut Member<'_>) -> Option<Numbers> {
    let mut found = Numbers::default();
    members(data, &mut |id, kind, data| {
        let value = match kind {
            // The kind of a boolean is its value.
            1 | 2 => i64::from(kind == 1),
            4..=6 => number(data).map(|n| (n >> 1) as i64 ^ -((n & 1) as i64))?,
            _ => return take(id, kind, data),
        };
        found.get_mut(id).into_iter().for_each(|place| *place = Some(value));
        Some(())
    })?;
    Some(found)
}

/// Gives each struct of a list to `take`.
pub(super) fn structs(
    data: &mut &[u8],
    take: &mut dyn FnMut(&mut &[u8]) -> Option<()>,
) -> Option<()> {
    let (count, kind) = list(data)?;
    if kind != STRUCT && count > 0 {
        return None;
    }
    (0..count).try_for_each(|_| take(data))
}

/// The length of a list and the kind of its elements.
fn list(data: &mut &[u8]) -> Option<(u64, u8)> {
    let head = *data.split_off_first()?;
    let count = if head >> 4 == 15 { number(data)? } else { u64::from(head >> 4) };
    Some((count, head & 15))
}

pub(super) fn bytes<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = number(data)?;
    data.split_off(..usize::try_from(length).ok()?)
}

pub(super) fn ignore(_: usize, kind: u8, data: &mut &[u8]) -> Option<()> {
    skip(data, kind, DEPTH)
}

/// Skips a value of a kind that has at most `depth` levels.
pub(super) fn skip(data: &mut &[u8], kind: u8, depth: usize) -> Option<()> {
    let depth = depth.checked_sub(1)?;
    match kind {
        1 | 2 => {}
        3 => drop(data.split_off_first()?),
        4..=6 => drop(number(data)?),
        7 => drop(data.split_off(..8)?),
        BYTES => drop(bytes(data)?),
        LIST | 10 => {
            let (count, kind) = list(data)?;
            // Every element takes at least one byte, even a boolean.
            (0..count).try_for_each(|_| skip(data, kind.max(3), depth))?;
        }
        STRUCT => members(data, &mut |_, kind, data| skip(data, kind, depth))?,
        _ => return None,
    }
    Some(())
}
