//! Transfers between the GPUs of several processes, through NCCL.
//!
//! NCCL moves elements and never adds them, so the order of a sum does not depend on its algorithm,
//! topology or release.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    ptr, thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::CUstream;

use crate::{Device, Error, Matrix, Result, library::Library, loader::functions};

/// The oldest supported release.
const REQUIRED: [i32; 2] = [2, 18];

/// Results of NCCL's functions.
const SUCCESS: c_int = 0;
/// A connection failed.
const SYSTEM: c_int = 2;
/// Another process ended, or the network failed.
const REMOTE: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// `ncclFloat32`.
const F32: c_int = 7;

/// Interval at which a wait checks whether a transfer has failed.
const POLL: Duration = Duration::from_millis(100);

/// Identifies a communicator. Rank 0 creates it and sends it to the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclComm_t`.
type Handle = *mut c_void;

functions! { Library::Nccl;
    ncclCommAbort(communicator: Handle) -> c_int;
    ncclCommGetAsyncError(communicator: Handle, error: *mut c_int) -> c_int;
    ncclCommInitRank(communicator: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int) -> c_int;
    ncclGetErrorString(result: c_int) -> *const c_char;
    ncclGetLastError(communicator: Handle) -> *const c_char;
    ncclGetUniqueId(id: *mut UniqueId) -> c_int;
    ncclGetVersion(version: *mut c_int) -> c_int;
    ncclGroupEnd() -> c_int;
    ncclGroupStart() -> c_int;
    ncclRecv(to: *mut c_void, count: usize, element: c_int, peer: c_int, communicator: Handle,
        stream: CUstream) -> c_int;
    ncclSend(from: *const c_void, count: usize, element: c_int, peer: c_int, communicator: Handle,
        stream: CUstream) -> c_int;
}

/// Loads NCCL and returns its file and release, such as 2.27.5.
///
/// # Errors
/// [`Error::Library`] if NCCL was not found, [`Error::Function`] or [`Error::OldNccl`] if it is too
/// old.
pub fn release() -> Result<(PathBuf, String)> {
    let file = Library::Nccl.load()?;
    load()?;
    let mut version = 0;
    // SAFETY: the library is loaded, and the pointer is valid.
    check("querying the release", ptr::null_mut(), unsafe { ncclGetVersion(&mut version) })?;
    let [major, minor, patch] = decoded(version);
    let found = [major, minor];
    if found < REQUIRED {
        return Err(Error::OldNccl { file, found, required: REQUIRED });
    }
    Ok((file, format!("{major}.{minor}.{patch}")))
}

/// Decodes NCCL's version number, 10000 * major + 100 * minor + patch. Before 2.9 it was 1000 *
/// major + 100 * minor + patch.
const fn decoded(version: c_int) -> [i32; 3] {
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    [version / major, version % major / 100, version % 100]
}

impl UniqueId {
    /// Creates the id, on rank 0.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    ///
    /// # Panics
    /// Unless [`release`] succeeded before.
    pub fn new() -> Result<Self> {
        let mut id = Self([0; 128]);
        // SAFETY: the library is loaded, and the pointer is valid.
        check("drawing an id", ptr::null_mut(), unsafe { ncclGetUniqueId(&mut id) })?;
        Ok(id)
    }
}

/// The connection of one rank's GPU to those of all other ranks. Dropping it aborts its transfers,
/// whether or not the other ranks still take part.
#[derive(Debug)]
pub struct Communicator(Handle);

