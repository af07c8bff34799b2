//! `sparse24 glue`: fine-tunes a model on several tasks with several seeds.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::Serialize;
use sparse24_lab::{
    runs::{self as lab, Keep, check_needs},
    search::check_seeds,
    statistics::{deviation, mean},
};
use sparse24_run::{
    Error, checkpoint,
    config::{Config, unknown},
    data::Tokenizer,
    disk,
    run::{Given, Needs, Provenance, Resume, Run, Scores, fingerprint, run_config},
    task::{TASKS, Task, find},
};
use sparse24_train::group::Solo;

use crate::{
    configure::Configure,
    failure::{Exit, Failure, Result},
    finetune::{Pretrained, configured, note_examples, open},
    output::{print_json, say},
    ranks::check_alone,
    runs,
    signals::Signals,
    threads::on_threads,
    train::finish,
};

/// Fine-tune a model on several tasks with several seeds, and print their scores
///
/// The same command continues after an interruption. The row `average` is the plain mean of the
/// scores above it. Unless set, the model and the preset are those of --init-from, the method is
/// dense, and the optimizer AdamW without weight decay; the learning rate falls by a cosine to 0
/// after a tenth of the steps. Learning rate, batch size and dropout are 4e-5, 16 and 0.1 for a
/// BERT, 5e-5, 32 and 0.1 for a BERT on squad, and 5e-6, 32 and 0 for a GPT-2.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Pre-trained model: a run, a checkpoint or a Hugging Face folder
    #[arg(long, value_name = "PATH")]
    init_from: PathBuf,
    /// Folder of the runs, DIR/TASK/seed-N
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Tasks, separated by commas [default: the GLUE tasks that have a folder in --data]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    tasks: Vec<String>,
    /// Seeds, separated by commas
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// Passes over the training examples [default: 5 for a BERT, 3 for a GPT-2 and for squad]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with = "steps")]
    epochs: Option<u32>,
    /// Settings of every run; --data names a folder with a subfolder per task, named after it
    #[command(flatten)]
    configure: Configure,
    /// Print the scores as one JSON object
    #[arg(long)]
    json: bool,
}

/// The scores of a task, by name and in the order of the seeds; none where one is undefined.
type ByScore = BTreeMap<String, Vec<Option<f64>>>;

#[derive(Serialize)]
struct Table {
    seeds: Vec<u64>,
    tasks: BTreeMap<String, ByScore>,
    /// The mean of all scores of a seed, if all are defined.
    averages: Vec<Option<f64>>,
}

pub(crate) fn run(args: &Args) -> Result {
    check_alone("glue")?;
    let Some(data) = args.configure.data() else {
        let problem = "--data: name a folder with a folder for each task";
        return Err(Failure::new(Exit::Usage, problem));
    };
    if args.configure.has_seed() {
        let problem = "--seed: each run has one of --seeds; name them there";
        return Err(Failure::new(Exit::Usage, problem));
    }
    check_seeds(&args.seeds, 1)?;
    // Like the folder of a study, it may come from others.
    let _confined = args.out.is_dir().then(|| disk::confine(&args.out)).transpose()?;
    let tasks = chosen(data, &args.tasks)?;
    let pretrained = Pretrained::read(&args.init_from)?;
    let weights = fingerprint(pretrained.weights());
    // Everything is read before anything is trained.
    let (mut members, mut needs) = (Vec::new(), Vec::new());
    for (task, folder) in &tasks {
        for &seed in &args.seeds {
            let configure = args.configure.with(folder.clone(), seed);
            let (config, _) = configured(&configure, task.name, args.epochs, &pretrained)?;
            let path = args.out.join(task.name).join(format!("seed-{seed}"));
            if is_run(&path)
                && let Some(difference) = difference(&path, &config, &weights, &pretrained)?
            {
                let problem = format!("{}: was fine-tuned {difference}", path.display());
                return Err(Failure::new(Exit::Input, problem));
            }
            let checkpoints = path.join("checkpoints");
            if checkpoint::named(&checkpoints, config.steps)?.is_none() {
                let there = checkpoint::count(&checkpoints)? as u64;
                let tokenizer = &pretrained.tokenizer;
                let rows = config.model.vocabulary(tokenizer.vocabulary(), Some(tokenizer));
                needs.push((Needs::of(&config, &config.recipe(rows)?, config.steps)?, there));
            }
            members.push((*task, path, config));
        }
    }
    check_needs(&args.out, &needs, 1, Keep::Checkpoints, None)?;
    let signals = Signals::take()?;
    let mut table =
        Table { seeds: args.seeds.clone(), tasks: BTreeMap::new(), averages: Vec::new() };
    for (task, path, config) in members {
        let signals = signals.another()?;
        let scores = trained(&path, config, &pretrained, signals);
        let scores = scores.map_err(|failure| match failure.exit() {
            exit @ (Exit::Interrupted | Exit::Terminated | Exit::HungUp) => {
                Failure::new(exit, format!("interrupted; continue with: {}", runs::again(&[])))
            }
            _ => failure,
        })?;
        let of_task = table.tasks.entry(task.name.to_owned()).or_default();
        for score in task.scores {
            let name = score.name();
            of_task.entry(name.to_owned()).or_default().push(scores.get(name).copied());
        }
    }
    table.averages = (0..table.seeds.len())
        .map(|at| {
            let scores = table.tasks.values().flat_map(BTreeMap::values);
            mean(&scores.map(|of| of[at]).collect::<Option<Vec<_>>>()?)
        })
        .collect();
    if args.json { print_json(&table) } else { print(&table) }
}

