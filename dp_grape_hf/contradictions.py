"""Options of ours that contradict each other: a run is refused before it begins."""

from __future__ import annotations

import math
from typing import Any

from dp_grape_hf.engines import ENGINES
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import EXAMPLE, Clipping, Sampling
from dp_grape_hf.methods import METHODS
from dp_grape_hf.per_sample import GradSampleMode


def refuse_contradictions(args: Any) -> None:
    """Refuses arguments of which each is valid, but not all together.

    Args:
        args: a ``DPGrapeArguments`` whose values are in range.

    Raises:
        PrivacyError: naming the arguments, their values and what to do.
    """
    _refuse_units(args)
    _refuse_modes(args)
    if args.log_unnoised_statistics and args.target_epsilon is not None:
        raise PrivacyError(
            "log_unnoised_statistics=True publishes un-noised functions of the training data, "
            f"which no epsilon covers, so it contradicts "
            f"target_epsilon={args.target_epsilon!r}. Debug with "
            "noise_multiplier=..., on public data; the ledger then says not private."
        )
    if args.max_batch_size is not None and args.sampling != Sampling.TRUNCATED_POISSON:
        raise PrivacyError(
            f"max_batch_size={args.max_batch_size!r} needs sampling='truncated_poisson'; plain "
            "Poisson draws have no largest size."
        )
    if args.clipping == Clipping.AUTOMATIC and math.isinf(args.max_grad_norm):
        raise PrivacyError(
            f"clipping={args.clipping!r} scales gradients to max_grad_norm="
            f"{args.max_grad_norm!r}; give a finite C, or clipping='flat'."
        )
    if args.private and math.isinf(args.max_grad_norm):
        raise PrivacyError(
            f"max_grad_norm={args.max_grad_norm!r} leaves nothing to calibrate the noise to; "
            "give a finite C, or noise_multiplier=0."
        )


def _refuse_modes(args: Any) -> None:
    """Refuses a form of per-sample gradients that nothing would come in."""
    mode, row = args.grad_sample_mode, METHODS[args.method]
    if mode == GradSampleMode.AUTO:
        return
    if row.zeroth_order or not row.private:
        raise PrivacyError(
            f"grad_sample_mode={mode!r} is about gradients of samples, which "
            f"method={args.method!r} does not compute. Leave it out."
        )
    if mode not in ENGINES[args.engine].grad_sample_modes:
        raise PrivacyError(
            f"grad_sample_mode={mode!r} is not a mode of engine={args.engine!r}; choose one "
            f"of: {', '.join(ENGINES[args.engine].grad_sample_modes)}."
        )
    if mode == GradSampleMode.GHOST and args.clipping == Clipping.PER_LAYER:
        raise PrivacyError(
            f"grad_sample_mode={mode!r} takes a second backward pass to free gradients early, "
            f"which clipping={args.clipping!r} does in one. Leave one of them out."
        )


def _refuse_units(args: Any) -> None:
    """Refuses what contradicts a column of privacy units, or needs one."""
    column = args.privacy_unit_column
    if column is None:
        if args.max_examples_per_unit is not None:
            raise PrivacyError(
                f"max_examples_per_unit={args.max_examples_per_unit!r} needs "
                "privacy_unit_column: without it each example is a unit. Name the column, or "
                "leave it out."
            )
        return
    if column in ("", EXAMPLE):
        raise PrivacyError(
            f"privacy_unit_column={column!r}: give the name of a column other than "
            f"{EXAMPLE!r}, which the ledger uses for single examples."
        )
    if not METHODS[args.method].private:
        raise PrivacyError(
            f"privacy_unit_column={column!r} with method={args.method!r}: that method protects "
            "nobody, so it has no privacy units. Leave it out, or choose a private method."
        )
    if args.expected_batch_size is None:
        raise PrivacyError(
            f"expected_batch_size=None with privacy_unit_column={column!r}: it counts units, "
            "and its default counts examples. Give the expected number of units of a step."
        )
    if args.train_sampling_strategy != "random":
        raise PrivacyError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} with "
            f"privacy_unit_column={column!r}: physical batches hold whole units, whatever their "
            "lengths. Leave it at 'random'."
        )
    if args.log_unnoised_statistics:
        raise PrivacyError(
            f"log_unnoised_statistics=True with privacy_unit_column={column!r} logs numbers by "
            "example, which say nothing of units. Leave one of them out."
        )
