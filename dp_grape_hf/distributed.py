"""Communication of the processes that train one model together.

The first process decides, and the others receive its decisions. Facts that each process reads
separately (the arguments, the data set) are compared before the first private update. If one
process fails, all of them fail. Without a process group, every function here does the same for one
process.

Sensitive values cross the network: the clipped sum of each process's share of a sampled batch,
without noise. You must trust the network between the processes as you trust their memory.
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

_SENT_ALONE = 2**20  # numbers; smaller tensors are sent together, in one message

T = TypeVar("T")


class OtherProcessFailed(PrivacyError):
    """Error in the other processes after one failed; the error of that one gives the reason."""


def in_process_group() -> bool:
    """Return whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized()


def group_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if in_process_group() else 1


def is_first() -> bool:
    """Return whether this is the process that decides, writes files and adds noise."""
    return not in_process_group() or dist.get_rank() == 0


def from_first(make: Callable[[], T]) -> T:
    """Call ``make`` in the first process only and return its result, pickled, in all of them.

    A collective call.

    Raises:
        Exception: the error of ``make``, in the first process.
        PrivacyError: in the other processes, with the text of that error.
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
        raise PrivacyError(
            "The first process failed, so all processes stop. Correct the error of the first "
            f"process: {outcome[1]}"
        )
    result: T = outcome[0]
    return result


def require_agreement(
    facts: Mapping[str, object], unsaid: Mapping[str, object] | None = None
) -> None:
    """Compare facts between the processes, and refuse to start if one differs.

    Each process derives the sampling, the projections and the order of parameters by itself. With
    different data sets or arguments, one example could be sampled twice, or sums of different
    parameters could be added. A collective call; every process raises the same error.

    Args:
        facts: name -> value, compared by their texts. No value may be sensitive.
        unsaid: name -> sensitive value; an error does not show it.

    Raises:
        PrivacyError: if a fact differs. The error names each such fact, with the values of two
            processes unless they are sensitive.
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
    """Add float32 tensors up over all processes, in place; all processes get the same bits.

    A collective call. A process that failed calls ``give_up`` instead. Small tensors are sent in
    one message, because a message takes longer than its contents.

    Args:
        values: Float32, contiguous, all on one device, with the same shapes in all processes.

    Raises:
        OtherProcessFailed: if another process called ``give_up``. No value was sent.
    """
    device = values[0].device
    together = [v for v in values if v.numel() < _SENT_ALONE]
    # Allocated before the flags are sent: after a later error, the other processes would wait.
    flat = torch.cat([v.reshape(-1) for v in together]) if together else None
    gave_up = torch.zeros(1, device=device)
    dist.all_reduce(gave_up)
    if gave_up.any():
        raise OtherProcessFailed(
            f"{int(gave_up.item())} of {dist.get_world_size()} processes failed in this step. No "
            "process makes the private update, although the ledger counts it. See the errors of "
            "the processes that failed."
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
    """Make all processes fail if this one fails inside the context.

    A launcher ends the other processes when one ends. A process that does not end, in a notebook
    or because its error is caught, would leave the others waiting in ``sum_over_processes_``.

    Args:
        abandon: calls ``give_up``. It is not called after ``OtherProcessFailed``, which the other
            processes raise as well.
    """
    try:
        yield
    except OtherProcessFailed:
        raise
    except Exception:
        abandon()
        raise


def hang_up() -> None:
    """Leave the process group, so that the collective calls of the other processes fail.

    Raise an error after this call. It is no collective call.
    """
    logger.error("This process failed and leaves the process group. The other processes stop too.")
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    if in_process_group():
        abort()


def give_up(device: torch.device) -> None:
    """Report to the processes in ``sum_over_processes_`` that this process failed.

    A collective call. Call it once, and raise an error after it.
    """
    logger.error("This process failed and reports it. The other processes stop too.")
    dist.all_reduce(torch.ones(1, device=device))
