"""Warnings about learning rates that cannot work, before the first step."""

from dp_grape_hf.choosing.rates import OUTPUT_NOISE, Rates

# Largest change of the features by noise, relative to their norm. Features that noise turns into a
# constant change by exactly 1.
_MAX_CHANGE = 0.99
# Smallest change by noise in a run without a new head, if noise is larger than the signal.
_MIN_CHANGE = 0.03
# Bounds for noise and signal in an output, in units of the noise that rates are chosen for.
_MAX_NOISE, _MIN_MOVE = 4.0, 2.5
_MIN_SIGNAL_TO_NOISE = 10.0  # largest move of an output by signal, divided by its noise

FIRST_POSITION = (
    "The head is new and reads the first position of the text, and this run does not change the "
    "last layer. A pretrained encoder stores little of the meaning of a text there, so the head "
    "may learn little. Use method='dp_grape' without an adapter, which makes the last layer "
    "average over the text, or a model whose head reads the mean of all positions."
)
"""Warning if ``average_at_first`` would change weights outside of an adapter, which stay."""


def rate_warnings(rates: Rates, *, chosen: bool) -> list[str]:
    """Return warnings about learning rates, each with the measured number and a remedy.

    ``chosen`` says whether the package chose the learning rates.
    """
    warnings = []
    body, head = rates.body, rates.head
    leave = "Leave out learning_rate; the package then chooses it."
    if not (chosen or rates.fresh) and body is not None and body.effect > _MAX_CHANGE:
        warnings.append(
            f"At learning_rate={body.rate:.2g}, noise alone will change the input of the last "
            f"layer by {body.effect:.2g} of its norm. The model would lose its pretraining. "
            f"{leave}"
        )
    if head is None or head.output is None:
        if not chosen and body is not None and body.effect < _MIN_CHANGE and body.most < body.noise:
            warnings.append(
                f"Nothing will be learnt: at learning_rate={body.rate:.2g}, even noise, which is "
                f"larger than the signal, will change the {body.changes} by only {body.effect:.2g} "
                f"of their norm in the whole run. {leave}"
            )
        return warnings
    output, noise = head.output, OUTPUT_NOISE[head.output]
    if not chosen and head.effect > _MAX_NOISE * noise:
        warnings.append(
            f"At learning_rate={head.rate:.2g}, noise alone will add {head.effect:.2g} to "
            f"{output}. A label changes it by about 1, so noise would hide the labels. {leave}"
        )
    if not chosen and head.reach < _MIN_MOVE * noise:
        warnings.append(
            f"Nothing will be learnt: if all examples agreed, {output} would move by "
            f"{head.reach:.2g} in the whole run at learning_rate={head.rate:.2g}. {leave}"
        )
    elif head.reach < _MIN_SIGNAL_TO_NOISE * head.effect:
        warnings.append(
            f"Nothing will be learnt: if all examples agreed, {output} would move only "
            f"{head.reach / head.effect:.2g} times as far as by noise alone. There are too few "
            "examples for this epsilon, or the batch is too small. Raise epsilon, "
            "num_train_epochs or expected_batch_size, or use more examples."
        )
    return warnings
