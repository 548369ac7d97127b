"""Record settings, versions and the commit of a result; add an adapter to a model."""

import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import HfArgumentParser
from transformers.trainer_utils import SchedulerType

from dp_grape_hf import DPGrapeTrainingArguments, PrivacySpent
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.projections import Batches
from dp_grape_hf.trainer import principal_adapter
from recipes.paper.methods import METHODS, OPTIONS, PaperArguments

NOISE = ("target_epsilon", "noise_multiplier")
"""Options of which exactly one says how much noise there is."""


def recorded(args: DPGrapeTrainingArguments) -> dict[str, Any]:
    """Return all options of this package, and options of the Trainer that affect a result."""
    names = (
        *("max_steps", "num_train_epochs", "weight_decay", "adam_beta1"),
        *("adam_beta2", "adam_epsilon", "warmup_steps", "per_device_train_batch_size"),
        *("world_size", "seed", "bf16", "gradient_checkpointing", "optim_target_modules"),
    )
    options = [f.name for f in fields(DPGrapeArguments)]
    if isinstance(args, PaperArguments):
        options += OPTIONS
    scheduler = {"lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value}
    return {name: getattr(args, name) for name in (*options, *names)} | scheduler


def spent_as_json(spent: PrivacySpent) -> dict[str, Any]:
    """Return the privacy spent by a run, and the main parameters of its mechanism."""
    parameters = (
        *("noise_multiplier", "sample_rate", "expected_batch_size", "max_grad_norm"),
        *("adjacency", "privacy_unit", "chosen"),
    )
    return {
        **{name: getattr(spent, name) for name in ("epsilon", "delta", "steps")},
        **{name: getattr(spent.mechanism, name) for name in parameters},
        "private": spent.private,
    }


def set_defaults(parser: Any, defaults: dict[str, Any], path: Path | str, given: Any) -> None:
    """Make options of a file defaults of a parser, less those that the command line contradicts.

    Raises:
        ValueError: for a name that is not an option of the parser.
    """
    if unknown := sorted(defaults.keys() - {action.dest for action in parser._actions}):
        raise ValueError(f"{path} sets {unknown}, which are no options of this recipe.")
    row = METHODS.get(given.method)
    wrong = {"target_epsilon", "max_grad_norm"} if row is not None and not row.private else set()
    for name, other in (NOISE, NOISE[::-1]):
        if getattr(given, name) is not None:
            wrong.add(other)
    defaults = {name: value for name, value in defaults.items() if name not in wrong}
    for action in parser._actions:
        action.required &= action.dest not in defaults
    parser.set_defaults(**defaults)


def parsed(argv: Sequence[str] | None, config: Path | None, *classes: Any) -> Any:
    """Return dataclasses of arguments: the command line over ``--config`` over their defaults.

    Args:
        argv: the command line.
        config: the YAML file of defaults, if ``--config`` names none.
        classes: the dataclasses, the last of which has the arguments of the trainer.
    """
    parser = HfArgumentParser(classes)
    help_text = "YAML file with defaults of options."
    parser.add_argument("--config", default=config and str(config), help=help_text)
    given = parser.parse_known_args(argv)[0]
    if given.config is not None:
        defaults = yaml.safe_load(Path(given.config).read_text(encoding="utf-8"))
        set_defaults(parser, defaults, given.config, given)
    return parser.parse_args_into_dataclasses(argv)[: len(classes)]


def origin() -> dict[str, Any]:
    """Return the date, the device, the software versions and the commit of a result."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "git_commit": git_commit(),
    }


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the installed software."""
    packages = ("torch", "transformers", "accelerate", "scikit-learn", "prv-accountant", *more)
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def write(path: Path, record: Any) -> None:
    """Write a result as JSON, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


ADAPTED = {"opt": ["q_proj", "v_proj"], "roberta": ["query", "value"]}
"""Model type -> layers that MeZO's code adapts, with an alpha of 2 r."""


def git_commit() -> str | None:
    """Return the commit of the code, marked if the files differ from it; None outside git."""
    here = str(Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def with_adapter(
    model: Any, method: str, rank: int, head: Sequence[str] = (), inputs: Batches | None = None
) -> Any:
    """Return the model, with a LoRA adapter if the method trains an adapter.

    OPT and RoBERTa get the adapter of MeZO (Malladi et al. 2023, Appendix D), which the paper's
    LoRA results use: on queries and values, with an alpha of 2 r. Other models get an adapter on
    all linear layers, with an alpha of r.

    Args:
        model: a pretrained model of transformers.
        method: a name in ``METHODS``.
        rank: r, the rank of the adapter.
        head: names of new modules, which are trained in addition to the adapter.
        inputs: inputs of the model. If given, A starts with the principal directions of the layers'
            input activations on these inputs, and not at random.
    """
    if not METHODS[method].adapter:
        return model
    whole = {"modules_to_save": list(head) or None}
    if inputs is not None:
        return principal_adapter(model, rank, inputs=inputs, train_directions=True, **whole)
    layers = ADAPTED.get(model.config.model_type)
    where = {"target_modules": layers or "all-linear", "lora_alpha": 2 * rank if layers else rank}
    adapted: Any = get_peft_model(model, LoraConfig(r=rank, **where, **whole))
    return adapted
