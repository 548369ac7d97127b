"""Converts example scripts of transformers, and trains with each for a few private steps.

    python -m recipes.scripts --examples transformers/examples/pytorch --output runs/scripts.json

A folder of examples is that of a clone of transformers. Each script is run twice with the same tiny
model, made-up data and options: as it is, and converted (``convert``). It trains for four steps,
saves checkpoints and the model, evaluates and writes a card; ``dp-grape verify`` reads what was
saved. Takes two minutes a script.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import MISMATCH, verify
from recipes.common.provenance import git_commit, versions
from recipes.scripts.convert import converted, modules_of
from recipes.scripts.materials import (
    save_captions,
    save_images,
    save_in_cache,
    save_model,
    save_rows,
    save_sounds,
)
from recipes.scripts.provided import run_in
from recipes.scripts.rendering import FAILED, TRAINED, as_markdown

PROCESSES = multiprocessing.get_context("forkserver")  # whose children need not import anew
PROCESSES.set_forkserver_preload(["recipes.scripts.provided", "dp_grape_hf.trainer"])

COMMON = (
    "--output_dir out --do_train --do_eval --max_steps 4 --per_device_train_batch_size 8 "
    "--save_strategy steps --save_steps 2 --logging_steps 1 --report_to none --use_cpu"
)
PRIVATE = "--eps 8 --delta 1e-3 --expected_batch_size 32"
JSON = "--train_file train.json --validation_file validation.json"
CSV = "--train_file train.csv --validation_file validation.csv"


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


@dataclass(frozen=True)
class Case:
    """A script, and what it is run with."""

    script: str  # its folder and name
    model: str
    data: Callable[[Path], None]
    options: str
    private: str = ""  # options of ours
    note: str = ""
    edit: Callable[[str], str] = str  # of the script, after the conversion
    cached: bool = False  # whether the model is named as on the Hub

    def __str__(self) -> str:
        name = self.script.rpartition("/")[2]
        return f"{name}, {self.note}" if self.note else name


def _rows(kind: str, ending: str = "json") -> Callable[[Path], None]:
    return partial(save_rows, kind, ending=ending)


def _images(folder: Path) -> None:
    save_images(folder / "images")


def _sounds(folder: Path, transcribed: bool = False) -> None:
    save_sounds(folder / "sounds", transcribed)


_QUESTIONS = f"{JSON} --max_seq_length 32 --doc_stride 8"
_IMAGES = "--dataset_name images --image_column_name image --remove_unused_columns False"
_SOUNDS = "--dataset_name sounds --eval_split_name validation --remove_unused_columns False"
_TEXTS = "--max_source_length 16 --max_target_length 8 --predict_with_generate"

CASES = (
    Case("text-classification/run_glue", "bert", _rows("classified", "csv"), CSV),
    Case(
        "text-classification/run_glue",
        "bert",
        _rows("classified", "csv"),
        f"{CSV} --eval_strategy steps --eval_steps 2 --load_best_model_at_end",
        note="the best checkpoint",
    ),
    Case("text-classification/run_classification", "bert", _rows("classified", "csv"), CSV),
    Case("token-classification/run_ner", "bert", _rows("tagged"), JSON),
    Case("multiple-choice/run_swag", "bert", _rows("choices"), JSON),
    Case("question-answering/run_qa", "bert", _rows("questions"), _QUESTIONS),
    Case(
        "question-answering/run_qa",
        "bert",
        _rows("questions"),
        _QUESTIONS,
        private="--privacy_unit_column example_id",
        note="a question is a unit",
        edit=keep_ids,
    ),
    Case(
        "question-answering/run_seq2seq_qa",
        "t5",
        _rows("questions"),
        f"{JSON} --max_seq_length 32 --max_answer_length 8 --predict_with_generate",
    ),
    Case("language-modeling/run_clm", "llama", _rows("plain"), f"{JSON} --block_size 16"),
    Case("language-modeling/run_fim", "llama", _rows("plain"), f"{JSON} --block_size 16"),
    Case("language-modeling/run_mlm", "bert", _rows("plain"), f"{JSON} --max_seq_length 16"),
    Case(
        "language-modeling/run_mlm",
        "bert",
        _rows("plain"),
        f"{JSON} --max_seq_length 16 --line_by_line",
        note="line by line",
    ),
    Case("language-modeling/run_plm", "xlnet", _rows("plain"), f"{JSON} --max_seq_length 16"),
    Case("summarization/run_summarization", "t5", _rows("summarised"), f"{JSON} {_TEXTS}"),
    Case(
        "translation/run_translation",
        "t5",
        _rows("translated"),
        f"{JSON} {_TEXTS} --source_lang en --target_lang de",
    ),
    Case(
        "image-classification/run_image_classification",
        "vit",
        _images,
        "--train_dir images/train --validation_dir images/validation --remove_unused_columns False",
    ),
    Case("image-pretraining/run_mae", "mae", _images, _IMAGES),
    Case("image-pretraining/run_mim", "vit", _images, f"{_IMAGES} --mask_patch_size 4"),
    Case(
        "contrastive-image-text/run_clip",
        "clip",
        save_captions,
        f"{JSON} --max_seq_length 16 --remove_unused_columns False",
    ),
    Case("audio-classification/run_audio_classification", "wav2vec2", _sounds, _SOUNDS),
    Case(
        "audio-classification/run_audio_classification",
        "wav2vec2",
        _sounds,
        _SOUNDS,
        note="without shared coins",
        edit=without_shared_coins,
    ),
    Case(
        "speech-recognition/run_speech_recognition_ctc",
        "wav2vec2",
        partial(_sounds, transcribed=True),
        "--dataset_name sounds --train_split_name train --eval_split_name validation "
        "--text_column_name sentence --layerdrop 0 --mask_time_prob 0",
        private="--earlier_data other",
        cached=True,
    ),
)


# ---- One run ----


def run(case: Case, examples: Path, private: bool, keep: Path | None = None) -> dict[str, Any]:
    """Runs a case in a folder of its own, in another process.

    Args:
        case: what to run.
        examples: the folder of all scripts.
        private: whether it is converted first.
        keep: where to keep what it writes, in a folder of the script's name.

    Returns:
        What ``provided.run`` says; of a private run also the lines that the conversion takes out
        and puts in, and the epsilon and number of units in its ledger.
    """
    script = examples / f"{case.script}.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if keep is None else keep / f"{case}{', private' * private}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [0, 0]
        for path in modules_of(script):
            old = path.read_text(encoding="utf-8")
            new = case.edit(converted(old)) if private else old
            (folder / path.name).write_text(new, encoding="utf-8")
            marks = [line[0] for line in difflib.ndiff(old.splitlines(), new.splitlines())]
            lines = [lines[0] + marks.count("-"), lines[1] + marks.count("+")]
        model = "model"
        if case.cached:
            model = save_in_cache(case.model, Path(os.environ["HF_HOME"]))
        else:
            save_model(case.model, folder / model)
        case.data(folder)
        words = f"--model_name_or_path {model} {case.options} {COMMON}"
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
            record = {"commit": git_commit(), "versions": versions(), "scripts": found}
            if options.output is not None:
                text = json.dumps(record, indent=1) + "\n"
                options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(as_markdown(found))


if __name__ == "__main__":
    main()
