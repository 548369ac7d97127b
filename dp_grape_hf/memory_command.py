"""``dp-grape memory``: the memory of a step, for a model of which there is only a config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from tqdm import tqdm
from transformers import AutoConfig

from dp_grape_hf.comparison import every_method, simulate_all, sizes_of_model
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.fit import GIB, Simulate, largest_batch, turn_each, turn_until_it_fits
from dp_grape_hf.from_config import ModelOfConfig
from dp_grape_hf.mechanism import Clipping
from dp_grape_hf.memory import COMPARED, DP_GRAPE, Setting, compared, simulate
from dp_grape_hf.report import Comparison, Report
from dp_grape_hf.timeline import Peak

_DESCRIPTION = """\
Simulate a training step and print its peak memory, by what the memory is for.

The step is run, forward to update, by the code that trains, on tensors without contents: no GPU
and no weights are needed, only the model's config.

  AdamW           training without privacy, torch's fused kernel
  DP-GRAPE        projected per-sample gradients
  DP-Adam         unprojected, of each weight the form of its gradients that takes least
  DP-Adam dense   unprojected, a gradient of every weight for every sample

--all_methods compares every method of the package instead, at one batch size.

What the GPU takes beyond tensors is not in the figures: the CUDA context, workspaces, fragmentation
and temporary memory inside kernels. --reserve leaves room for it.
"""

_EXAMPLES = """\
What does RoBERTa-large take, what fits a card of 24 GiB, and what would make more fit?

  $ dp-grape memory --model_name_or_path ./roberta-large --batch_size 40 --seq_len 128 \\
      --gpu_memory 24 --knobs

What do the methods take, beside the formulas of the paper?

  $ dp-grape memory --model_name_or_path ./roberta-small --batch_size 16 --seq_len 64 --all_methods
"""


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape memory``: the memory of a step, before there is a GPU."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.set_defaults(run=_memory)
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="path", help="folder or file of a config")
    add(
        "--head",
        metavar="head",
        help="an AutoModelFor... in small letters, as causal-lm (default: config's)",
    )
    add("--num_labels", type=_positive, metavar="n", help="of a classifier (default: config's)")
    add("--batch_size", type=_positive, required=True, metavar="B", help="the physical batch")
    add("--seq_len", type=_positive, default=128, metavar="T", help="tokens (default: 128)")
    add(
        "--methods",
        nargs="+",
        metavar="method",
        help=f"of the package, or adamw, dp_adam_dense (default: {', '.join(COMPARED)})",
    )
    add("--all_methods", action="store_true", help="compare every method")
    add("--rank", "--r", type=_positive, default=16, metavar="r", help="default: 16")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--gradient_checkpointing", action="store_true", help="recompute activations")
    add("--clipping", choices=Clipping, default=Clipping.FLAT, help="default: flat")
    add("--project_embeddings", action="store_true", help="and vocabulary heads")
    add("--gpu_memory", type=float, metavar="GiB", help="also find the largest batch that fits")
    add("--reserve", type=float, default=1.0, metavar="GiB", help="left to CUDA (default: 1)")
    add("--knobs", action="store_true", help="show what saves memory also where the batch fits")
    add("--json", action="store_true", help="print JSON instead of tables; memory in bytes")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _memory(args: argparse.Namespace) -> str:
    _refuse_combinations(args)
    model = _model(args)
    setting = Setting(
        batch_size=args.batch_size,
        dtype=getattr(torch, args.dtype),
        gradient_checkpointing=args.gradient_checkpointing,
        rank=args.rank,
        clipping=args.clipping,
        project_embeddings=args.project_embeddings,
    )
    if args.all_methods:
        return _compare(model, setting, args)
    progress = tqdm(disable=None, unit=" steps", desc="simulating")

    @cache
    def peak_of(setting: Setting) -> Peak:
        progress.update()
        return simulate(model.build, model.batch, setting)

    names = list(dict.fromkeys(args.methods or COMPARED))
    settings = {name: compared(name, setting) for name in names}
    peaks = {name: peak_of(setting) for name, setting in settings.items()}
    report = Report(model.name, model.parameters, model.length, setting, peaks)
    name = DP_GRAPE if DP_GRAPE in settings else names[0]
    chosen = settings[name]
    limit = None
    if args.gpu_memory is not None:
        report.card = (args.gpu_memory, args.reserve)
        limit = int((args.gpu_memory - args.reserve) * GIB)
        report.largest = {
            method: largest_batch(_total(peak_of, setting), limit, setting.batch_size)
            for method, setting in settings.items()
        }
    too_large = limit is not None and peak_of(chosen).total > limit
    if args.knobs or too_large:
        report.chosen, report.turned = name, turn_each(peak_of, chosen)
    if limit is not None and too_large:
        report.fit = turn_until_it_fits(peak_of, chosen, limit, report.turned)
    progress.close()
    return report.as_json() if args.json else report.as_text()


def _model(args: argparse.Namespace) -> ModelOfConfig:
    name = args.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PrivacyError(
            f"model_name_or_path={name!r} has no config that Transformers can read: {error}"
        ) from error
    if args.num_labels is not None:
        config.num_labels = args.num_labels
    return ModelOfConfig(config, args.head, args.seq_len)


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.gpu_memory is not None and not args.gpu_memory > args.reserve >= 0:
        raise PrivacyError(
            f"gpu_memory={args.gpu_memory:g} leaves no room beside reserve={args.reserve:g}; both "
            "are in GiB, and the reserve must be at least 0."
        )
    for name in ("methods", "gpu_memory", "knobs"):
        if args.all_methods and getattr(args, name):
            raise PrivacyError(
                f"all_methods=True and {name}={getattr(args, name)!r}: --all_methods compares "
                "every method at one batch size, and searches for nothing. Leave one of them out."
            )


def _compare(model: ModelOfConfig, setting: Setting, args: argparse.Namespace) -> str:
    """Returns the tables of every method."""
    rows = every_method(setting)
    with tqdm(disable=None, total=len(rows), desc="every method") as progress:
        simulate_all(model.build, model.batch, rows, progress.update)
    sizes = sizes_of_model(model.build, setting)
    heading = Report(model.name, model.parameters, model.length, setting, {})
    report = Comparison(heading, rows, sizes)
    return report.as_json() if args.json else report.as_text()


def _total(peak_of: Simulate, setting: Setting) -> Callable[[int], int]:
    """Returns the peak in bytes as a function of the batch size."""
    return lambda size: peak_of(replace(setting, batch_size=size)).total
