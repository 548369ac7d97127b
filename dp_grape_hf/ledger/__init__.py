"""What a run released, written down before it is made.

``record`` holds the public parameters of a mechanism, ``entries`` the kinds of entries and the
chain of their digests, ``storage`` the file, and ``Ledger`` appends to it and answers what was
spent. ``earlier`` finds the runs that a model comes from, ``model_files`` the files it consists of.
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
from dp_grape_hf.ledger.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    MODEL,
    adapter_folders,
    config_digest,
    damage,
    digest,
    digests,
    files_of_index,
    is_loaded,
    is_of_a_model,
    is_weights,
    may_be_weights,
    notes_of,
    tree,
)
from dp_grape_hf.ledger.record import EXAMPLE, SECURE, Clipping, Mechanism, Release, Sampling

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "CARD_NAME",
    "EXAMPLE",
    "INDEX",
    "KIND_OF",
    "LEDGER_NAME",
    "MODEL",
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
    "Sampling",
    "Start",
    "Weights",
    "adapter_folders",
    "config_digest",
    "damage",
    "digest",
    "digests",
    "files_of_index",
    "find_earlier",
    "is_loaded",
    "is_of_a_model",
    "is_weights",
    "may_be_weights",
    "notes_of",
    "refuse_used_folder",
    "remember",
    "require_same_neighbours",
    "tree",
    "was_trained",
]
