"""The two errors a user of this package has to know."""


class PrivacyError(ValueError):
    """Going on would void the stated guarantee, or the request contradicts itself."""


class UnsupportedModelError(PrivacyError):
    """The per-sample gradients of this model cannot be computed exactly, and the reason why."""
