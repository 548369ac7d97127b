"""``dp-grape convert`` makes a script private by its imports, and the script trains."""

import json
import re
import runpy
import sys

import pytest

from dp_grape_hf.cli.convert import converted
from dp_grape_hf.cli.main import main
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from tests.support.sft import WORDS, llama, tokenizer

SCRIPT = '''
"""Classifies sentences, as many a script does."""
from dataclasses import dataclass

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
    trainer = OwnTrainer(
        AutoModelForSequenceClassification.from_pretrained(data.model_name_or_path),
        args,
        train_dataset=texts["train"],
        eval_dataset=texts["validation"],
        processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
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
    "--disable_tqdm True --eps 8 --delta 1e-3 --accountant rdp"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "run_own.py").write_text(SCRIPT)
    (tmp_path / "own_trainer.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_script_trains_privately(folder, monkeypatch):
    llama().save_pretrained("model")
    tokenizer().save_pretrained("model")
    for split, count, words in (("train", 240, 4), ("validation", 12, 5)):
        texts = [" ".join(WORDS[i % 20 :][:words]) for i in range(count)]
        rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts)]
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))
    assert main(["convert", "run_own.py", "--write"]) == 0
    monkeypatch.setattr(sys, "argv", ["run_own.py", *OPTIONS.split()])
    monkeypatch.syspath_prepend(folder)
    runpy.run_path("run_own.py", run_name="__main__")
    ledger = Ledger.load(folder / "out" / LEDGER_NAME)
    assert ledger.mechanism.num_samples == 240
    assert ledger.private
    assert ledger.steps == 2
    metrics = json.loads((folder / "out" / "all_results.json").read_text())
    assert 0 <= metrics["eval_accuracy"] <= 1


def test_the_change_is_one_of_imports(folder, capsys):
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
def test_every_form_of_import_is_changed(before, after):
    assert converted(before) == (before if after is None else after)


BY_NAME = "imports none of Trainer.* by dp_grape_hf.DPGrapeTrainer"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        ("x = (", "line 1, has a"),
        ("import transformers\ntransformers.Trainer()\n", BY_NAME),
    ],
)
def test_a_script_that_cannot_be_converted_is_an_error(text, reason, tmp_path, capsys):
    if text is not None:
        (tmp_path / "run.py").write_text(text)
    assert main(["convert", str(tmp_path / "run.py")]) == 2
    assert re.search(reason, capsys.readouterr().err, re.DOTALL)
