"""The note in a model's config that says that the model was trained privately.

``model.save_pretrained`` writes weights and config, and no ledger. The note is a part of the
config. So a later run on the model asks for the ledger, and does not count the budget as unspent.

The note is a dictionary under the name ``dp_grape``:

* ``epsilon``: an upper bound on the epsilon spent, as text; ``inf`` without a guarantee.
* ``delta``: the delta of this epsilon; None if there is none.
* ``ledger``: the digest of the ledger's last entry. It is left out if the ledger is saved next to
  the config.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dp_grape_hf.accounting import rounded_up
from dp_grape_hf.ledger.ledger import Ledger

PROVENANCE = "dp_grape"
_LEDGER = "ledger"

# Config objects that received a note in this process. A new model that is built from such an object
# has the note but other weights, which were not trained.
_NOTED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_provenance(model: nn.Module, ledger: Ledger, epsilon: float) -> None:
    """Write the epsilon spent into the config of a model, if the model has a config.

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
    """Return the note in the config that a model was loaded with; None without one."""
    config = _config_of(model)
    note = getattr(config, PROVENANCE, None)
    return note if isinstance(note, dict) and _NOTED.get(id(config)) is not config else None


@contextmanager
def beside_its_ledger(model: nn.Module) -> Iterator[None]:
    """Leave the ledger's digest out of the config's note inside the ``with`` block."""
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
