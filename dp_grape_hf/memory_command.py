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
from dp_grape_hf.memory import COMPARED, DP_GRAPE, Setting, compared, simulate
from dp_grape_hf.report import Comparison, Report
from dp_grape_hf.timeline import Peak


def run(args: argparse.Namespace) -> str:
    """Returns the tables, or JSON."""
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
