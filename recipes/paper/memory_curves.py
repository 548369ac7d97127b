"""The simulated memory of steps over batch sizes, for the paper's figures of memory.

    python -m recipes.paper.memory_curves --only RoBERTa --output_dir recipes/paper/results/memory

``memory_curves.yaml`` lists models, methods and batch sizes. Each step is simulated without a GPU,
like ``dp-grape memory``, which takes half a minute. Weights are float32. Each model is a JSON file
with the peaks in bytes by method and batch size, from which ``recipes.report.figures`` draws.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from dp_grape_hf.memory import Setting, simulate
from recipes.common.provenance import origin, write
from recipes.gpu_report.models import MODELS

RESULTS = Path(__file__).with_name("results") / "memory"
PLAN: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def curves_of(name: str, batches: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """Returns the peaks of a model, in bytes: {method: {batch size: peak}}."""
    found: dict[str, dict[str, int]] = {}
    ways = PLAN["methods"] | {f"DP-GRAPE, r = {rank}": {"rank": rank} for rank in ranks}
    for title, options in tqdm(ways.items(), desc=name, disable=None):
        for size in batches:
            setting = Setting(batch_size=size, **options)
            peak = simulate(MODELS[name].build, MODELS[name].inputs, setting).total
            found.setdefault(title, {})[str(size)] = peak
    return {"model": name, "memory_curves": found, **origin()}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulates the models that are asked for, and writes a file for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regular expression for names of models")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    for name, sizes in PLAN["models"].items():
        if re.search(options.only, name):
            slug = re.sub(r"[^a-z0-9.]+", "-", name.split(",")[0].lower())
            write(options.output_dir / f"{slug}.json", curves_of(name, **sizes))


if __name__ == "__main__":
    main()
