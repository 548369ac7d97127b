"""The errors that this package raises for its users, and helpers to raise them."""

from enum import EnumType, StrEnum


class PrivacyError(ValueError):
    """Error if the guarantee would not hold, or if options contradict each other."""


class UnsupportedModelError(PrivacyError):
    """Error if the per-sample gradients of a model cannot be computed exactly, with the reason."""


def require(condition: bool, message: str) -> None:
    """Raise a ``PrivacyError`` with the message unless the condition holds."""
    if not condition:
        raise PrivacyError(message)


class _Texts(EnumType):
    def __contains__(cls, value: object) -> bool:  # the behaviour of Python 3.12 and later
        return value in list[object](cls)


class Choice(StrEnum, metaclass=_Texts):
    """An enumeration of texts that an argument may have. Errors, JSON and ledgers show the text."""

    def __repr__(self) -> str:
        return repr(self.value)


ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of model code and user code. Excludes errors of the machine, and the private exception by
which gradient checkpointing stops a repeated forward pass."""
