"""``dp-grape audit``: attack a training run, and compare the result with its claimed epsilon."""

import argparse
import json
from dataclasses import asdict, fields

from dp_grape_hf.auditing import AuditResult, AuditSettings, audit
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.tables import table

_NOT_OF_A_RUN = (
    "{place} cannot be audited: an audit has to add canaries to the training data, so it trains a "
    "separate run. Use dp-grape audit without a folder to audit such a run of the same code, and "
    "dp-grape verify {place} to check the ledger, the card and the files of your run."
)


def run(args: argparse.Namespace) -> tuple[str, int]:
    """Return a report of claim and lower bound, and 1 if the bound exceeds the claim."""
    if (place := vars(args).get("audited")) is not None:
        raise PrivacyError(_NOT_OF_A_RUN.format(place=place))
    names = {field.name for field in fields(AuditSettings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if "noise_multiplier" in given:
        given["target_epsilon"] = None
    result = audit(AuditSettings(**given))
    report = _as_json(result) if args.json else _as_text(result)
    return report, int(not result.passed)


def _as_json(result: AuditResult) -> str:
    content = asdict(result) | {
        "guesses": result.settings.number_of_guesses,
        "passed": result.passed,
    }
    return json.dumps(content, indent=2) + "\n"


def _as_text(result: AuditResult) -> str:
    settings = result.settings
    options = {
        "projection": settings.projection,
        "gradient factors": settings.gradient_factors,
        "noise": None if settings.noise == "independent" else settings.noise,
    }
    lines = {
        "method": f"{settings.method}, {settings.clipping} clipping",
        **{name: str(value) for name, value in options.items() if value is not None},
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
        "The attack does not contradict the claim."
        if result.passed
        else "THE RUN IS NOT AS PRIVATE AS IT CLAIMS: the lower bound exceeds the claim."
    )
    return f"{table(lines.items())}\n{verdict}\n"
