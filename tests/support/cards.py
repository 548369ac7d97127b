"""A model card taken apart: its sections, and the rows of its table."""

import re


def rows(card):
    found = re.findall(r"^\| (.+?) \| (.+?) \|$", section(card, "Privacy"), re.MULTILINE)
    return {name: value for name, value in found if name != "Quantity"}


def section(card, title):
    return next((p for p in card.split("\n## ") if p.startswith(f"{title}\n")), "")
