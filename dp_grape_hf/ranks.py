"""How many columns the projection of each layer has: given by name patterns.

Ranks are public: they are made of names and numbers that the user gave, never of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from dp_grape_hf.errors import PrivacyError, require

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
