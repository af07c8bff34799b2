//! A run on several ranks: rank 0 leads and has the run directory, the others follow its orders and
//! write nothing.
//!
//! Invariant: before anything that all ranks do together, rank 0 sends an [`Order`], so that all
//! make the same calls in the same order, whatever rank 0 reads, measures or decides in between.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sparse24_train::{
    Error as TrainError, ErrorKind,
    backend::{PLANNED_ON, Plans},
    group::Group,
    trainer::{FlipSampling, ParameterState, Trainer},
};

use super::{
    Provenance,
    components::{RunData, trainer_in},
    identity::{DATA, TOKENIZER, of_data, of_tokenizer},
    model::evaluated_at_once,
    observer::{Asked, Observer},
};
use crate::{
    Error, Result,
    config::{Config, NEUTRAL},
    data::{ReadAhead, Scan, Tokenizer},
    ranks::{Facts, agree, ranks_of},
};

/// The next call of all ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// None; each rank says whether to stop.
    Ask,
    /// [`Trainer::train_step`].
    Step { samples_flips: bool },
    /// [`Trainer::skip_step`].
    Skip,
    /// [`RunData::judge`].
    Evaluate,
    /// [`compare_states`].
    Compare,
    /// The run ends on rank 0.
    End(Ending),
}

/// How a run ends.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ending {
    Finished,
    Stopped,
    Failed { kind: ErrorKind, problem: String },
}

/// The request of a rank that was asked to stop.
const STOP: &[u8] = b"stop";

/// Sends an order from rank 0; returns whether another rank asks to stop.
pub(super) fn order(group: &mut dyn Group, order: &Order) -> Result<bool> {
    if group.world() == 1 {
        return Ok(false);
    }
    let requests = group.all_gather(&serde_json::to_vec(order).expect("plain values"))?;
    Ok(requests.iter().any(|request| request == STOP))
}

/// All that a rank needs to follow.
#[derive(Serialize, Deserialize)]
struct Setup {
    /// The document of the configuration.
    config: String,
    vocabulary: usize,
    plans: Plans,
    scan: Option<Scan>,
    tokenizer: Option<Tokenizer>,
    /// Whether the state of rank 0 is another than that of a new trainer.
    has_state: bool,
}

/// Gives all ranks the configuration, the plans and the state of rank 0, unless it is alone.
/// Returns how they will exchange gradients, where there is a choice.
pub(super) fn set_up(
    config: &Config,
    data: &RunData,
    trainer: &mut Trainer,
    vocabulary: usize,
    has_state: bool,
) -> Result<Option<String>> {
    if trainer.group().world() == 1 {
        return Ok(None);
    }
    // Without a plan yet, they would be timed in the first steps, and otherwise on each rank.
    if !trainer.backend().plans().is_empty() {
        let batches = data.batches(trainer.recipe(), None);
        trainer.time_plans(&*batches)?;
    }
    let setup = Setup {
        config: config.to_toml(),
        vocabulary,
        plans: trainer.backend().plans(),
        scan: data.scan().cloned(),
        tokenizer: data.tokenizer().cloned(),
        has_state,
    };
    trainer.group().broadcast(&serde_json::to_vec(&setup).expect("plain values"))?;
    settle(data, trainer, has_state)
}

/// The part of the set-up that is the same on all ranks.
fn settle(data: &RunData, trainer: &mut Trainer, has_state: bool) -> Result<Option<String>> {
    let backend = trainer.backend();
    let device = backend.plans().remove(PLANNED_ON);
    let simd = || format!("{} ({})", backend.device().backend, sparse24_cpu::Simd::detect());
    let facts = [
        ("the device", device.unwrap_or_else(simd)),
        (DATA, of_data(data).fingerprint.to_string()),
        (TOKENIZER, of_tokenizer(data.tokenizer()).to_string()),
    ];
    agree(trainer.group(), &facts.map(|(key, value)| (key.to_owned(), value)).into())?;
    if has_state {
        trainer.take_state_of_rank_0()?;
    }
    Ok(trainer.connect()?)
}

/// Values that ranks must have in common before they read data: the program, and the settings on
/// their command lines that affect bits, by key.
#[must_use]
pub fn facts(settings: BTreeMap<String, String>) -> Facts {
    let program = ("the program".to_owned(), Provenance::build());
    let decisive = settings.into_iter().filter(|(key, _)| !NEUTRAL.contains(&&**key));
    [program].into_iter().chain(decisive).collect()
}

