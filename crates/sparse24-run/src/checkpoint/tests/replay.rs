//! Power cuts: the operations of a rotation are written down, and every prefix of them is replayed
//! with what was not synced lost.
//!
//! The model is POSIX's: a file's bytes survive once the file is synced, an entry of a directory
//! once the directory is. What is not synced may survive or not, each on its own; half of a write
//! may. Every such state is made as real files, and must hold the old checkpoint or the new one.
//! Deliberately absent: file systems that reorder a rename before what it moves was synced, and
//! disks that lie.

use std::collections::HashSet;

use super::*;
use crate::disk::fault::{Record, trace};

/// Inodes by number; a directory holds entries, a file bytes.
#[derive(Clone)]
enum Node {
    Directory(BTreeMap<String, usize>),
    File(Vec<u8>),
}

/// A change of one inode.
#[derive(Clone)]
enum Change {
    /// The name is this inode's from now on, or nobody's.
    Entry(String, Option<usize>),
    Bytes(Vec<u8>),
}

/// One change that may be lost until its inode is synced. Changes of one group happen together.
struct Step {
    group: usize,
    inode: usize,
    change: Change,
    synced_after: usize,
}

/// The changes of all operations, and when each became durable.
struct Disk {
    root: PathBuf,
    nodes: Vec<Node>,
    steps: Vec<Step>,
    groups: usize,
}

impl Disk {
    /// An empty directory.
    fn new(root: &Path) -> Self {
        let nodes = vec![Node::Directory(BTreeMap::new())];
        Self { root: root.to_owned(), nodes, steps: Vec::new(), groups: 0 }
    }

    /// The inodes with all that was done to them.
    fn now(&self) -> Vec<Node> {
        self.after(|_| true)
    }

    fn after(&self, survives: impl Fn(&Step) -> bool) -> Vec<Node> {
        let mut nodes = self.nodes.clone();
        for step in self.steps.iter().filter(|step| survives(step)) {
            match (&mut nodes[step.inode], &step.change) {
                (Node::Directory(entries), Change::Entry(name, Some(inode))) => {
                    entries.insert(name.clone(), *inode);
                }
                (Node::Directory(entries), Change::Entry(name, None)) => {
                    entries.remove(name);
                }
                (Node::File(bytes), Change::Bytes(more)) => bytes.extend(more),
                _ => unreachable!("a file has bytes, a directory entries"),
            }
        }
        nodes
    }

    /// The inode of the directory that holds a path, and the name in it.
    fn find(&self, path: &Path) -> (usize, String) {
        let nodes = self.now();
        let below = path.strip_prefix(&self.root).unwrap();
        let mut names: Vec<String> =
            below.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
        let name = names.pop().expect("the directory itself has no entry here");
        let parent = names.iter().fold(0, |inode, name| match &nodes[inode] {
            Node::Directory(entries) => entries[name],
            Node::File(_) => panic!("{name} lies in a file"),
        });
        (parent, name)
    }

    fn inode(&self, path: &Path) -> usize {
        if path == self.root {
            return 0;
        }
        let (parent, name) = self.find(path);
        let Node::Directory(entries) = &self.now()[parent] else { unreachable!() };
        entries[&name]
    }

    fn change(&mut self, changes: impl IntoIterator<Item = (usize, Change)>) {
        let group = self.groups;
        self.groups += 1;
        self.steps.extend(changes.into_iter().map(|(inode, change)| Step {
            group,
            inode,
            change,
            synced_after: usize::MAX,
        }));
    }

    fn make(&mut self, path: &Path, node: Node) {
        let (parent, name) = self.find(path);
        self.nodes.push(node);
        self.change([(parent, Change::Entry(name, Some(self.nodes.len() - 1)))]);
    }

    fn apply(&mut self, record: &Record) {
        match record {
            Record::CreateDirectory(path) => self.make(path, Node::Directory(BTreeMap::new())),
            Record::Create(path) => self.make(path, Node::File(Vec::new())),
            Record::Write(path, bytes) => {
                let inode = self.inode(path);
                // Halves, so that one of them may survive alone.
                let (first, second) = bytes.split_at(bytes.len() / 2);
                for half in [first, second] {
                    self.change([(inode, Change::Bytes(half.to_vec()))]);
                }
            }
            Record::Sync(path) | Record::SyncDirectory(path) => {
                let (inode, groups) = (self.inode(path), self.groups);
                for step in self.steps.iter_mut().filter(|step| step.inode == inode) {
                    step.synced_after = step.synced_after.min(groups);
                }
            }
            Record::Rename(from, to) => {
                let (inode, source, target) = (self.inode(from), self.find(from), self.find(to));
                self.change([
                    (source.0, Change::Entry(source.1, None)),
                    (target.0, Change::Entry(target.1, Some(inode))),
                ]);
            }
            Record::RemoveFile(path) => {
                panic!("a rotation removes directories alone, not {}", path.display())
            }
            Record::RemoveDirectory(path) => {
                let (inode, (parent, name)) = (self.inode(path), self.find(path));
                let Node::Directory(entries) = self.now().swap_remove(inode) else {
                    panic!("{} is a file", path.display())
                };
                for child in entries.into_keys() {
                    self.change([(inode, Change::Entry(child, None))]);
                }
                self.change([(parent, Change::Entry(name, None))]);
            }
        }
    }
}

