"""``accelerate launch -m recipes.digits``, and ``make demo``: see ``train``."""

from transformers.utils import logging

from recipes.digits.train import main, parse

if __name__ == "__main__":
    parsed = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # no bars for saving and loading; training has its own bar
    main(parsed)
