"""A script becomes private by its imports, trains, and says when its rows are not examples."""

import json
import textwrap
from pathlib import Path

import pytest

from dp_grape_hf.cli.convert import converted
from dp_grape_hf.cli.main import main
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from recipes.report.checks import FAILED, REFUSED, TRAINED, converted_scripts
from tests.scripts.__main__ import CASES, keep_ids, parse
from tests.scripts.materials import MODELS, save_model, save_rows
from tests.scripts.provided import run

SCRIPT = '''
"""Classifies sentences, as many a script does."""
import sys
from dataclasses import dataclass

import evaluate
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
)
from own_trainer import OwnTrainer


@dataclass
class Data:
    train_file: str
    validation_file: str
    model_name_or_path: str


def main():
    data, args = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
    files = {"train": data.train_file, "validation": data.validation_file}
    texts = load_dataset("json", data_files=files, cache_dir="cache")
    tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
    texts = texts.map(lambda rows: tokenizer(rows["sentence"]), batched=True)
    metric = evaluate.load("accuracy")
    trainer = OwnTrainer(
        AutoModelForSequenceClassification.from_pretrained(data.model_name_or_path),
        args,
        train_dataset=texts["train"],
        eval_dataset=texts["validation"],
        processing_class=tokenizer,
        compute_metrics=lambda found: metric.compute(
            predictions=np.argmax(found.predictions, axis=1), references=found.label_ids
        ),
    )
    trainer.save_metrics("train", trainer.train().metrics)
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.create_model_card(tasks="text-classification")


if __name__ == "__main__":
    main()
'''
BESIDE = '''
from transformers import Trainer, is_torch_xla_available


class OwnTrainer(Trainer):
    """Adds nothing."""
'''
OPTIONS = (
    "--train_file train.json --validation_file validation.json --model_name_or_path model "
    "--output_dir out --max_steps 2 --save_strategy no --report_to none --use_cpu "
    "--disable_tqdm True"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script of one's own with a module beside it, a model and data."""
    (tmp_path / "run_own.py").write_text(SCRIPT)
    (tmp_path / "own_trainer.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_script_trains_privately(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("bert", folder / "model")
    save_rows("classified", folder)
    assert main(["convert", str(folder / "run_own.py"), "--write"]) == 0
    found = run(
        Path("run_own.py"), [*OPTIONS.split(), *"--eps 8 --delta 1e-3 --accountant rdp".split()]
    )
    assert found == {"outcome": TRAINED, "reason": None, "warnings": [], "provided": ["metric"]}
    ledger = Ledger.load(folder / "out" / LEDGER_NAME)
    assert ledger.mechanism.num_samples == 240
    metrics = json.loads((folder / "out" / "all_results.json").read_text())
    assert 0 <= metrics["eval_accuracy"] <= 1


def test_what_a_run_says_is_told_apart(folder: Path) -> None:
    script = folder / "said.py"
    for text, outcome, reason in (
        ("import sys; assert sys.argv[1:] == ['a', 'b']", TRAINED, None),
        ("from dp_grape_hf import PrivacyError; raise PrivacyError('no')", REFUSED, "no"),
        ("raise KeyError('key')", FAILED, "KeyError: 'key'"),
        ("import sys; sys.exit(3)", FAILED, "SystemExit: 3"),
    ):
        script.write_text(text)
        found = run(script, ["a", "b"])
        assert (found["outcome"], found["reason"]) == (outcome, reason)


def test_the_change_is_one_of_imports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / "run_own.py")]) == 0
    shown = capsys.readouterr().out
    assert "No file was changed" in shown
    lines = shown.partition("\n\n")[0].splitlines()
    assert [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-    TrainingArguments,",
        "+from dp_grape_hf import DPGrapeTrainingArguments as TrainingArguments",
        "-from transformers import Trainer, is_torch_xla_available",
        "+from transformers import is_torch_xla_available",
        "+from dp_grape_hf import DPGrapeTrainer as Trainer",
    ]
    assert (folder / "run_own.py").read_text() == SCRIPT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from transformers import Trainer as T\n",
            "from dp_grape_hf import DPGrapeTrainer as T\n",
        ),
        (
            "if x:\n    from transformers.trainer import Trainer\n",
            "if x:\n    from dp_grape_hf import DPGrapeTrainer as Trainer\n",
        ),
        (
            "from transformers import (Trainer,\n  AutoModel as A)\nTrainer()\n",
            "from transformers import AutoModel as A\n"
            "from dp_grape_hf import DPGrapeTrainer as Trainer\nTrainer()\n",
        ),
        (
            "from trl import SFTConfig, SFTTrainer\n",
            "from dp_grape_hf import DPGrapeSFTConfig as SFTConfig, "
            "DPGrapeSFTTrainer as SFTTrainer\n",
        ),
        ("from trl import Trainer\nfrom transformers import set_seed\n", None),
        ("from . import Trainer\n", None),
    ],
)
def test_every_form_of_import_is_changed(before: str, after: str | None) -> None:
    assert converted(before) == (before if after is None else after)


def test_a_script_that_imports_no_trainer_by_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text("import transformers\ntransformers.Trainer()\n")
    assert main(["convert", str(tmp_path / "run.py")]) == 2
    said = capsys.readouterr().err
    assert "imports none of Trainer" in said
    assert "by dp_grape_hf.DPGrapeTrainer" in said


@pytest.mark.parametrize(("text", "reason"), [(None, "does not exist"), ("x = (", "line 1, has a")])
def test_a_script_that_cannot_be_read_is_an_error(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "run.py").write_text(text)
    assert main(["convert", str(tmp_path / "run.py")]) == 2
    assert reason in capsys.readouterr().err


def test_rows_keep_the_ids_of_what_they_are_cut_from() -> None:
    source = """\
    def prepare(examples):
        parts = tokenize(examples)
        origin = parts.pop("overflow_to_sample_mapping")
        return parts
    """
    names = {"tokenize": lambda examples: {"overflow_to_sample_mapping": [0, 0, 1]}}
    exec(keep_ids(textwrap.dedent(source)), names)
    assert names["prepare"]({"id": "ab"}) == {"example_id": ["a", "a", "b"]}  # type: ignore[operator]
    assert keep_ids("x = 1\n") == "x = 1\n"


def test_cases_name_what_there_is_and_are_told_apart() -> None:
    assert {case.model for case in CASES} == MODELS.keys()
    assert len({str(case) for case in CASES}) == len(CASES) >= 12
    assert parse(["--examples", "x", "--only", "run_glue"]).only == ["run_glue"]


def test_a_row_says_what_became_of_a_script() -> None:
    trained = {"outcome": TRAINED, "reason": None, "warnings": ["rows: and more"], "provided": []}
    spent = {"lines": [2, 1], "epsilon": 7.9912, "units": 240, "privacy_unit": "example"}
    refused = {"outcome": REFUSED, "reason": "The loss: it is.", "warnings": [], "lines": [1, 1]}
    table = converted_scripts(
        [
            {"script": "run_a", "as_it_is": trained, "private": trained | spent},
            {"script": "run_b", "as_it_is": trained, "private": refused | {"provided": ["metric"]}},
        ]
    )
    assert "| run_a | -2 +1 | trained | ε = 7.991 for 240 rows [1] |  |" in table
    assert "| run_b | -1 +1 | trained | refused [2] | metric |" in table
    assert "\n1. rows: and more\n2. The loss: it is." in table
