//! Injects faults into the operations of [`super`] and records them, in tests only. The crash
//! harness of the command provokes failures of a real kernel.

use std::path::Path;

#[cfg(not(test))]
pub(super) use healthy::before;
#[cfg(not(test))]
pub(crate) use healthy::writer;
#[cfg(test)]
pub(super) use planned::before;
#[cfg(test)]
pub(crate) use planned::{Fault, Plan, Record, plan, trace, writer};

/// An operation that is about to be carried out.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests look at it"))]
pub(super) enum Operation<'a> {
    CreateDirectory(&'a Path),
    Create(&'a Path),
    Write(&'a Path, &'a [u8]),
    Sync(&'a Path),
    Rename(&'a Path, &'a Path),
    RemoveFile(&'a Path),
    RemoveDirectory(&'a Path),
    SyncDirectory(&'a Path),
}

#[cfg(not(test))]
mod healthy {
    use std::{fs::File, io, path::Path};

    use super::Operation;

    pub(crate) fn before(_: Operation<'_>) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn writer<'a>(file: &'a mut File, _: &Path) -> &'a mut File {
        file
    }
}

#[cfg(test)]
mod planned {
    use std::{
        cell::{Cell, RefCell},
        fs::File,
        io::{self, Write},
        path::{Path, PathBuf},
    };

    use super::Operation;

    /// Faults of the operations of this thread.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Plan {
        /// All succeed.
        Healthy,
        /// After this many more, one fails so.
        Fail(u32, Fault),
        /// After this many more, none is carried out: the process is dead.
        Kill(u32),
    }

    /// How an operation fails.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Fault {
        /// ENOSPC.
        NoSpace,
        /// EIO.
        Device,
        /// EDQUOT.
        Quota,
        /// EINTR; a write is to be tried again.
        Interrupted,
        /// A write carries out half, and says so; other operations succeed.
        Short,
        /// A write stores half, and from then on all that takes space fails with ENOSPC.
        Full,
    }

    impl Fault {
        pub(crate) const ALL: [Self; 6] =
            [Self::NoSpace, Self::Device, Self::Quota, Self::Interrupted, Self::Short, Self::Full];

        fn error(self) -> io::Error {
            io::Error::from_raw_os_error(match self {
                Self::NoSpace | Self::Full => 28,
                Self::Device => 5,
                Self::Quota => 122,
                Self::Interrupted => 4,
                Self::Short => unreachable!("a short write is no error"),
            })
        }
    }

    /// An operation that was carried out.
    #[derive(Debug, Clone, PartialEq)]
    pub(crate) enum Record {
        CreateDirectory(PathBuf),
        Create(PathBuf),
        Write(PathBuf, Vec<u8>),
        Sync(PathBuf),
        Rename(PathBuf, PathBuf),
        RemoveFile(PathBuf),
        RemoveDirectory(PathBuf),
        SyncDirectory(PathBuf),
    }

    thread_local! {
        static PLAN: Cell<Plan> = const { Cell::new(Plan::Healthy) };
        static FULL: Cell<bool> = const { Cell::new(false) };
        static TRACE: RefCell<Option<Vec<Record>>> = const { RefCell::new(None) };
    }

    /// Sets the plan.
    pub(crate) fn plan(plan: Plan) {
        PLAN.set(plan);
        FULL.set(false);
    }

    /// Records the operations of `work` on this thread.
    pub(crate) fn trace(work: impl FnOnce()) -> Vec<Record> {
        TRACE.set(Some(Vec::new()));
        work();
        TRACE.take().expect("it was set")
    }

    /// The fault of the next operation, if any.
    fn next() -> io::Result<Option<Fault>> {
        let (next, fault) = match PLAN.get() {
            Plan::Healthy => (Plan::Healthy, None),
            Plan::Fail(0, fault) => (Plan::Healthy, Some(fault)),
            Plan::Fail(left, fault) => (Plan::Fail(left - 1, fault), None),
            Plan::Kill(0) => return Err(Fault::Device.error()),
            Plan::Kill(left) => (Plan::Kill(left - 1), None),
        };
        PLAN.set(next);
        Ok(fault)
    }

    pub(crate) fn before(operation: Operation<'_>) -> io::Result<()> {
        let fault = next()?;
        if fault == Some(Fault::Full) {
            FULL.set(true);
        }
        let takes_room = matches!(
            operation,
            Operation::Create(_) | Operation::CreateDirectory(_) | Operation::Sync(_)
        );
        match fault {
            _ if FULL.get() && takes_room => return Err(Fault::Full.error()),
            None | Some(Fault::Full | Fault::Short) => {}
            // The kernel's answer to a sync, which is tried again below us.
            Some(Fault::Interrupted)
                if matches!(operation, Operation::Sync(_) | Operation::SyncDirectory(_)) => {}
            Some(fault) => return Err(fault.error()),
        }
        record(operation);
        Ok(())
    }

    fn record(operation: Operation<'_>) {
        TRACE.with_borrow_mut(|trace| {
            let Some(trace) = trace else { return };
            trace.push(match operation {
                Operation::CreateDirectory(path) => Record::CreateDirectory(path.into()),
                Operation::Create(path) => Record::Create(path.into()),
                Operation::Write(path, bytes) => Record::Write(path.into(), bytes.into()),
                Operation::Sync(path) => Record::Sync(path.into()),
                Operation::Rename(from, to) => Record::Rename(from.into(), to.into()),
                Operation::RemoveFile(path) => Record::RemoveFile(path.into()),
                Operation::RemoveDirectory(path) => Record::RemoveDirectory(path.into()),
                Operation::SyncDirectory(path) => Record::SyncDirectory(path.into()),
            });
        });
    }

    pub(crate) fn writer<'a>(file: &'a mut File, path: &'a Path) -> impl Write + 'a {
        Faulty { file, path }
    }

    /// A file whose single writes follow the plan.
    struct Faulty<'a> {
        file: &'a mut File,
        path: &'a Path,
    }

    impl Write for Faulty<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fault = next()?;
            if FULL.get() {
                return Err(Fault::Full.error());
            }
            FULL.set(fault == Some(Fault::Full));
            let bytes = match fault {
                None => bytes,
                // At least a byte: none at all would say that nothing can be written any more.
                Some(Fault::Short | Fault::Full) => &bytes[..bytes.len().div_ceil(2)],
                Some(fault) => return Err(fault.error()),
            };
            record(Operation::Write(self.path, bytes));
            self.file.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
