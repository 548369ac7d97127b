"""The privacy ledger: a record of each private update, written before the update is made.

``record`` defines the public parameters of a mechanism, ``entries`` the kinds of entries and the
chain of their digests, and ``storage`` the file. ``Ledger`` appends entries and computes epsilon.
``earlier`` finds the earlier runs of a model, by its ledger or by the note that ``provenance``
stores in the model's config.
"""

from dp_grape_hf.ledger.earlier import (
    Earlier as Earlier,
    EarlierData as EarlierData,
    find_earlier as find_earlier,
    refuse_used_folder as refuse_used_folder,
    remember as remember,
    remembered_ledgers as remembered_ledgers,
)
from dp_grape_hf.ledger.entries import (
    CARD_NAME as CARD_NAME,
    KIND_OF as KIND_OF,
    LEDGER_NAME as LEDGER_NAME,
    Entry as Entry,
    Link as Link,
    NotPrivate as NotPrivate,
    Projection as Projection,
    Resume as Resume,
    Start as Start,
    Weights as Weights,
    require_same_neighbours as require_same_neighbours,
)
from dp_grape_hf.ledger.ledger import Ledger as Ledger
from dp_grape_hf.ledger.provenance import (
    beside_its_ledger as beside_its_ledger,
    note_provenance as note_provenance,
)
from dp_grape_hf.ledger.record import (
    BANDED as BANDED,
    EXAMPLE as EXAMPLE,
    SECURE as SECURE,
    Clipping as Clipping,
    Mechanism as Mechanism,
    Release as Release,
)
