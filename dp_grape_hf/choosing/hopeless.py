"""Warnings about settings that cannot work, before the first step."""

from __future__ import annotations

from dp_grape_hf.choosing.rates import Rates

_DESTROYED = 1.0
_LOUD, _STILL = 4.0, 2.5  # times the noise in an output that rates are chosen for
_LEAST = 10.0  # times the noise in an output, the most that signal can move it


FIRST_POSITION = (
    "The head is new and reads the first position of the text, and this run leaves the last layer "
    "as it is. A pretrained encoder has little of the meaning of a text there, so that little may "
    "be learnt. Use method='dp_grape' with save_as='model', which lets the last layer average over "
    "the text, or a model whose head reads the mean of all positions."
)
"""What is said where ``average_at_first`` would change weights that are not saved."""


def objections(rates: Rates, *, chosen: bool) -> list[str]:
    """Returns what is wrong with rates, each with a number and what would help.

    Args:
        rates: with the effect of the noise of the run at each.
        chosen: whether they were chosen here.
    """
    found = []
    body, head = rates.body, rates.head
    leave = "Leave learning_rate out, which is then chosen."
    if not (chosen or rates.fresh) and body is not None and body.effect > _DESTROYED:
        found.append(
            f"Noise alone will change what the last layer is given by {body.effect:.2g} of its "
            f"size: at a rate of {body.rate:.2g} the model loses what it knows. {leave}"
        )
    if head is None or head.output is None:
        return found
    what, wanted = head.output
    if not chosen and head.effect > _LOUD * wanted:
        found.append(
            f"Noise alone will add {head.effect:.2g} to {what} at a rate of {head.rate:.2g}, "
            f"where a label is worth about 1. {leave}"
        )
    if not chosen and head.reach < _STILL * wanted:
        found.append(
            f"Nothing will be learnt: if all examples agreed, {what} would move by "
            f"{head.reach:.2g} in the whole run at a rate of {head.rate:.2g}. {leave}"
        )
    elif head.reach < _LEAST * head.effect:
        found.append(
            f"Nothing will be learnt: if all examples agreed, {what} would move "
            f"{head.reach / head.effect:.2g} times as far as by noise alone. There are too few "
            "examples for this epsilon, or the batch is too small: raise epsilon, "
            "num_train_epochs or expected_batch_size, or find more examples."
        )
    return found
