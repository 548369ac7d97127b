"""The privacy ledger: a record of each private update, written before the update is made.

``record`` defines the public parameters of a mechanism, ``entries`` the kinds of entries and the
chain of their digests, and ``storage`` the file. ``Ledger`` appends entries and computes epsilon.
``earlier`` finds the earlier runs of a model, by its ledger or by the note that ``provenance``
stores in the model's config.
"""

from dp_grape_hf.ledger.earlier import (
    Earlier,
    EarlierData,
    find_earlier,
    refuse_used_folder,
    remember,
    was_trained,
)
from dp_grape_hf.ledger.entries import (
    CARD_NAME,
    KIND_OF,
    LEDGER_NAME,
    Entry,
    Link,
    NotPrivate,
    Projection,
    Resume,
    Start,
    Weights,
    require_same_neighbours,
)
from dp_grape_hf.ledger.ledger import Ledger
from dp_grape_hf.ledger.provenance import beside_its_ledger, note_provenance
from dp_grape_hf.ledger.record import (
    BANDED,
    EXAMPLE,
    SECURE,
    Clipping,
    Mechanism,
    Release,
)

__all__ = [
    "BANDED",
    "CARD_NAME",
    "EXAMPLE",
    "KIND_OF",
    "LEDGER_NAME",
    "SECURE",
    "Clipping",
    "Earlier",
    "EarlierData",
    "Entry",
    "Ledger",
    "Link",
    "Mechanism",
    "NotPrivate",
    "Projection",
    "Release",
    "Resume",
    "Start",
    "Weights",
    "beside_its_ledger",
    "find_earlier",
    "note_provenance",
    "refuse_used_folder",
    "remember",
    "require_same_neighbours",
    "was_trained",
]
