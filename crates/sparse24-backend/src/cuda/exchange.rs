//! The exchange of gradients between GPUs through NCCL, queued beside all other work.

use sparse24_cuda::{
    Device, Matrix,
    add::add,
    nccl::{self, Communicator, UniqueId},
};

use super::{CudaBackend, buffers::Buffers};
use crate::{
    Error, Exchange, Result, Stage, Tensor,
    group::{Group, misfit},
};

impl CudaBackend {
    /// See [`Backend::connect`](crate::Backend::connect).
    pub(super) fn connect_gpus(&mut self, group: &mut dyn Group) -> Result<String> {
        let release = match self.exchange {
            Exchange::Tcp => Err("backend.exchange is \"tcp\"".to_owned()),
            Exchange::Auto | Exchange::Nccl => agreed_release(&self.gpu, group)?,
        };
        let release = match release {
            Ok(release) => release,
            Err(problem) if self.exchange == Exchange::Nccl => {
                return Err(Error::setting("backend.exchange", problem));
            }
            Err(reason) => return Ok(format!("gradients are exchanged over TCP: {reason}")),
        };
        let (rank, world) = (group.rank(), group.world());
        let own = if rank == 0 { Some(UniqueId::new()?) } else { None };
        let id = group.broadcast(own.as_ref().map_or(&[], |UniqueId(id)| id))?;
        let id = UniqueId(id.try_into().map_err(|_| misfit("bytes of an id"))?);
        self.communicator = Some(Communicator::new(&self.gpu, id, rank, world)?);
        Ok(format!("gradients are exchanged by NCCL {release}"))
    }
}

/// The release of NCCL that all ranks have, or why they cannot use it, the same on each.
fn agreed_release(gpu: &Device, group: &mut dyn Group) -> Result<Result<String, String>> {
    let own = match nccl::release() {
        Ok((_, release)) => format!("{release}\n{:?}", gpu.uuid()?),
        Err(error) => format!("\n{error}"),
    };
    let all = group.all_gather(own.as_bytes())?;
    let all: Vec<_> = all.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let split = |text| str::split_once(text, '\n').ok_or_else(|| misfit("releases of NCCL"));
    let all: Vec<_> = all.iter().map(|text| split(text)).collect::<Result<_, _>>()?;
    Ok(common_release(&all))
}

/// The release that `ranks` have in common: of each its release and its GPU, or nothing and why.
fn common_release(ranks: &[(&str, &str)]) -> Result<String, String> {
    let (first, _) = ranks[0];
    for (rank, (release, gpu)) in ranks.iter().enumerate() {
        if release.is_empty() {
            return Err(format!("on rank {rank}, {gpu}"));
        }
        if *release != first {
            return Err(format!("rank 0 has NCCL {first}, rank {rank} has {release}"));
        }
        if let Some(other) = ranks[..rank].iter().position(|(_, other)| other == gpu) {
            return Err(format!("ranks {other} and {rank} share a GPU"));
        }
    }
    Ok(first.to_owned())
}

/// Queues stages of [`Backend::reduce`](crate::Backend::reduce), after earlier work and
/// beside later work.
pub(super) fn start(
    communicator: &mut Option<Communicator>,
    gpu: &mut Device,
    buffers: &Buffers,
    stages: &[Stage],
) -> Result {
    let (Some(gpus), [_, ..]) = (communicator, stages) else { return Ok(()) };
    let floats = |tensor: Tensor| buffers.floats(tensor);
    let all = |transfers: &[(usize, Tensor)]| -> Vec<(usize, Matrix<f32>)> {
        transfers.iter().map(|&(rank, tensor)| (rank, floats(tensor))).collect()
    };
    let mut queue = |gpu: &mut Device, Stage { sent, received, additions, .. }: &Stage| {
        gpus.exchange(gpu, &all(sent), &all(received))?;
        let mut additions = additions.iter().map(|&[x, delta]| [floats(x), floats(delta)]);
        additions.try_for_each(|[x, delta]| add(gpu, x, delta, x))
    };
    Ok(gpu.beside(|gpu| stages.iter().try_for_each(|stage| queue(gpu, stage)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_use_nccl_if_each_has_the_same_release_and_a_gpu_of_its_own() {
        for (second, expected) in [
            (("2.27.5", "b"), Ok("2.27.5")),
            (("2.28.3", "b"), Err("rank 0 has NCCL 2.27.5, rank 1 has 2.28.3")),
            (("2.27.5", "a"), Err("ranks 0 and 1 share a GPU")),
            (("", "it was not found"), Err("on rank 1, it was not found")),
        ] {
            let found = common_release(&[("2.27.5", "a"), second]);
            assert_eq!(found.as_deref().map_err(String::as_str), expected);
        }
    }
}
