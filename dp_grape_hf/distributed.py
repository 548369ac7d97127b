"""What the processes that train one model together tell each other, besides the sampling coins.

Decisions are the first process's, and the others receive them; what all were told separately (the
arguments, the data set) is compared before anything is released; and when one process fails, all
of them do. Without a process group every function here is its one-process equivalent.

What crosses the network is sensitive: clipped sums of a share of a draw, without noise. The network
between the processes is trusted as their memory is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dp_grape_hf.errors import PrivacyError

logger = logging.getLogger(__name__)

_SENT_ALONE = 2**20  # numbers; smaller tensors travel together in one message

T = TypeVar("T")


class OtherProcessFailed(PrivacyError):
    """Another process gave up the logical batch; the reason stands in that process's own error."""


def in_process_group() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized()


def group_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if in_process_group() else 1


def is_first() -> bool:
    """Whether this is the process that decides, writes and adds noise."""
    return not in_process_group() or dist.get_rank() == 0


def from_first(make: Callable[[], T]) -> T:
    """Calls ``make`` in the first process only and returns its result, pickled, in all of them.

    A collective call. If ``make`` raises, every process raises: the first its own error, the
    others a ``PrivacyError`` with the same text.
    """
    if not in_process_group():
        return make()
    outcome: list[Any] = [None, None]  # the result, or the text of an error
    failure: Exception | None = None
    if is_first():
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1], failure = f"{error}", error
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise PrivacyError(f"The first process failed: {outcome[1]}")
    result: T = outcome[0]
    return result


def require_agreement(
    facts: Mapping[str, object], unsaid: Mapping[str, object] | None = None
) -> None:
    """Refuses to start if the processes were told different things.

    Coins, projections and the order of parameters are derived in each process by itself; with
    different data sets or arguments, one example could be drawn twice, or sums of different
    parameters be added. A collective call that raises the same error in every process.

    Args:
        facts: name -> value, compared by their texts. No value may be sensitive.
        unsaid: more of them, whose values are.

    Raises:
        PrivacyError: naming each fact that differs, with the values of two processes, unless
            they are sensitive.
    """
    if not in_process_group():
        return
    unsaid = unsaid or {}
    texts = {name: str(value) for name, value in {**facts, **unsaid}.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, texts)
    first = everyone[0]
    differences = [
        f"{name} is {other.get(name, 'missing')} in process {rank} and "
        f"{first.get(name, 'missing')} in process 0"
        if name not in unsaid
        else f"{name} is not the same in process {rank} and in process 0"
        for rank, other in enumerate(everyone)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    if differences:
        raise PrivacyError(
            f"The processes do not agree: {'; '.join(differences)}. Start all of them with the "
            "same arguments, data set and checkpoint, from a folder that every machine sees."
        )


def sum_over_processes_(values: Sequence[Tensor]) -> None:
    """Adds float32 tensors up over all processes, in place; all of them get the same bits.

    A collective call, which a process that cannot take part replaces by ``give_up``. Small tensors
    travel together: a message costs more than they do.

    Args:
        values: Float32, contiguous, all on one device, with the same shapes in all processes.

    Raises:
        OtherProcessFailed: another process gave up. Nothing of this process's values was sent.
    """
    device = values[0].device
    together = [v for v in values if v.numel() < _SENT_ALONE]
    # Made before the flags: an error after them would leave the others with half of an exchange.
    flat = torch.cat([v.reshape(-1) for v in together]) if together else None
    gave_up = torch.zeros(1, device=device)
    dist.all_reduce(gave_up)
    if gave_up.any():
        raise OtherProcessFailed(
            f"{int(gave_up.item())} of {dist.get_world_size()} processes failed in this step, so "
            "no process makes its release, although the ledger counts it. See their own errors."
        )
    for value in values:
        if value.numel() >= _SENT_ALONE:
            dist.all_reduce(value)
    if flat is not None:
        dist.all_reduce(flat)
        parts = flat.split([value.numel() for value in together])
        for value, part in zip(together, parts, strict=True):
            value.copy_(part.view_as(value))


@contextmanager
def failing_together(abandon: Callable[[], None]) -> Iterator[None]:
    """Makes an error of this process one of all that wait for it in ``sum_over_processes_``.

    A launcher ends the other processes when one ends; a process that lives on, in a notebook or
    because its error is caught, would leave them waiting.

    Args:
        abandon: calls ``give_up``. Not called for ``OtherProcessFailed``: they know already.
    """
    try:
        yield
    except OtherProcessFailed:
        raise
    except Exception:
        abandon()
        raise


def hang_up() -> None:
    """Leaves the process group, so that whatever the others wait for fails in them.

    To be called on the way out with an error that is then raised; no collective call.
    """
    logger.error("This process failed, and leaves the process group: the others stop as well.")
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    if in_process_group():
        abort()


def give_up(device: torch.device) -> None:
    """Tells the processes that wait in ``sum_over_processes_`` that this one has failed.

    A collective call, to be made once, on the way out with an error that is then raised.
    """
    logger.error("This process failed; the others are told, and stop as well.")
    dist.all_reduce(torch.ones(1, device=device))
