"""``dp-grape memory``: the memory of a training step, computed from a model's config."""

import argparse
import json
from dataclasses import fields

import torch
from tqdm import tqdm

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory import (
    COMPARED,
    RESERVE,
    ModelOfConfig,
    Setting,
    as_text,
    heading,
    plan,
    read_config,
)


def run(args: argparse.Namespace) -> str:
    """Return the tables, or JSON."""
    if args.gpu_memory is not None and not args.gpu_memory > RESERVE:
        raise PrivacyError(
            f"gpu_memory={args.gpu_memory:g} leaves no memory for tensors: CUDA needs "
            f"{RESERVE:g} GiB. Pass the memory of the whole GPU, in GiB."
        )
    config = read_config("model_name_or_path", args.model_name_or_path, args.num_labels)
    model = ModelOfConfig(config, args.head, args.seq_len)
    names = {field.name for field in fields(Setting)}
    given = {name: value for name, value in vars(args).items() if name in names}
    setting = Setting(**given | {"dtype": getattr(torch, args.dtype)})
    methods = list(dict.fromkeys(args.methods or COMPARED))
    total = len(methods) if args.gpu_memory is None else None
    with tqdm(disable=None, total=total, unit=" steps", desc="simulating") as progress:
        planned = plan(model, setting, methods, args.gpu_memory, progress.update)
    if args.json:
        return json.dumps(planned, indent=2) + "\n"
    return f"{heading(model, setting)}\n{as_text(planned)}"
