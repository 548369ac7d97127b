"""``accelerate launch -m recipes.synthetic_text``: see ``pipeline``."""

from transformers.utils import logging

from recipes.synthetic_text.pipeline import main, parse

if __name__ == "__main__":
    parsed = parse()
    logging.set_verbosity_error()
    main(*parsed)
