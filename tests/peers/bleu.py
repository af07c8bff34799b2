"""Writes the scores that sacrebleu gives the pairs of `translation/bleu/tests.rs`, which makes
the same pairs, and prints the scores of all.

From the root of the repository, with `pip install sacrebleu` (written with 2.6.0):

    python tests/peers/bleu.py crates/sparse24-run/src/translation/bleu/scores.txt
"""

import sys
from pathlib import Path

from sacrebleu.metrics import BLEU

CHARACTERS = list(
    "    abcdeABC0123456789....,,,,----&&;;:!?'\"()[]{}<>/@#$%^*_`~|+=\\"
    "\u00e4\u00df\u20ac\u201e\u201c\u2013\u00a0\u2009\u3000\t\x1c\x85"
) + ["&amp;", "&quot;", "&lt;", "<skipped>", "-\n", "\n"]
LINES = Path("crates/sparse24-run/assets/corpus.txt").read_bytes().decode().split("\n")

state = 1


def below(n):
    global state
    state = (1664525 * state + 1013904223) % 2**32
    return (state >> 16) % n


def words():
    while True:
        line = LINES[below(len(LINES))]
        if line.strip(" "):
            return line.split(" ")


def edited(units, draw):
    """Some units dropped, replaced or doubled, each with the same probability."""
    found = []
    for unit in units:
        choice = below(10)
        found += [] if choice == 0 else [draw()] if choice == 1 else [unit] * (1 + (choice == 2))
    return found


def random_pair():
    character = lambda: CHARACTERS[below(len(CHARACTERS))]
    reference = [character() for _ in range(1 + below(60))]
    return "".join(edited(reference, character)), "".join(reference)


def real_pair():
    reference = words()
    return " ".join(edited(reference, lambda: words()[0])), " ".join(reference)


def score(pairs):
    found, reference = zip(*pairs)
    return BLEU().corpus_score(found, [reference]).score


halves = [[pair() for _ in range(500)] for pair in (random_pair, real_pair)]
print([score(half) for half in halves], score(sum(halves, [])))
scores = [f"{score([pair]):.4f}" for half in halves for pair in half]
rows = [" ".join(scores[at : at + 10]) for at in range(0, len(scores), 10)]
Path(sys.argv[1]).write_text("\n".join(rows) + "\n")
