"""Ledgers for tests: a mechanism, and edits with the digests left alone or made anew."""

import json
from dataclasses import replace

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.ledger.entries import decoded, extended
from dp_grape_hf.publishing.model_files import digests
from tests.support import mechanism

MECHANISM = replace(
    mechanism.MECHANISM,
    noise_multiplier=1.5,
    sample_rate=0.0625,
    max_grad_norm=0.5,
    expected_batch_size=64,
    num_samples=1024,
    target_epsilon=6.0,
    accountant="prv",
    projection_rank=16,
)

# Beside a model, and not of it.
OF_THE_TRAINER = {"training_args.bin", "trainer_state.json", f".{LEDGER_NAME}.lock"}


def ledger_of(steps, mechanism=MECHANISM, **start):
    ledger = Ledger.start(mechanism, **start)
    if steps:
        ledger.record(steps)
    return ledger


def note_weights(folder, ledger=None):
    """Has a ledger, or the folder's own, note what lies in a folder, as saving it does."""
    ledger = ledger or Ledger.load(folder / LEDGER_NAME)
    updates = ledger.steps if ledger.updates is None else ledger.updates
    files = {name: digest for name, digest in digests(folder).items() if name not in OF_THE_TRAINER}
    ledger.snapshot(updates, files).save(folder / LEDGER_NAME)


def content_of(path):
    """Returns the content of a file: its version, and its entries as they are, in their lines."""
    version, *entries = map(json.loads, path.read_text().splitlines())
    return {**version, "entries": entries}


def edit(path, change):
    content = content_of(path)
    change(content)
    entries = content.pop("entries")
    path.write_text("".join(json.dumps(line) + "\n" for line in (content, *entries)))


def rewrite(path, change):
    """Changes the content of a file and all digests, as far as its entries can be read."""

    def consistently(content):
        change(content)
        links = ()
        for number, entry in enumerate(content["entries"], 1):
            bare = {name: value for name, value in entry.items() if name != "digest"}
            try:
                links = extended(links, decoded(bare, number))
            except (PrivacyError, OverflowError):
                return
            entry["digest"] = links[-1].digest

    edit(path, consistently)
