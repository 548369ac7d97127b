"""Makes a three-class task of sentence pairs from the paragraphs of SQuAD, in the columns of SNLI.

    python -m recipes.studies.pairs --squad data/squad --to data

writes a folder ``pairs_answers`` of ``<split>.jsonl`` files: a question, and the sentence that has
its answer (0), another sentence of the same paragraph (1), or a sentence of another article (2).
Each split is made from the same split of the data. The splits share no article.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

SPLITS = ("train", "validation", "test")
LONGEST = 20  # words of a sentence; those of less than 5 are left out
LONGEST_QUESTION = 14


def main() -> None:
    """Writes the task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--squad", type=Path, required=True, help="a folder of <split>.jsonl files")
    parser.add_argument("--to", type=Path, required=True, help="where the folder is made")
    options = parser.parse_args()
    folder = options.to / "pairs_answers"
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = (options.squad / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for line in lines if is_short(row := json.loads(line))]
        pairs = [*answers(rows, Random(0))]
        Random(1).shuffle(pairs)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))


def answers(rows: list[dict[str, Any]], random: Random) -> Iterator[dict[str, Any]]:
    """Yields pairs of a question and a sentence, a question in one pair, classes in turn."""
    for number, row in enumerate(rows):
        answer, own = row["answers"]["text"][0], sentences(row["context"])
        with_it = [sentence for sentence in own if answer in sentence]
        without = [sentence for sentence in own if answer not in sentence]
        far = sentences(elsewhere(rows, row, random)["context"])
        choices = (with_it, without, far)
        if len(with_it) == 1 and without and far:
            yield pair(row["question"], random.choice(choices[number % 3]), number % 3)


def is_short(row: dict[str, Any]) -> bool:
    """Whether the question of a row has few words, so that a pair is read fast."""
    return len(row["question"].split()) <= LONGEST_QUESTION


def sentences(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph that are neither very short nor very long."""
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph)
    return [part for part in parts if 5 <= len(part.split()) <= LONGEST]


def elsewhere(rows: list[dict[str, Any]], row: dict[str, Any], random: Random) -> dict[str, Any]:
    """Returns a row of another article."""
    while (other := random.choice(rows))["title"] == row["title"]:
        pass
    return other


def pair(premise: str, hypothesis: str, label: int) -> dict[str, Any]:
    """Returns an example."""
    return {"premise": premise, "hypothesis": hypothesis, "label": label}


if __name__ == "__main__":
    main()