// SAFETY: NCCL allows calls from any thread as long as there is one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Connects the GPU of this rank to those of the others, and waits for all of them. `id` is the
    /// one that rank 0 created.
    ///
    /// # Errors
    /// [`Error::Nccl`], [`Error::Transfer`], [`Error::Driver`].
    ///
    /// # Panics
    /// Unless [`release`] succeeded before.
    pub fn new(device: &Device, id: UniqueId, rank: usize, world: usize) -> Result<Self> {
        device.bind()?;
        let [rank, world] = [rank, world].map(as_c_int);
        let mut handle = ptr::null_mut();
        // SAFETY: the library is loaded, the pointer is valid, and the GPU's context is bound.
        let result = unsafe { ncclCommInitRank(&mut handle, world, id, rank) };
        check("connecting the GPUs", ptr::null_mut(), result)?;
        Ok(Self(handle))
    }

    /// Queues transfers that run together, after all earlier work: the matrices `sent` to other
    /// ranks, and those `received` from them. Between two ranks, the i-th matrix that one sends is
    /// the i-th that the other receives, and has as many elements.
    ///
    /// # Errors
    /// [`Error::Gaps`], [`Error::Alias`] if a received matrix overlaps any other, [`Error::Stale`],
    /// [`Error::Capturing`], [`Error::Nccl`], [`Error::Transfer`], [`Error::Driver`].
    pub fn exchange(
        &mut self,
        device: &mut Device,
        sent: &[(usize, Matrix<f32>)],
        received: &[(usize, Matrix<f32>)],
    ) -> Result {
        const WHAT: &str = "an exchange between GPUs";
        const SOURCE: &str = "a source";
        device.refuse_in_capture(WHAT)?;
        let mut checks = device.checks(WHAT);
        for (operand, transfers) in [(SOURCE, sent), ("a target", received)] {
            for (_, matrix) in transfers {
                checks.input(operand, *matrix, matrix.shape(), 4)?;
            }
        }
        checks.all_apart(SOURCE)?;
        device.bind()?;
        let (handle, stream) = (self.0, device.stream());
        let check = |result| check(WHAT, handle, result);
        // SAFETY: the library is loaded.
        check(unsafe { ncclGroupStart() })?;
        let sends = sent.iter().map(|&(peer, matrix)| {
            let (address, count) = (matrix.address as *const c_void, matrix.elements());
            // SAFETY: the communicator is live, and the matrix is contiguous memory of this device.
            unsafe { ncclSend(address, count, F32, as_c_int(peer), handle, stream) }
        });
        let receives = received.iter().map(|&(peer, matrix)| {
            let (address, count) = (matrix.address as *mut c_void, matrix.elements());
            // SAFETY: as above; a target overlaps no other matrix.
            unsafe { ncclRecv(address, count, F32, as_c_int(peer), handle, stream) }
        });
        let queued = sends.chain(receives).try_for_each(check);
        // SAFETY: the library is loaded, and a group was started; it is ended after a failure too.
        let ended = check(unsafe { ncclGroupEnd() });
        queued.and(ended)
    }

    /// Waits for all queued work, or until a transfer fails.
    ///
    /// # Errors
    /// [`Error::Transfer`], [`Error::Nccl`], [`Error::Driver`].
    pub fn wait(&mut self, device: &Device) -> Result {
        let mut asked = Instant::now();
        while !device.is_idle()? {
            if asked.elapsed() >= POLL {
                let mut result = SUCCESS;
                // SAFETY: the communicator is live, and the pointer is valid.
                let call = unsafe { ncclCommGetAsyncError(self.0, &mut result) };
                check("asking for failures", self.0, call)?;
                check("an exchange between GPUs", self.0, result)?;
                asked = Instant::now();
            }
            thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is live, and is not used again. This is not ncclCommDestroy,
        // because that waits for transfers whose peer may be gone.
        let _ = unsafe { ncclCommAbort(self.0) };
    }
}

fn as_c_int(rank: usize) -> c_int {
    c_int::try_from(rank).expect("a number of ranks below 2^31")
}

fn check(what: &str, communicator: Handle, result: c_int) -> Result {
    match result {
        SUCCESS | IN_PROGRESS => Ok(()),
        SYSTEM | REMOTE => Err(Error::Transfer { problem: problem(communicator, result) }),
        _ => Err(Error::Nccl { what: what.to_owned(), problem: problem(communicator, result) }),
    }
}

/// NCCL's description of a failed call's result.
fn problem(communicator: Handle, result: c_int) -> String {
    // SAFETY: the library is loaded; both texts are static or live as long as the communicator, and
    // the second is that of all communicators where there is none.
    let texts = unsafe { [ncclGetErrorString(result), ncclGetLastError(communicator)] };
    let texts = texts.into_iter().filter(|text| !text.is_null()).map(|text| {
        // SAFETY: a text of NCCL ends with NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    });
    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_decoded() {
        for (version, expected) in
            [(2_708, [2, 7, 8]), (21_800, [2, 18, 0]), (22_705, [2, 27, 5]), (30_102, [3, 1, 2])]
        {
            assert_eq!(decoded(version), expected);
        }
    }
}
