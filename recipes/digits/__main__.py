"""``accelerate launch -m recipes.digits``, and ``make demo``: see ``train``."""

from __future__ import annotations

from transformers.utils import logging

from recipes.digits.train import main, parse

if __name__ == "__main__":
    parsed = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # of saving and loading half a megabyte; training keeps its own
    main(*parsed)
