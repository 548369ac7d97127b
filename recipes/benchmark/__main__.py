"""Time one logical step: plain AdamW, DP-GRAPE, DP-Adam, and Opacus with hooks and ghost clipping.

    python -m recipes.benchmark
    python -m recipes.benchmark --model vit --length 196 --batch_size 32 --rounds 20

Needs Opacus (the ``benchmark`` extra). All methods train the same model from the same weights on
the same batch, in one process; rounds interleave them, so that a busy moment of the machine hits
all of them alike. A step is everything between two batches: forward, backward, clip, noise, record,
update. Prints medians and the median of the ratios within a round, of the time on the clock and, in
parentheses, of the processor time of all threads, which is steadier where the machine has other
things to do. Takes about two minutes on two CPU cores.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from recipes.benchmark.methods import METHODS, USUAL
from recipes.benchmark.models import TITLES, Setting
from recipes.benchmark.timing import as_markdown, measure, remarks
from recipes.common.provenance import origin, versions, write

ROUNDS, WARMUP = 12, 2


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and return what ``--json`` writes."""
    options = parse(argv)
    setting = Setting(**{f.name: getattr(options, f.name) for f in fields(Setting)})
    device = torch.device(options.device)
    results = measure(setting, options.methods, options.rounds, options.warmup, device)
    more = {"threads": torch.get_num_threads(), "versions": versions("dp_grape_hf", "opacus")}
    record = {**origin(), **more, "setting": vars(setting), "results": results}
    sys.stdout.write(f"{as_markdown([record])}\n{remarks(results)}")
    if options.json is not None:
        write(options.json, record)
    return record


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    for f in fields(Setting):
        if f.type == "bool":
            add(f"--{f.name}", action="store_true")
        elif f.name == "model":
            add("--model", choices=TITLES, default=f.default)
        else:
            add(f"--{f.name}", type=type(f.default), default=f.default)
    add("--methods", nargs="+", choices=METHODS, default=USUAL)
    add("--rounds", type=int, default=ROUNDS)
    add("--warmup", type=int, default=WARMUP)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    return options


if __name__ == "__main__":
    main()
