"""Run the tests that transformers has of its Trainer, with ours in the Trainer's place.

    python -m tests.host --transformers DIR

runs ``tests/trainer`` of a checkout of transformers twice: with the Trainer as it is, and with a
``DPGrapeTrainer`` that neither clips nor adds noise (``method="dp_adam"``) and may log as the
Trainer does. What becomes of the tests that pass the first time goes to ``host_tests.json``. Use a
checkout of the installed version. Needs pytest and parameterized, and an hour of one CPU core.

This module is also the plugin of pytest that puts ours in place and writes the outcomes down.
"""

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf import (
    DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer,
    DPGrapeTrainingArguments,
    PrivacyError,
)
from dp_grape_hf.gradients import loss_for
from recipes.common.provenance import origin, write
from recipes.report.checks import host_tests

OUTCOMES, PRIVATE = "DP_GRAPE_HOST_OUTCOMES", "DP_GRAPE_HOST_PRIVATE"  # environment variables
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class _Defaults:
    """No clipping, no noise, and logs of what the Trainer logs."""

    method: str = "dp_adam"
    noise_multiplier: float | None = 0.0
    max_grad_norm: float = math.inf
    eval_data_is_public: bool = True


@dataclass(repr=False)
class HostTrainingArguments(_Defaults, DPGrapeTrainingArguments):
    """What tests take for ``TrainingArguments``."""


@dataclass(repr=False)
class HostSeq2SeqTrainingArguments(_Defaults, DPGrapeSeq2SeqTrainingArguments):
    """What tests take for ``Seq2SeqTrainingArguments``."""


def _trainer(cls, arguments):
    class Substitute(cls):
        """Takes what the original takes, and knows the loss of the tests' own models."""

        def __init__(self, model=None, args=None, *rest, **given):
            args = arguments("tmp_trainer") if args is None else args
            own = not type(self).compute_loss.__module__.startswith("transformers.")
            unknown = not own and given.get("compute_loss_func") is None
            if unknown and not _is_known(model, given.get("model_init")):
                given["compute_loss_func"] = own_loss
            super().__init__(model, args, *rest, **given)
            if given.get("compute_loss_func") is own_loss:
                self.compute_loss_func = (
                    None  # which is for evaluation, where models have their own
                )

    return Substitute


def _is_known(model, model_init):
    try:
        model = model_init() if model is None else model
        return not isinstance(model, nn.Module) or bool(loss_for(model))
    except PrivacyError:
        return False
    except Exception:  # of a test that is about it
        return True


def own_loss(outputs, labels):
    """The loss (B,) of a classifier, or of a regression."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = next(value for value in values if isinstance(value, Tensor))
    if found.dim() == 2 and not labels.is_floating_point():
        return functional.cross_entropy(found, labels, reduction="none")
    return (found - labels).square().reshape(len(labels), -1).mean(1)


def _substitute():
    package = importlib.import_module("transformers")  # which takes its own place when imported
    ours = (
        ("Train", DPGrapeTrainer, HostTrainingArguments),
        ("Seq2SeqTrain", DPGrapeSeq2SeqTrainer, HostSeq2SeqTrainingArguments),
    )
    for name, trainer, arguments in ours:
        setattr(package, f"{name}er", _trainer(trainer, arguments))
        setattr(package, f"{name}ingArguments", arguments)


def pytest_configure(config):
    """Puts ours in place, before the tests import anything."""
    if os.environ.get(PRIVATE):
        _substitute()


def pytest_runtest_makereport(item, call):
    """Writes down how each part of a test ended, and which of our refusals it met."""
    if OUTCOMES not in os.environ:
        return
    outcome, reason = PASSED, ""
    if call.excinfo is not None:
        skipped = call.excinfo.typename in ("Skipped", "SkipTest")
        outcome = SKIPPED if skipped else FAILED
        causes = [*_causes(call.excinfo.value)]
        refusals = [cause for cause in causes if isinstance(cause, PrivacyError)]
        reason = f"{type(causes[0]).__name__}: {causes[0]}"
        if refusals:
            reason = f"{_REFUSAL}{refusals[0]}"
    line = {"test": item.nodeid, "when": call.when, "outcome": outcome, "reason": reason}
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def run(checkout, private, output, words):
    """Runs the tests of a checkout; returns test -> its outcome and the reason.

    Args:
        checkout: of transformers.
        private: whether with ours in the place of its Trainer.
        output: where outcomes are written down, a line for each part of a test.
        words: for pytest: files, or options.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("", encoding="utf-8")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        OUTCOMES: str(output.resolve()),
        PRIVATE: "1" if private else "",
        "PYTEST_ADDOPTS": "-p tests.host.__main__",  # also of tests in a process of their own
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    ignored = [f"--ignore-glob=*{part}*" for part in ("distributed", "fsdp", "tpu", "collator")]
    command = [sys.executable, "-m", "pytest", *options, *ignored, *words]
    subprocess.run(command, cwd=checkout, env=environment, check=False)
    return read(output)


