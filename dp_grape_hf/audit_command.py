"""``dp-grape audit``: the claim of a training run on this machine, beside what an attack shows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dp_grape_hf.audit import AUDITED_METHODS, AuditResult, AuditSettings, audit
from dp_grape_hf.mechanism import Clipping
from dp_grape_hf.tables import table

_DESCRIPTION = """\
Attack one private training run on this machine, and compare with the epsilon that it claims.

Canaries, examples whose gradient meets that of no other, are put into the training set by fair
coins. From all the weights of the run it is then guessed of k of them, those that the weights say
most about, whether they were in. A run that is (epsilon, delta)-private lets nobody be right too
often (Steinke, Nasr and Jagielski 2023), so the number of correct guesses bounds epsilon from
below.

The bound has to stay below the claim. It does so for every sound run but a share of 1 - confidence
at most; k is fixed in advance, so nothing was searched that the confidence would not cover. A bound
below the claim does not prove it: one run cannot show all of epsilon, about half at the defaults.

The exit code is 0 if the bound is at most the claim, and 1 if it exceeds it.
"""

_EXAMPLES = """\
Audit DP-GRAPE as this package trains it here (about ten seconds on one CPU core), and DP-SGD with
half of the canaries drawn in each step:

  $ dp-grape audit
  $ dp-grape audit --method dp_sgd --sample_rate 0.5 --max_steps 20
"""


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape audit``: an attack on a run, and what it shows of epsilon."""
    default = AuditSettings()
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.set_defaults(run=_audit)
    parser.add_argument("--method", choices=AUDITED_METHODS, default=default.method)
    parser.add_argument("--clipping", choices=Clipping, default=default.clipping)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--target_epsilon",
        "--eps",
        type=float,
        metavar="eps",
        help=f"what the run claims (default: {default.target_epsilon:g})",
    )
    budget.add_argument("--noise_multiplier", type=float, metavar="sigma", help="instead of eps")
    numbers = (
        ("--target_delta", float, "delta", default.delta, "delta of the claim, below 1 / m"),
        ("--max_steps", int, "T", default.steps, "noisy steps of the run"),
        ("--sample_rate", float, "q", default.sample_rate, "share drawn in a step; 1 shows most"),
        ("--canaries", int, "m", default.canaries, "examples that may be in"),
        ("--confidence", float, "c", default.confidence, "of the lower bound"),
        ("--projection_rank", int, "r", default.projection_rank, "of dp_grape, 1 to 3"),
    )
    for name, kind, metavar, value, text in numbers:
        parser.add_argument(
            *((name, "--delta") if name == "--target_delta" else (name,)),
            type=kind,
            metavar=metavar,
            default=value,
            help=f"{text} (default: {value:g})",
        )
    parser.add_argument(
        "--guesses", type=int, metavar="k", help="how many are guessed (default: m / 40)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _audit(args: argparse.Namespace) -> tuple[str, int]:
    unset = args.target_epsilon is None and args.noise_multiplier is None
    result = audit(
        AuditSettings(
            method=args.method,
            clipping=args.clipping,
            target_epsilon=AuditSettings.target_epsilon if unset else args.target_epsilon,
            noise_multiplier=args.noise_multiplier,
            delta=args.target_delta,
            steps=args.max_steps,
            sample_rate=args.sample_rate,
            canaries=args.canaries,
            guesses=args.guesses,
            confidence=args.confidence,
            projection_rank=args.projection_rank,
        )
    )
    report = _as_json(result) if args.json else _as_text(result)
    return report, int(not result.passed)


def _as_json(result: AuditResult) -> str:
    found = asdict(result) | {
        "guesses": result.settings.number_of_guesses,
        "passed": result.passed,
    }
    return json.dumps(found, indent=2) + "\n"


def _as_text(result: AuditResult) -> str:
    settings = result.settings
    lines = {
        "method": f"{settings.method}, {settings.clipping} clipping",
        "steps": f"{result.steps}, sample rate {result.sample_rate:g}, "
        f"noise multiplier {result.noise_multiplier:.4f}",
        "canaries": f"{settings.canaries}, {result.included} of them in the training set",
        "guesses": f"{settings.number_of_guesses}, fixed in advance",
        "correct": f"{result.correct}, {result.correct / settings.number_of_guesses:.1%}",
        "epsilon claimed": f"{result.claimed_epsilon:.3f} at delta {settings.delta:g}",
        "epsilon shown": f"at least {result.lower_bound:.3f} with confidence "
        f"{settings.confidence:g}",
    }
    verdict = (
        "The attack shows nothing beyond the claim."
        if result.passed
        else "THE RUN IS NOT AS PRIVATE AS IT CLAIMS: the lower bound exceeds the claim."
    )
    return f"{table(lines.items())}\n{verdict}\n"
