//! `sparse24 paper`: the tables and figures of the paper, with the commands that make them.

use std::path::PathBuf;

use sparse24_lab::paper;

use crate::{
    failure::Result,
    output::{self, say},
};

/// List the paper's tables and figures, with the command that makes each, and its numbers and ours
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print these in full, e.g. `table3 figure7`, instead of the list
    #[arg(value_name = "NAME", value_parser = known)]
    names: Vec<String>,
    /// Write the page with all of them, in Markdown
    #[arg(long, value_name = "FILE", conflicts_with = "names")]
    write: Option<PathBuf>,
}

/// Returns the name if it is that of a table or a figure.
fn known(name: &str) -> Result<String, String> {
    let is_known = paper::experiments().iter().any(|experiment| experiment.name == name);
    is_known.then(|| name.to_owned()).ok_or_else(|| {
        "no table or figure of this name; `sparse24 paper` lists the known ones".to_owned()
    })
}

pub(crate) fn run(args: &Args) -> Result {
    if let Some(out) = &args.write {
        paper::write(out)?;
        say!("{}", out.display());
        return Ok(());
    }
    let all = paper::experiments();
    for experiment in all.iter().filter(|experiment| args.names.contains(&experiment.name)) {
        output::write(format_args!("{}\n", experiment.section()))?;
    }
    if args.names.is_empty() {
        for experiment in &all {
            say!("{:<9} {}", experiment.name, experiment.title);
            say!("{:9} {}", "", experiment.status());
            say!("");
        }
        say!("For the commands and the numbers: `sparse24 paper NAME`.");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;
    use sparse24_run::config::preset::PRESETS;
    use sparse24_train::method;

    use crate::Cli;

    use super::*;

    /// The words of a command whose only quotes are single ones.
    fn words(command: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        let mut is_quoted = false;
        for c in command.replace("\\\n", " ").chars() {
            match c {
                '\'' => is_quoted = !is_quoted,
                ' ' if !is_quoted => words.push(String::new()),
                c => words.last_mut().expect("one word").push(c),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn every_command_of_the_page_parses() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut parsed = 0;
        for paper::Experiment { name, commands, results, .. } in paper::experiments() {
            let runs = results.into_iter().filter_map(|result| result.run);
            for command in runs.flat_map(|run| run.commands).chain(commands) {
                let words = words(&command);
                if words[..2] == ["cargo", "bench"] {
                    continue;
                }
                if let Err(error) = Cli::try_parse_from(&words) {
                    panic!("{name}: {command}: {error}");
                }
                parsed += 1;
                if words[1] == "study" {
                    assert!(root.join(&words[2]).is_file(), "{name}: {command}");
                }
                for pair in words.windows(2) {
                    let is_known = match pair[0].as_str() {
                        "--preset" | "--step" => PRESETS.iter().any(|of| of.name == pair[1]),
                        "--method" => method::PRESETS.iter().any(|of| of.name == pair[1]),
                        _ => true,
                    };
                    assert!(is_known, "{name}: {command}: {} {}", pair[0], pair[1]);
                }
            }
        }
        assert!(parsed > 30, "{parsed} commands");
    }
}
