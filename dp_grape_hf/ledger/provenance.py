"""The note in a model's config that says that the model was trained privately.

``model.save_pretrained`` writes weights and config, and no ledger. The note is a part of the
config. So a later run on the model asks for the ledger, and does not count the budget as unspent.

The note is a dictionary under the name ``dp_grape``:

* ``epsilon``: an upper bound on the epsilon spent, as text; ``inf`` without a guarantee.
* ``delta``: the delta of this epsilon; None if there is none.
* ``ledger``: the digest of the ledger's last entry. It is left out if the ledger is saved next to
  the config.

A loaded PEFT adapter does not store its folder, and its config keeps known entries only. So its
note is a part of the text ``peft_version``, of which PEFT ignores everything after an "@".
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
    """Write the epsilon spent into the configs of a model and of its adapters.

    Args:
        model: the trained model.
        ledger: the ledger of its run.
        epsilon: an upper bound on the epsilon spent, at the delta of the ledger's mechanism.
    """
    spent, delta = f"{rounded_up(epsilon):g}", ledger.mechanism.target_delta
    for part in parts_of(model):
        if (config := _config_of(part)) is not None:
            note = {"epsilon": spent, "delta": delta, _LEDGER: ledger.head}
            setattr(config, PROVENANCE, note)
            _NOTED[id(config)] = config
    for config in _adapters_in(model):
        version = f"{config.peft_version}".partition(f"@{PROVENANCE}")[0]
        config.peft_version = f"{version}@{PROVENANCE} epsilon {spent} at delta {delta}"
        _NOTED[id(config)] = config


def provenance_of(part: nn.Module) -> dict[str, Any] | None:
    """Return the note in the config that a model was loaded with; None without one."""
    config = _config_of(part)
    note = getattr(config, PROVENANCE, None)
    return note if isinstance(note, dict) and _NOTED.get(id(config)) is not config else None


def provenance_of_adapters(model: nn.Module) -> str | None:
    """Return the note in the config that an adapter was loaded with; None without one."""
    loaded = (c for c in _adapters_in(model) if _NOTED.get(id(c)) is not c)
    notes = (f"{c.peft_version}".partition(f"@{PROVENANCE} ")[2] for c in loaded)
    return next(filter(None, notes), None)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the models inside a module that know where they were loaded from.

    These are the module itself, or otherwise the outermost models of transformers in it.
    """
    if _config_of(model) is not None or hasattr(model, "name_or_path"):
        return [model]
    return [part for child in model.children() for part in parts_of(child)]


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


def _adapters_in(model: nn.Module) -> list[Any]:
    """Return the configs of all PEFT adapters in a model, each once."""
    found = (getattr(module, "peft_config", None) for module in model.modules())
    configs = (c for adapters in found if isinstance(adapters, dict) for c in adapters.values())
    return list({id(c): c for c in configs if hasattr(c, "peft_version")}.values())
