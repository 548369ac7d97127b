"""The two errors a user of this package has to know, and what raises the first."""

from enum import EnumType, StrEnum


class PrivacyError(ValueError):
    """Going on would void the stated guarantee, or the request contradicts itself."""


class UnsupportedModelError(PrivacyError):
    """The per-sample gradients of this model cannot be computed exactly, and the reason why."""


def require(condition: bool, message: str) -> None:
    """Raises a ``PrivacyError`` with the message unless the condition holds."""
    if not condition:
        raise PrivacyError(message)


class _Texts(EnumType):
    def __contains__(cls, value: object) -> bool:  # as Python has it from 3.12 on
        return value in list[object](cls)


class Choice(StrEnum, metaclass=_Texts):
    """A family of texts that an argument may be one of; errors, JSON and ledgers show the text."""

    def __repr__(self) -> str:
        return repr(self.value)


ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Of the program, not of the machine; gradient checkpointing ends what it repeats by another."""
