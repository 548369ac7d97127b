"""Save and publish a private model with its ledger and model card, and verify them.

``publisher`` saves a model with its ledger and its card into an empty folder. The files then
replace the files of a local folder, or are uploaded as one commit. ``statement`` writes the privacy
claim that a ledger supports, ``card`` writes the model card around it, and ``configs``
removes local paths from the saved configs. ``verification`` compares card, files and ledger, and
``model_files`` lists the files of a model.
"""

from dp_grape_hf.publishing.card import (
    CardDetails as CardDetails,
    declare as declare,
    render as render,
    renewed as renewed,
)
from dp_grape_hf.publishing.configs import json_of as json_of
from dp_grape_hf.publishing.model_files import (
    ADAPTER_CONFIG as ADAPTER_CONFIG,
    digest as digest,
)
from dp_grape_hf.publishing.publisher import (
    Publisher as Publisher,
    adapters_of as adapters_of,
)
from dp_grape_hf.publishing.statement import (
    epsilon_text as epsilon_text,
    metadata_of as metadata_of,
    rows_of as rows_of,
)
from dp_grape_hf.publishing.verification import (
    ABSENT as ABSENT,
    MISMATCH as MISMATCH,
    SECOND_OPINION as SECOND_OPINION,
    verify as verify,
)
