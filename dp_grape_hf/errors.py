"""The two errors a user of this package has to know, and the check that raises the first."""


class PrivacyError(ValueError):
    """Going on would void the stated guarantee, or the request contradicts itself."""


class UnsupportedModelError(PrivacyError):
    """The per-sample gradients of this model cannot be computed exactly, and the reason why."""


def require(condition: bool, message: str) -> None:
    """Raises a ``PrivacyError`` with the message unless the condition holds."""
    if not condition:
        raise PrivacyError(message)
