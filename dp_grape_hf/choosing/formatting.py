"""Format the choices of a run as text, for the ledger and for the table at the start."""

from collections.abc import Iterable

from dp_grape_hf.choosing.rates import Group, Rates
from dp_grape_hf.ledger import Mechanism
from dp_grape_hf.tables import table


def rates_line(rates: Rates, schedule: str) -> str:
    """Return one line about the learning rates and their schedule, for the ledger."""
    groups = [
        f"{group.name}: learning rate {group.rate:.4g}, limited by {group.limit}, at which noise "
        f"alone {_effect(group)}"
        for group in rates.groups
    ]
    return "; ".join([*groups, f"under the schedule {schedule}"])


def run_tables(
    rates: Rates,
    mechanism: Mechanism,
    steps: int,
    rule: str,
    schedule: str,
    notes: Iterable[str] = (),
) -> str:
    """Return tables of a run of T ``steps`` that will start: its parameters, parts and rates.

    ``rule`` and ``schedule`` are names. ``notes`` are sentences that are printed below the tables.
    """
    promise, unit = "", mechanism.privacy_unit
    if mechanism.target_epsilon is not None:
        promise = f", epsilon {mechanism.target_epsilon:g} at delta {mechanism.target_delta:g}"
    releases = mechanism.releases(steps)
    separately = (
        "" if mechanism.clipped_apart is None else f"; {mechanism.clipped_apart} separately"
    )
    noise = (
        "independent"
        if mechanism.noise is None
        else f"{mechanism.noise}, over {len(mechanism.bands)} steps"
    )
    run = {
        "batch size B": f"{mechanism.expected_batch_size:g} {unit}s a step, expected",
        "sampling rate q": f"{mechanism.sample_rate:.4g}",
        "steps": f"{steps}",
        "noise multiplier": f"{mechanism.noise_multiplier:.4g}",
        "noise": noise,
        "accounted as": f"{releases.counted} steps at sampling rate {releases.counted_rate:.4g}",
        "clipping": f"C = {mechanism.max_grad_norm:g}, {mechanism.clipping}{separately}",
        "optimizer": rule,
        "schedule": schedule,
        "projection P": mechanism.projection_in_words,
    }
    header = (
        *("", "numbers", "rate", "limited by", "noise", "signal at most"),
        "noise of the whole run alone",
    )
    rows = [
        (
            group.name,
            f"{group.numbers:,}",
            f"{group.rate:.3g}",
            group.limit,
            f"{group.noise:.3g}",
            f"{group.most:.3g}",
            _effect(group)
            + ("" if group.output is None else f"; signal can move it by {group.reach:.3g}"),
        )
        for group in rates.groups
    ]
    return (
        f"{mechanism.num_samples:,} {unit}s{promise}\n\n"
        + table(run.items())
        + "\n"
        + table([header, *rows], "<>><>><")
        + "".join(f"\n{note}\n" for note in notes)
    )


def _effect(group: Group) -> str:
    if group.output is None:
        return f"changes {group.changes} by {group.effect:.2g} of their size"
    return f"adds {group.effect:.2g} to {group.output}"
