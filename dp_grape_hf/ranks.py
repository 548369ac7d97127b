"""How many columns the projection of each layer has: given by name patterns, or from a budget.

Both functions return parameter name -> r, which is what ``ProjectionSchedule`` takes as ``rank``.
Ranks are public: they are made of names, shapes and numbers that the user gave, never of data.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.placement import projected_dimension

_MOST_LISTED = 20  # names in an error message


def ranks_for(
    shapes: Mapping[str, tuple[int, ...]], rank: int, patterns: Mapping[str, int]
) -> dict[str, int]:
    """Returns the rank of every matrix: that of the first pattern which matches its name.

    A pattern is a shell pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots). It is tried on
    the parameter's whole name, and on every run of the name's dotted parts, so that a module's path
    or any whole part of it is enough: ``query`` and ``attention.self`` match
    ``encoder.layer.1.attention.self.query.weight``, and ``layer.1`` does not match ``layer.10``.

    >>> shapes = {"h.0.attn.weight": (8, 8), "h.0.mlp.weight": (8, 32), "h.0.mlp.bias": (8,)}
    >>> ranks_for(shapes, 4, {"attn": 2})
    {'h.0.attn.weight': 2, 'h.0.mlp.weight': 4}

    Args:
        shapes: parameter name -> shape, of the parameters to project; only matrices get a rank.
        rank: r of those that no pattern matches.
        patterns: pattern -> r, in the order in which they are tried.

    Raises:
        PrivacyError: for a rank below 1, and for a pattern that is never the first to match.
    """
    require(rank >= 1, f"projection_rank={rank} must be at least 1.")
    for pattern, value in patterns.items():
        require(value >= 1, f"projection_rank={value} of {pattern!r} must be at least 1.")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    first = first_matches(matrices, patterns, "projection_rank", "the projected weights")
    return {name: rank if match is None else patterns[match] for name, match in first.items()}


def first_matches(
    names: Sequence[str], patterns: Iterable[str], option: str, what: str
) -> dict[str, str | None]:
    """Returns the first pattern that matches each name, as ``ranks_for`` matches them, or None.

    Args:
        names: of parameters.
        patterns: in the order in which they are tried.
        option: what the patterns were given for, in an error.
        what: the parameters are, in an error.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    patterns = list(patterns)
    first = {name: _first_match(name, patterns) for name in names}
    for pattern in (pattern for pattern in patterns if pattern not in first.values()):
        if any(_matches(name, pattern) for name in names):
            raise PrivacyError(
                f"{option}={pattern!r}: all that this pattern matches is matched by one "
                "before it. The first match counts: put the narrower pattern first."
            )
        listed = ", ".join(names[:_MOST_LISTED])
        more = len(names) - _MOST_LISTED
        raise PrivacyError(
            f"{option}={pattern!r}: this pattern matches none of {what}: "
            f"{listed}{f' and {more} more' if more > 0 else ''}."
        )
    return first


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in _runs(name))


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


def auto_ranks(
    shapes: Mapping[str, tuple[int, ...]],
    budget: int,
    side: str = "smaller",
    input_dims: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Returns ranks that spend a budget of coordinates over layers by their size.

    A layer whose projected dimension is d and whose other dimension is k keeps r k coordinates. The
    rule is r proportional to d, at least 1 and at most d - 1: all layers are compressed by one
    factor.

    Why: the lifted noise has variance ``(sigma C)^2`` in each entry of a weight whatever r is,
    because ``E[P P^T] = I``. What r decides is the error of the gradient: the squared distance of
    ``P P^T G`` from G is about ``d / r |G|^2``. If the entries of all gradients are equally large,
    so that ``|G|^2`` is proportional to ``d k``, then ``sum_l d_l / r_l |G_l|^2`` is smallest
    within the budget ``sum_l r_l k_l`` where r is proportional to d. No data is looked at.

    Ranks rise one by one, always that with the smallest next ``r / d`` (of equals, that of the
    larger layer), until the next step would pass the budget. So less than one such step of it is
    left, a larger budget lowers no rank, and a layer with a larger d has no smaller rank.

    >>> auto_ranks({"wide": (8, 32), "narrow": (4, 8)}, budget=200)
    {'wide': 5, 'narrow': 2}

    Args:
        shapes: parameter name -> shape, of the parameters to project; only matrices get a rank. One
            with d = 1 gets 1, which leaves it unprojected, and costs nothing.
        budget: how many coordinates all layers may have together.
        side: which dimension is projected, a name in ``placement.SIDES``.
        input_dims: parameter name -> its dimension that is the layer's input; 1 if not named.

    Raises:
        PrivacyError: if the budget is too small for rank 1 in every layer; for an unknown side.
    """
    sizes: dict[str, tuple[int, int]] = {}  # d, k
    for name, shape in shapes.items():
        if len(shape) == 2:
            dimension = projected_dimension(shape, side, (input_dims or {}).get(name, 1))
            sizes[name] = (shape[dimension], shape[1 - dimension])
    ranks = dict.fromkeys(sizes, 1)
    left = budget - sum(k for d, k in sizes.values() if d > 1)
    require(
        left >= 0,
        f"{budget=} is below the {budget - left} coordinates that rank 1 in "
        f"each of {len(sizes)} layers takes. Give at least that, or project fewer layers.",
    )
    # In float64, r / d of two layers are equal only if they are equal, for any d below 2^26.
    steps = [(2 / d, -d, -k, place, name) for place, (name, (d, k)) in enumerate(sizes.items())]
    steps = [step for step in steps if step[1] < -2]
    heapq.heapify(steps)
    while steps and left + steps[0][2] >= 0:
        _, minus_d, minus_k, place, name = steps[0]
        ranks[name] += 1
        left += minus_k
        if ranks[name] + 1 < -minus_d:
            following = (ranks[name] + 1) / -minus_d
            heapq.heapreplace(steps, (following, minus_d, minus_k, place, name))
        else:
            heapq.heappop(steps)
    return ranks