fn materialise(nodes: &[Node], inode: usize, at: &Path) {
    match &nodes[inode] {
        Node::File(bytes) => fs::write(at, bytes).unwrap(),
        Node::Directory(entries) => {
            fs::create_dir(at).unwrap();
            entries.iter().for_each(|(name, child)| materialise(nodes, *child, &at.join(name)));
        }
    }
}

/// Bytes that identify a tree.
fn digest(nodes: &[Node], inode: usize, into: &mut Vec<u8>) {
    match &nodes[inode] {
        Node::File(bytes) => into.extend_from_slice(blake3::hash(bytes).as_bytes()),
        Node::Directory(entries) => {
            for (name, child) in entries {
                into.extend_from_slice(format!("{name}(").as_bytes());
                digest(nodes, *child, into);
                into.push(b')');
            }
        }
    }
}

/// Replays a rotation from an old checkpoint to a new one, but for the records that `counts` leaves
/// out; gives how many different states a power cut could leave.
fn power_cuts((old, new): &(Checkpoint, Checkpoint), counts: fn(&Record) -> bool) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().join("checkpoints");
    fs::create_dir(&at).unwrap();
    let mut disk = Disk::new(&at);
    trace(|| drop(save(&at, old).unwrap())).iter().for_each(|record| disk.apply(record));
    disk.steps.iter_mut().for_each(|step| step.synced_after = 0);
    let records = trace(|| rotate(&at, new).unwrap());
    let (mut seen, mut numbers) = (HashSet::new(), Numbers(3));
    let state = directory.path().join("state");
    for record in records.iter().filter(|record| counts(record)) {
        disk.apply(record);
        let cut = disk.groups;
        let lost: Vec<usize> = disk
            .steps
            .iter()
            .filter(|step| step.synced_after > cut)
            .map(|step| step.group)
            .collect();
        let (first, last) =
            (lost.first().copied().unwrap_or(cut), lost.last().copied().unwrap_or(cut));
        // Nothing of it survives; all up to one; one alone; all but one; and whatever chance
        // leaves.
        let ordered = (first..=last + 1).map(|end| (first..end).collect());
        let alone = lost.iter().map(|&group| HashSet::from([group]));
        let without =
            lost.iter().map(|&gone| lost.iter().copied().filter(|&group| group != gone).collect());
        let random = (0..99)
            .map(|_| lost.iter().copied().filter(|_| numbers.below(2) == 0).collect())
            .collect::<Vec<HashSet<usize>>>();
        let choices: Vec<HashSet<usize>> =
            ordered.chain(alone).chain(without).chain(random).collect();
        for kept in choices {
            let nodes = disk.after(|step| step.synced_after <= cut || kept.contains(&step.group));
            let mut tree = Vec::new();
            digest(&nodes, 0, &mut tree);
            if !seen.insert(tree) {
                continue;
            }
            let _ = fs::remove_dir_all(&state);
            materialise(&nodes, 0, &state);
            recover(&state).unwrap();
            let found = latest(&state).unwrap();
            assert!(found.refused.is_empty(), "after {record:?}: {:?}", found.refused);
            let loaded =
                load(&found.checkpoint.unwrap_or_else(|| panic!("after {record:?}: none is left")))
                    .unwrap();
            assert!(loaded == *old || loaded == *new, "after {record:?}: a mixture");
        }
    }
    // Once the work is done and synced, only the new one is left to be found.
    assert_eq!(load(&latest(&at).unwrap().checkpoint.unwrap()).unwrap(), *new);
    println!("{} operations, {} states after a power cut", records.len(), seen.len());
    seen.len()
}

#[test]
fn a_power_cut_in_a_rotation_leaves_the_old_or_the_new() {
    for pair in &pairs() {
        let states = power_cuts(pair, |_| true);
        assert!(states > 250, "{states}");
    }
}

/// The model sees what a sync is for: without those of the files, or of the directories, something
/// half-written gets the name.
#[test]
#[should_panic(expected = "after ")]
fn without_syncs_of_files_a_power_cut_would_be_seen() {
    power_cuts(&pairs()[0], |record| !matches!(record, Record::Sync(_)));
}

#[test]
#[should_panic(expected = "after ")]
fn without_syncs_of_directories_a_power_cut_would_be_seen() {
    power_cuts(&pairs()[0], |record| !matches!(record, Record::SyncDirectory(_)));
}
