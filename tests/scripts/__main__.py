"""Convert example scripts of transformers, and train with each for a few private steps.

    python -m tests.scripts --examples transformers/examples/pytorch --output runs/scripts.json

A folder of examples is that of a clone of transformers. Each script is run twice with the same tiny
model, made-up data and options: unchanged, and converted (``dp-grape convert``). It trains for four
steps, saves checkpoints and the model, evaluates and writes a card; ``dp-grape verify`` reads what
was saved. Takes two minutes a script.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from dp_grape_hf.cli.convert import converted, modules_of
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import MISMATCH, verify
from recipes.common.provenance import origin, write
from recipes.report.checks import FAILED, TRAINED, converted_scripts
from tests.scripts.materials import ROWS, save_data, save_in_cache, save_model
from tests.scripts.provided import run_in

PROCESSES = multiprocessing.get_context("forkserver")  # whose children need not import anew
PROCESSES.set_forkserver_preload(["tests.scripts.provided", "dp_grape_hf.trainer"])

COMMON = (
    "--output_dir out --do_train --do_eval --max_steps 4 --per_device_train_batch_size 8 "
    "--save_strategy steps --save_steps 2 --logging_steps 1 --report_to none --use_cpu"
)
PRIVATE = "--eps 8 --delta 1e-3 --expected_batch_size 32"


def keep_ids(source: str) -> str:
    """Has each row keep the id of the example that it is cut from.

    After the first ``mapping = rows.pop("overflow_to_sample_mapping")``, in which ``rows`` and
    ``mapping`` are whatever they are called.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and "overflow_to_sample_mapping" in ast.unparse(node.value):
            assert isinstance(node.value, ast.Call)
            assert isinstance(node.value.func, ast.Attribute)
            rows, mapping = ast.unparse(node.value.func.value), ast.unparse(node.targets[0])
            line = f'{rows}["example_id"] = [examples["id"][i] for i in {mapping}]\n'
            lines = source.splitlines(keepends=True)
            lines.insert(node.lineno, " " * node.col_offset + line)
            return "".join(lines)
    return source


def without_shared_coins(source: str) -> str:
    """Turns layer drop and SpecAugment of a wav2vec 2.0 off, and freezes what only they train."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "model":
            lines = source.splitlines(keepends=True)
            assert node.end_lineno is not None
            for line in (
                "model.wav2vec2.masked_spec_embed.requires_grad_(False)",
                "model.config.layerdrop, model.config.apply_spec_augment = 0.0, False",
            ):
                lines.insert(node.end_lineno, f"{' ' * node.col_offset}{line}\n")
            return "".join(lines)
    return source


EDITS: Mapping[str, Callable[[str], str]] = {
    "": str,
    "keep_ids": keep_ids,
    "without_shared_coins": without_shared_coins,
}


@dataclass(frozen=True)
class Case:
    """A script, and what it is run with: a row of ``cases.yaml``."""

    script: str  # its folder and name
    model: str
    data: str
    csv: bool = False  # whether rows are in CSV
    options: str = ""
    private: str = ""  # options of ours
    note: str = ""
    edit: str = ""  # of the script, after the conversion
    cached: bool = False  # whether the model is named as on the Hub

    def __str__(self) -> str:
        name = self.script.rpartition("/")[2]
        return f"{name}, {self.note}" if self.note else name

    def words(self) -> str:
        """Returns its own options."""
        if self.data not in (*ROWS, "captions"):
            return self.options
        ending = "csv" if self.csv else "json"
        files = f"--train_file train.{ending} --validation_file validation.{ending}"
        return f"{files} {self.options}"


_TABLE = Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8")
CASES = tuple(Case(**row) for row in yaml.safe_load(_TABLE))


# ---- One run ----


def run(case: Case, examples: Path, private: bool, keep: Path | None = None) -> dict[str, Any]:
    """Runs a case in a folder of its own, in another process.

    Returns:
        What ``provided.run`` says; of a private run, which is converted first, also the lines that
        this takes out and puts in, and the epsilon and number of units in its ledger.
    """
    script = examples / f"{case.script}.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if keep is None else keep / f"{case}{', private' * private}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [0, 0]
        for path in modules_of(script):
            old = path.read_text(encoding="utf-8")
            new = EDITS[case.edit](converted(old)) if private else old
            (folder / path.name).write_text(new, encoding="utf-8")
            marks = [line[0] for line in difflib.ndiff(old.splitlines(), new.splitlines())]
            lines = [lines[0] + marks.count("-"), lines[1] + marks.count("+")]
        model = "model"
        if case.cached:
            model = save_in_cache(case.model, Path(os.environ["HF_HOME"]))
        else:
            save_model(case.model, folder / model)
        save_data(case.data, folder, case.csv)
        words = f"--model_name_or_path {model} {case.words()} {COMMON}"
        words += f" {PRIVATE} {case.private}" if private else ""
        result = _in_another_process(folder, script.name, words.split())
        if private:
            result |= {"lines": lines}
            if result["outcome"] == TRAINED:
                result |= _spent(folder / "out")
    return result


def _in_another_process(folder: Path, script: str, words: Sequence[str]) -> dict[str, Any]:
    process = PROCESSES.Process(target=run_in, args=(folder, script, words))
    process.start()
    process.join()
    if process.exitcode:
        return {"outcome": FAILED, "reason": f"exit status {process.exitcode}", "warnings": []}
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _spent(out: Path) -> dict[str, Any]:
    """Returns what a ledger says of a run, if ledger, card and weights agree."""
    wrong = [check.what for check in verify(out) if check.status == MISMATCH]
    if wrong:
        return {"outcome": FAILED, "reason": f"dp-grape verify: {', '.join(wrong)}"}
    ledger = Ledger.read(out / LEDGER_NAME)
    mechanism = ledger.mechanism
    return {
        "epsilon": ledger.known_epsilon(),
        "units": mechanism.num_samples,
        "privacy_unit": mechanism.privacy_unit,
        "steps": ledger.steps,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=Path, required=True, help="The folder of all scripts.")
    parser.add_argument("--only", nargs="+", default=[], help="Names of scripts, run_glue say.")
    parser.add_argument("--output", type=Path, help="Also write the results, to this JSON file.")
    parser.add_argument("--keep", type=Path, help="Keep models, data and logs in this folder.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the cases and renders their table."""
    options = parse(argv)
    cases = [c for c in CASES if not options.only or c.script.rpartition("/")[2] in options.only]
    keep = options.keep and options.keep.resolve()
    found = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": cache}  # of the processes
        for case in tqdm(cases, unit="script"):
            before, after = (
                run(case, options.examples.resolve(), private, keep) for private in (False, True)
            )
            text = (options.examples / f"{case.script}.py").read_bytes()
            entry = {"script": str(case), "sha256": hashlib.sha256(text).hexdigest()}
            found.append({**entry, "as_it_is": before, "private": after})
            if options.output is not None:
                write(options.output, {**origin(), "scripts": found})
    sys.stdout.write(converted_scripts(found))


if __name__ == "__main__":
    main()
