"""``dp-grape suggest``: print the hyperparameters that a run would choose."""

import argparse
import sys
import tempfile
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from dp_grape_hf.arguments import DPGrapeTrainingArguments
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory import auto_class, class_of, read_config
from dp_grape_hf.phases import progress
from dp_grape_hf.trainer import DPGrapeTrainer, Unseen

_GIVEN = ("target_epsilon", "target_delta", "num_train_epochs", "method", "learning_rate")
_SIZES = ("expected_batch_size", "max_steps")


def run(args: argparse.Namespace) -> str:
    """Return tables of the choices of a run."""
    logging.set_verbosity_error()  # no warning that the head is new
    model, tokenizer = _model(args)
    options = {name: getattr(args, name) for name in (*_GIVEN, *_SIZES)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPGrapeTrainingArguments(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **{name: value for name, value in options.items() if value is not None},
        )
        examples = Unseen(args.num_samples)
        trainer = DPGrapeTrainer(
            model, arguments, train_dataset=examples, processing_class=tokenizer
        )
        with progress("Choosing hyperparameters", shown=sys.stderr.isatty()):
            return trainer.suggestion()


def _model(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model with a head, and its tokenizer if it has one."""
    name = args.model
    config = read_config("model", name, args.num_labels)
    cls = class_of(config) if args.head is None else auto_class(args.head)
    try:
        model = cls.from_pretrained(name, config=config)
    except (OSError, ValueError) as error:
        raise PrivacyError(
            f"model={name!r} cannot be loaded: {error}. Pass the folder that a model was saved to, "
            "or its name on the Hub."
        ) from error
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except Exception:  # from the code of any tokenizer: the model has none that loads
        return model, None