def read(output):
    """Reads test -> its outcome and the reason, from the lines of one run."""
    found = {}
    for text in output.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        before = found.get(line["test"])
        if before is None or before["outcome"] == PASSED:  # else the part that ended it stays
            found[line["test"]] = {"outcome": line["outcome"], "reason": line["reason"]}
    return found


def compare(plain, private):
    """Returns how the tests ended with the plain Trainer, and what became of those that passed."""
    passing = [test for test, found in plain.items() if found["outcome"] == PASSED]
    others = {test: private.get(test, _MISSING) for test in passing}
    return {
        "plain": Counter(found["outcome"] for found in plain.values()),
        "private": Counter(found["outcome"] for found in others.values()),
        "tests": {
            test.rpartition("::")[2]: _explained(test, found["reason"])
            for test, found in others.items()
            if found["outcome"] != PASSED
        },
    }


_MISSING = {"outcome": FAILED, "reason": "was not run"}


def _explained(test, reason):
    """Returns why a test does not pass, with our words if they refused it, and no others."""
    if reason.startswith(_REFUSAL):
        text = re.sub(
            r"/\S*/", "", reason.removeprefix(_REFUSAL)
        )  # without folders of this machine
        return {"why": REFUSED, "refusal": text}
    name = test.rpartition("::test_")[2]
    return {"why": next((why for why, names in EXPLAINED.items() if name in names), UNEXPLAINED)}


_REFUSAL = "refused: "
REFUSED, UNEXPLAINED = "are refused, with the reason and what to do", "not explained"
EXPLAINED = {
    "expect the same batches again, where each step draws its own": (
        *("gradient_accumulation", "model_init", "reproducible_training", "training_loss"),
        *("trainer_with_datasets", "can_resume_training", "resume_training_with_checkpoint"),
        *("resume_training_with_frozen_params", "resume_training_with_gradient_accumulation"),
        "resume_training_with_shard_checkpoint",
    ),
    "list the callbacks, or count the files of a folder": (
        *("custom_callback_added_at_init", "default_callbacks_are_present"),
        "printer_callback_when_tqdm_disabled",
        "save_best_checkpoint",
    ),
    "ask the training loader for what accelerate adds to its own": ("train_and_eval_dataloaders",),
    "expect another error than the refusal that comes first": (
        "accelerator_config_from_dict_grad_accum_num_steps",
    ),
    "have a model for batches of one example": ("gradient_checkpointing",),
}
"""Why a test fails with ours that is refused nothing -> its names, without ``test_``."""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--transformers", type=Path, required=True, help="a checkout of transformers")
    add("--output_dir", type=Path, default=Path("recipes/models/results"))
    add("--tests", nargs="+", default=["tests/trainer"], help="below the checkout")
    options = parser.parse_args(argv)
    both = [
        run(options.transformers, private, options.output_dir / f"{name}.jsonl", options.tests)
        for name, private in (("host_plain", False), ("host_private", True))
    ]
    record = {**origin(), "checkout": _version(options.transformers), **compare(*both)}
    write(options.output_dir / "host_tests.json", record)
    sys.stdout.write(host_tests(record))
    return record


def _version(checkout):
    path = checkout / "src/transformers/__init__.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


if __name__ == "__main__":
    main()
