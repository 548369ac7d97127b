"""Count the kernels that a step launches on a GPU, without a GPU.

    python -m recipes.benchmark.kernels --json recipes/benchmark/results/kernels.json

If a model is small or computes in 16 bits, a GPU waits for the processor to launch kernels, so
their number determines the time of a step. The step runs on tensors without contents, with the
attention and dropout of a GPU. Each operator that computes something counts once. P was computed in
an earlier step. Takes six minutes of a CPU core.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from dp_grape_hf import memory
from dp_grape_hf.choosing import train_matrices_only
from dp_grape_hf.memory import ADAMW, DP_GRAPE, Step, fake_tensors, prepared
from recipes.benchmark.models import Setting
from recipes.common.markdown import table
from recipes.common.provenance import write

MODELS: Mapping[str, tuple[Setting, bool]] = {
    name: (Setting(**options), options.get("autocast", False))
    for name, options in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
}
"""Models, and whether they run under autocast."""

_NO_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned"),
    *("lift_fresh", "_unsafe_view", "_reshape_alias", "detach", "set_", "resize_", "record_stream"),
    *("_record_function_enter_new", "_record_function_exit"),
)


class Kernels(TorchDispatchMode):
    """Count the calls of each operator that does more than return a view or reserve memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, aliases = func.overloadpacket.__name__, [v.alias_info for v in func._schema.returns]
        is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
        if func.namespace != "prim" and name not in _NO_KERNEL and not is_view:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


MATRICES = "dp_grape_matrices"
"""DP-GRAPE on the weight matrices and the head, which a run with nothing set trains."""


def count(model: Setting, autocast: bool, method: str) -> int:
    """Return the kernels of a step by AdamW or a method, under autocast if asked for."""
    setting = memory.Setting(
        method=DP_GRAPE if method == MATRICES else method,
        batch_size=model.batch_size,
        dtype=model.torch_dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        rank=model.rank,
        redraws=False,
    )
    with fake_tensors(gpu=True):
        network = model.build()
        if method == MATRICES:
            layers = [n for n, module in network.named_modules() if isinstance(module, nn.Linear)]
            train_matrices_only(network, layers[-1])
        built = prepared(network, setting)
        if autocast:
            built.forward = torch.autocast("cpu", torch.bfloat16)(built.forward)
        inputs = model.inputs()
        step = Step(built, inputs, setting)
        step.run()
        with Kernels() as kernels:
            step.run()
        return kernels.calls.total()


def as_markdown(found: Mapping[str, Mapping[str, int]]) -> str:
    """Return the numbers of kernels, and their ratio, as a table in Markdown."""
    rows = [
        [name, f"{n[ADAMW]:,}"]
        + [x for m in (DP_GRAPE, MATRICES) for x in (f"{n[m]:,}", f"{n[m] / n[ADAMW]:.2f}")]
        for name, n in found.items()
    ]
    return table(["Model", "AdamW", "DP-GRAPE", "ratio", "nothing set", "ratio"], rows)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """Count, print the table, and return what ``--json`` writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    found: dict[str, dict[str, int]] = {}
    with tqdm(total=3 * len(MODELS), desc="steps", disable=None) as bar:
        for name, (model, autocast) in MODELS.items():
            for method in (ADAMW, DP_GRAPE, MATRICES):
                found.setdefault(name, {})[method] = count(model, autocast, method)
                bar.update()
    sys.stdout.write(as_markdown(found))
    if options.json is not None:
        write(options.json, found)
    return found


if __name__ == "__main__":
    main()
