"""The note in a model's configuration that says that the model was trained privately.

``model.save_pretrained`` writes weights and configuration, and no ledger. The note goes with them,
so a later run on the model asks for the ledger instead of claiming a budget that is partly spent.

The note is a dictionary under the name ``dp_grape``:

* ``epsilon``: an upper bound on the epsilon spent, as text; ``inf`` without a guarantee.
* ``delta``: at which it holds; None if there is none.
* ``ledger``: the digest of the ledger's last entry. It is left out if the ledger is saved next to
  the configuration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dp_grape_hf.accounting import rounded_up
from dp_grape_hf.ledger.ledger import Ledger

PROVENANCE = "dp_grape"
_LEDGER = "ledger"

# Configurations that were noted in this process. Another model that is made from such an object has
# the note and other weights: it was not trained.
_NOTED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_provenance(model: nn.Module, ledger: Ledger, epsilon: float) -> None:
    """Notes in the configuration of a model what its training spent, if it has a configuration.

    Args:
        model: the trained model.
        ledger: the ledger of its run.
        epsilon: an upper bound on the epsilon spent, at the delta of the ledger's mechanism.
    """
    config = _config_of(model)
    if config is None:
        return
    note = {
        "epsilon": f"{rounded_up(epsilon):g}",
        "delta": ledger.mechanism.target_delta,
        _LEDGER: ledger.head,
    }
    setattr(config, PROVENANCE, note)
    _NOTED[id(config)] = config


def provenance_of(model: nn.Module) -> dict[str, Any] | None:
    """Returns the note in the configuration that a model was loaded with; None without one."""
    config = _config_of(model)
    note = getattr(config, PROVENANCE, None)
    return note if isinstance(note, dict) and _NOTED.get(id(config)) is not config else None


@contextmanager
def beside_its_ledger(model: nn.Module) -> Iterator[None]:
    """Leaves the ledger's digest out of the note, in a configuration that is saved inside."""
    config = _config_of(model)
    note = getattr(config, PROVENANCE, None)
    if not isinstance(note, dict):
        yield
        return
    setattr(config, PROVENANCE, {n: value for n, value in note.items() if n != _LEDGER})
    try:
        yield
    finally:
        setattr(config, PROVENANCE, note)


def _config_of(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") else None