/// The tasks with their folders, whose names may be spelled as GLUE does.
fn chosen(data: &Path, names: &[String]) -> Result<Vec<(&'static Task, PathBuf)>> {
    let plain = |name: &str| name.to_lowercase().replace(['-', '_'], "");
    let refuse = |problem: String| Failure::new(Exit::Input, problem);
    let entries = fs::read_dir(data).map_err(|e| refuse(format!("{}: {e}", data.display())))?;
    let mut folders = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("list", data, e))?.path();
        let name = plain(&path.file_name().unwrap_or_default().to_string_lossy());
        if TASKS.iter().any(|task| plain(task.name) == name) && disk::is_folder(&path)? {
            folders.insert(name, path);
        }
    }
    let is_glue = |task: &&&Task| task.source.starts_with("GLUE");
    let asked: Vec<&'static Task> = match names {
        [] => TASKS
            .iter()
            .filter(|task| is_glue(&task) && folders.contains_key(&plain(task.name)))
            .collect(),
        names => names
            .iter()
            .enumerate()
            .map(|(at, name)| {
                if names[..at].contains(name) {
                    return Err(Error::setting("--tasks", format!("{name} is listed twice")));
                }
                let known = TASKS.iter().map(|task| task.name);
                find(name).ok_or_else(|| unknown("--tasks", name, known))
            })
            .collect::<Result<_, _>>()?,
    };
    if asked.is_empty() {
        let problem = format!("{}: has no folder named after a task", data.display());
        return Err(refuse(problem));
    }
    let folder = |task: &'static Task| {
        let folder = folders.get(&plain(task.name)).cloned();
        let missing = || refuse(format!("{}: has no folder {}", data.display(), task.name));
        folder.map(|folder| (task, folder)).ok_or_else(missing)
    };
    asked.into_iter().map(folder).collect()
}

fn is_run(path: &Path) -> bool {
    path.join("config.toml").is_file()
}

/// The first difference of a run from a fine-tuning of these weights, and what to do.
fn difference(
    run: &Path,
    config: &Config,
    weights: &str,
    pretrained: &Pretrained,
) -> Result<Option<String>> {
    let found = run_config(run)?;
    let other = |what: &str| Ok(Some(format!("{what}; remove it or name another --out")));
    if let Some((key, values)) = lab::difference(&found.decisive(), &config.decisive()) {
        let [found, wanted] = values.map(|value| value.unwrap_or("its default"));
        return other(&format!("with {key} = {found}, expected {wanted}"));
    }
    let _confined = disk::confine(run)?;
    let starts = Provenance::readable(&run.join("provenance.json"))?;
    if starts.first().and_then(|start| start.weights.as_deref()) != Some(weights) {
        return other("from other weights, by its provenance.json");
    }
    let own = Tokenizer::load(&run.join("tokenizer.json"));
    if own.is_ok_and(|own| own != pretrained.tokenizer) {
        return other("with another tokenizer");
    }
    if !disk::is_same_place(&found.run.flip_reference, &config.run.flip_reference) {
        return other("with another run.flip_reference");
    }
    Ok((!disk::is_same_place(&found.data.path, &config.data.path)).then(|| {
        format!(
            "on {}; remove it or name another --out, or, if the data were moved, change data.path \
             in its config.toml",
            found.data.path
        )
    }))
}

/// The scores of a run that is new, interrupted or finished.
fn trained(
    path: &Path,
    config: Config,
    pretrained: &Pretrained,
    signals: Signals,
) -> Result<Scores> {
    on_threads(config.backend.threads, || {
        let run = if is_run(path) {
            let check = |found: &Config| lab::check_same(path, found, &config);
            Run::resume_in(Box::new(Solo), path, &Resume::of_member(), check)?
        } else {
            let examples = open(&config, &pretrained.tokenizer)?;
            note_examples(&config, &examples);
            let given = Given { weights: Some(pretrained.weights()), ..Given::default() };
            Run::start(config, examples, given, path)?
        };
        Ok(finish(run, false, signals)?.0.scores)
    })
}

fn print(table: &Table) -> Result {
    let heads: String =
        table.seeds.iter().map(|seed| format!(" {:>9}", format!("seed {seed}"))).collect();
    say!("{:14} {:11}{heads} {:>9} {:>9}", "task", "score", "mean", "sd");
    let row = |task: &str, name: &str, scores: &[Option<f64>]| {
        let or_none = |value: Option<f64>| value.map_or("-".to_owned(), |x| format!("{x:.4}"));
        let cells = scores.iter().map(|&score| format!(" {:>9}", or_none(score)));
        let cells: String = cells.collect();
        let all: Option<Vec<f64>> = scores.iter().copied().collect();
        let (mean, sd) =
            (or_none(all.as_deref().and_then(mean)), or_none(all.as_deref().and_then(deviation)));
        say!("{task:14} {name:11}{cells} {mean:>9} {sd:>9}");
        Ok::<_, Failure>(())
    };
    for (task, by_score) in &table.tasks {
        by_score.iter().try_for_each(|(name, scores)| row(task, name, scores))?;
    }
    row("average", "", &table.averages)
}
