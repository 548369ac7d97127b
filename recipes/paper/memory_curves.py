"""The simulated memory of steps over batch sizes: what the paper's figures of memory show.

    python -m recipes.paper.memory_curves --only RoBERTa --output_dir recipes/paper/results/memory

The models and their shapes come from ``gpu_report``; weights have 32 bits. A step is simulated as
``dp-grape memory`` does it, without a GPU, half a minute each. Each model is a JSON file with the
peaks in bytes by method and batch size (B samples in one physical batch), from which
``recipes.report.figures`` draws. ``DP-Adam, materialised`` keeps a whole gradient of every sample,
as the paper's DP-Adam does: its headline numbers are compared with that one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dp_grape_hf.gradients import GradSampleMode
from dp_grape_hf.memory import ADAMW, Setting, simulate
from recipes.common.provenance import origin, write
from recipes.gpu_report.models import MODELS
from recipes.gpu_report.table import DP_ADAM, MATERIALISED

RESULTS = Path(__file__).with_name("results") / "memory"
METHODS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"method": ADAMW},
    DP_ADAM: {"method": "dp_adam"},
    MATERIALISED: {
        "method": "dp_adam",
        "grad_sample_mode": GradSampleMode.MATERIALISE,
    },
    "DPZero": {"method": "dpzero"},
}
"""What is simulated beside DP-GRAPE, and its options."""

_ROBERTA, _VIT, *_OPT = [name for name in MODELS if "LoRA" not in name]
CURVES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _ROBERTA: ((1, 40, 128), (4, 16, 64, 256)),
    _VIT: ((50, 200, 500), (64,)),
    **{name: ((1, 24), (MODELS[name].rank,)) for name in _OPT},
}
"""The batch sizes of a model, and the ranks of DP-GRAPE."""


def curves_of(name: str, batches: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """Returns the peaks of a model, in bytes: {method: {batch size: peak}}."""
    model = MODELS[name]
    found: dict[str, dict[str, int]] = {}
    ways = METHODS | {f"DP-GRAPE, r = {rank}": {"rank": rank} for rank in ranks}
    with tqdm(total=len(ways) * len(batches), desc=name, disable=None) as bar:
        for title, options in ways.items():
            for size in batches:
                setting = Setting(batch_size=size, **options)
                peak = simulate(model.build, model.inputs, setting).total
                found.setdefault(title, {})[str(size)] = peak
                bar.update()
    return {"model": name, "memory_curves": found, **origin()}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulates the models that are asked for, and writes a file for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regular expression for names of models")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    for name, (batches, ranks) in CURVES.items():
        if re.search(options.only, name):
            slug = re.sub(r"[^a-z0-9.]+", "-", name.split(",")[0].lower())
            write(options.output_dir / f"{slug}.json", curves_of(name, batches, ranks))


if __name__ == "__main__":
    main()