/// Compares weights, moments and masks of all ranks, by their hashes.
///
/// # Errors
/// [`Error::Disagreement`] on all ranks, with the first tensor that differs; an error of the kind
/// [`ErrorKind::Peer`] if a rank is gone.
pub(super) fn compare_states(trainer: &mut Trainer) -> Result {
    if trainer.group().world() == 1 {
        return Ok(());
    }
    let step = trainer.step();
    let states = trainer.parameter_states()?;
    let hashes: Vec<_> = states.iter().flat_map(hashes).collect();
    let bytes: Vec<u8> = hashes.iter().flat_map(|(_, hash)| *hash.as_bytes()).collect();
    let all = trainer.group().all_gather(&bytes)?;
    for (at, (tensor, _)) in hashes.iter().enumerate() {
        let of = |rank: usize| all[rank].chunks(blake3::OUT_LEN).nth(at);
        let like = |rank: usize| (0..all.len()).filter(|&other| of(other) == of(rank)).count();
        let (most, least) = (0..all.len())
            .map(like)
            .fold((0, all.len()), |(most, least), count| (most.max(count), least.min(count)));
        if least < all.len() {
            // Of two, nobody knows which is wrong.
            let wrong = (0..all.len()).filter(|&rank| like(rank) < most || most == least);
            return Err(Error::Disagreement {
                step,
                ranks: ranks_of(wrong),
                tensor: tensor.clone(),
            });
        }
    }
    Ok(())
}

fn hashes(state: &ParameterState) -> impl Iterator<Item = (String, blake3::Hash)> {
    let name = &state.name;
    let of = |bytes: &mut dyn Iterator<Item = u8>| {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = Vec::with_capacity(1 << 16);
        loop {
            buffer.clear();
            buffer.extend(bytes.take(1 << 16));
            if buffer.is_empty() {
                return hasher.finalize();
            }
            hasher.update(&buffer);
        }
    };
    let floats = [
        ("the weight", &state.weight),
        ("the first moment", &state.first_moment),
        ("the second moment", &state.second_moment),
        ("the average", &state.average),
    ];
    let masks = [("the mask", &state.mask), ("the mask of dgrad", &state.dgrad_mask)];
    let floats = floats.map(|(what, values)| {
        (format!("{what} of {name}"), of(&mut values.iter().flat_map(|value| value.to_le_bytes())))
    });
    let masks = masks.map(|(what, mask)| {
        let tiles = mask.iter().flat_map(|mask| mask.tiles());
        (format!("{what} of {name}"), of(&mut tiles.flat_map(|tile| tile.to_le_bytes())))
    });
    floats.into_iter().chain(masks)
}

/// A rank that follows rank 0.
pub struct Follower {
    config: Config,
    data: RunData,
    ahead: Option<ReadAhead>,
    trainer: Trainer,
}

/// How a run ended for a rank that followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Followed {
    /// The last step is done.
    Finished,
    /// The run was stopped after this step; a resume continues from there.
    Stopped(u32),
}

impl Follower {
    /// Waits for the configuration and the state of rank 0, which starts or resumes a run in this
    /// group, and reads its data. `gpu` gives the number of this rank's GPU on the backend of a
    /// name; without one, it is that of rank 0.
    ///
    /// # Errors
    /// Errors of the configuration and the data; [`Error::Setting`] if they, or the device, are
    /// others than those of rank 0; errors of the group.
    pub fn join(
        mut group: Box<dyn Group>,
        gpu: impl FnOnce(&str) -> Option<usize>,
    ) -> Result<Self> {
        let misfit = |what: String| TrainError::Peer(format!("rank 0 sent a bad set-up: {what}"));
        let setup = group.broadcast(&[])?;
        let setup: Setup =
            serde_json::from_slice(&setup).map_err(|error| misfit(error.to_string()))?;
        let document = setup.config.parse().map_err(|error| misfit(format!("{error}")))?;
        let mut config = Config::of_document(document, &[])?;
        config.backend.gpu = gpu(&config.backend.name).unwrap_or(config.backend.gpu);
        let tokenizer = || setup.tokenizer.ok_or_else(|| misfit("no tokenizer".to_owned()).into());
        let data = RunData::open(&config, tokenizer, setup.scan)?;
        let mut trainer = trainer_in(group, &config, setup.vocabulary)?;
        if trainer.backend().plans().get(PLANNED_ON) == setup.plans.get(PLANNED_ON) {
            trainer.use_plans(&setup.plans)?;
        }
        settle(&data, &mut trainer, setup.has_state)?;
        let ahead = data.read_ahead(&mut trainer);
        Ok(Self { config, data, ahead, trainer })
    }

