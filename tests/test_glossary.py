"""The glossary has every public name, and every name in the glossary exists."""

import argparse
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

import dp_grape_hf
from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.accounting import ACCOUNTANTS
from dp_grape_hf.arguments import METHODS
from dp_grape_hf.cli import options
from dp_grape_hf.cli.main import COMMANDS
from dp_grape_hf.ledger import LEDGER_NAME, Mechanism
from dp_grape_hf.options import OPTIONS
from dp_grape_hf.trainer.callbacks import PRIVATE_LOGS

ROOT = Path(__file__).resolve().parent.parent
OPTION_NAMES = {*OPTIONS, *(o.short for o in OPTIONS.values() if o.short)}
OF_HOST = {field.name for field in fields(TrainingArguments)}
EXPORTED = {*dp_grape_hf.__all__, *dp_grape_hf._SUBPACKAGE_OF}


def command_options():
    found = set()
    for command in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        getattr(options, f"add_{command}")(parser)
        found |= {name.lstrip("-") for a in parser._actions for name in a.option_strings}
    return found - OPTION_NAMES - OF_HOST


def names_in(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    return {span.removeprefix("dp-grape ").partition("=")[0].lstrip("-") for span in spans}


PUBLIC = {
    "names to import": (EXPORTED, "recipes/guide/glossary.md"),
    "commands": ({*COMMANDS}, "recipes/guide/glossary.md"),
    "options of commands": (command_options(), "recipes/guide/glossary.md"),
    "keys in logs": (PRIVATE_LOGS, "recipes/guide/glossary.md"),
    "options of a run": (OPTION_NAMES, "dp_grape_hf/arguments/README.md"),
}


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_public_name_is_in_the_glossary(kind):
    names, page = PUBLIC[kind]
    assert names
    assert not names - names_in(page), f"add a row to {page}"


def test_every_name_in_the_glossary_exists():
    known = {name for names, _ in PUBLIC.values() for name in names} | OF_HOST
    known |= {field.name for field in fields(DPGrapeTrainingArguments)}
    known |= {
        *inspect.signature(DPGrapeTrainer.__init__).parameters,
        *(f.name for f in fields(Mechanism)),
    }
    known |= {*METHODS, *ACCOUNTANTS, LEDGER_NAME, "README.md"}
    known |= {choice for o in OPTIONS.values() for choice in re.findall(r"'(\w+)'", o.range.needed)}
    known |= {f"trainer.{n}" for n in ("ledger", "publisher", "privacy_spent()")}
    known |= {
        "Trainer",
        "TrainingArguments",
        "Seq2SeqTrainer",
        "AutoModelFor...",
    }  # of transformers
    known |= {"from dp_grape_hf import ...", "pip install 'dp_grape_hf[sft]'", "len(train_dataset)"}
    assert not names_in("recipes/guide/glossary.md") - known
    for name in EXPORTED:
        assert hasattr(dp_grape_hf, name), name
    for name in ("ledger", "publisher", "privacy_spent"):
        assert hasattr(DPGrapeTrainer, name), name


def anchor_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("dp_grape_hf/*/README.md")), ids=lambda page: page.parent.name
)
def test_a_page_of_a_subpackage_has_no_forward_reference(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    introduction = text.partition("\n## ")[0]
    assert "recipes/guide/glossary.md" in introduction, "link the glossary before the first section"
    text = re.sub(r"<!-- table.*?<!-- end -->", "", text, flags=re.S)  # of options, to look up
    begins = {anchor_of(found[1]): found.start() for found in re.finditer(r"^#+ (.*)$", text, re.M)}
    links = re.finditer(r"\]\(#([\w-]+)\)", text)
    later = {found[1] for found in links if begins.get(found[1], 0) > found.start()}
    assert not later, "define it here, or move that section before this one"