    /// Follows the orders of rank 0 to the end of the run. The observer is only asked whether to
    /// stop, which all ranks then do after the step.
    ///
    /// # Errors
    /// The error that ended the run, on this rank or on rank 0; errors of the group.
    pub fn follow(mut self, observer: &mut dyn Observer) -> Result<Followed> {
        let mut stops = false;
        // Of a step that rank 0 may skip.
        let mut failure = None;
        loop {
            stops |= observer.asked() == Asked::Stop;
            let request = if stops { STOP } else { &[] };
            let order = self.trainer.group().all_gather(request)?.swap_remove(0);
            let order = serde_json::from_slice(&order)
                .map_err(|error| TrainError::Peer(format!("rank 0 sent a bad order: {error}")))?;
            match order {
                Order::Ask => {}
                Order::Step { samples_flips } => {
                    let sampling =
                        if samples_flips { FlipSampling::Sample } else { FlipSampling::Skip };
                    let batches = self.data.batches(self.trainer.recipe(), self.ahead.as_ref());
                    match self.trainer.train_step(&*batches, sampling) {
                        Ok(_) => {}
                        Err(error @ TrainError::NonFinite { .. }) => failure = Some(error),
                        Err(error) => return Err(error.into()),
                    }
                }
                Order::Skip => {
                    failure = None;
                    self.trainer.skip_step()?;
                }
                Order::Evaluate => {
                    let windows =
                        self.data.evaluation(self.trainer.recipe(), self.config.run.eval_tokens);
                    let size = evaluated_at_once(&self.config);
                    self.data.judge(&mut self.trainer, &*windows, size)?;
                }
                Order::Compare => compare_states(&mut self.trainer)?,
                Order::End(ending) => {
                    self.trainer.group().close();
                    return match ending {
                        Ending::Finished => Ok(Followed::Finished),
                        Ending::Stopped => Ok(Followed::Stopped(self.trainer.step())),
                        Ending::Failed { kind, problem } => {
                            Err(failure.map_or(Error::Rank0 { kind, problem }, Error::from))
                        }
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::run::open_data;
    use sparse24_train::group::Threads;

    /// A trainer per rank, of which these have a flipped bit in the first weight.
    fn compare(world: usize, flipped: &'static [usize]) -> Vec<String> {
        let settings = "steps=2 model.layers=1 model.d_model=8 model.heads=2 model.d_ff=16 \
            model.sequence_length=8 batch.size=2 batch.gradient_accumulation_steps=4 \
            batch.replicas=4";
        let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
        let config = Config::resolve(None, None, &settings).unwrap();
        let vocabulary = open_data(&config).unwrap().vocabulary() as usize;
        let rank = |group: Threads| {
            let config = config.clone();
            thread::spawn(move || {
                let is_flipped = flipped.contains(&group.rank());
                let mut trainer = trainer_in(Box::new(group), &config, vocabulary).unwrap();
                let mut states = trainer.parameter_states().unwrap();
                let weight = &mut states[0].weight[7];
                *weight = f32::from_bits(weight.to_bits() ^ u32::from(is_flipped));
                trainer.restore(0, &states).unwrap();
                let compared = compare_states(&mut trainer);
                compared.map_or_else(|error| error.to_string(), |()| String::new())
            })
        };
        let ranks: Vec<_> = Threads::group(world).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn a_flipped_bit_is_found_on_all_ranks() {
        assert_eq!(compare(2, &[]), ["", ""]);
        for (world, flipped, expected) in [
            (4, &[2][..], "differs on rank 2, "),
            (4, &[0], "differs on rank 0, "),
            (2, &[1], "differs on ranks 0, 1, "),
        ] {
            for message in compare(world, flipped) {
                assert!(message.starts_with("step 0: the weight of "), "{message}");
                assert!(message.contains(expected), "{message}");
            }
        }
    }
}
