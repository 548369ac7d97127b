"""The memory of a step of every method, simulated, next to the formulas of the paper's table.

python -m recipes.paper.memory --model_name_or_path FOLDER --batch_size 16 --seq_len 64
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tqdm import tqdm

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import GradSampleMode
from dp_grape_hf.memory import (
    ADAMW,
    OPTIMIZER,
    PROJECTIONS,
    TITLES,
    Footprint,
    ModelOfConfig,
    Setting,
    fake_tensors,
    heading,
    read_config,
    simulate,
)
from dp_grape_hf.projections import input_dimensions, placements, projection_targets
from dp_grape_hf.tables import table
from recipes.paper.methods import METHODS

NUMBER = 4  # bytes of a float32

KINDS = ("gradients", "optimizer", "projectors")
_WHOLE, _PROJECTED = "2 * sum m n", "2 * r sum n"
FORMULAS: Mapping[str, tuple[str, str, str]] = {
    "adam": ("sum m n", _WHOLE, "0"),
    "galore": ("sum m n", _PROJECTED, "r sum m"),
    "dp_adam": ("B * sum m n", _WHOLE, "0"),
    "dp_galore": ("B * sum m n", _PROJECTED, "r sum m"),
    "dp_grape": ("B * r sum n", _PROJECTED, "r max m"),
}
"""The paper's table ``memory-usage-comp``: by method, the numbers of each kind.

The weights are m x n, of which m is projected to r; B is the batch. Parameters that are not
projected count as they do in DP-Adam (paper, Algorithm 1): all their numbers are a part of both
sums that weights have.
"""


def formulas_of(method: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each kind by the paper's formulas; none for a method without any."""
    texts = FORMULAS.get("adam" if method == ADAMW else method, ())
    factors = [[sizes[p] if p in sizes else int(p) for p in text.split(" * ")] for text in texts]
    return {kind: NUMBER * prod(own) for kind, own in zip(KINDS, factors, strict=False)}


def simulated_of(footprint: Footprint) -> dict[str, int]:
    """Return the bytes of each kind in a simulated step."""
    kept = footprint.at_end
    values = footprint.gradients, kept[OPTIMIZER], kept[PROJECTIONS]
    return dict(zip(KINDS, values, strict=True))


def sizes_of(model: ModelOfConfig, setting: Setting) -> dict[str, int]:
    """Return what the formulas are made of, as a setting projects a model."""
    with fake_tensors():
        built = model.build(setting.dtype)
    trainable = {n: p for n, p in built.named_parameters() if p.requires_grad}
    shapes = {name: tuple(trainable[name].shape) for name in projection_targets(built, trainable)}
    placed = placements(shapes, setting.rank, input_dims=input_dimensions(built))
    numbers = {name: parameter.numel() for name, parameter in trainable.items()}
    kept = {name: place.rank * numbers[name] // place.rows for name, place in placed.items()}
    projections = [place.rank * place.rows for place in placed.values()]
    return {
        "B": setting.batch_size,
        "sum m n": sum(numbers.values()),
        "r sum n": sum((numbers | kept).values()),
        "r sum m": sum(projections),
        "r max m": max(projections, default=0),
    }


@dataclass
class Compared:
    """A method, and the results of its simulation."""

    title: str  # its name, with the way it clips where there are several
    setting: Setting  # what was run
    footprint: Footprint | None = None  # what a step takes; None if there can be no such run
    refused: str = ""  # why there can be none


def every_method(setting: Setting) -> list[Compared]:
    """Return AdamW and all methods, those with whole gradients in each way to clip."""
    found = [Compared(TITLES[ADAMW], replace(setting, method=ADAMW))]
    for name, row in METHODS.items():
        several = not (row.projected or row.adapter or row.query)
        for mode in GradSampleMode if several else (setting.grad_sample_mode,):
            title = f"{row.title} {mode}" if several else row.title
            found.append(Compared(title, replace(setting, method=name, grad_sample_mode=mode)))
    return found


def compare(model: ModelOfConfig, rows: Sequence[Compared]) -> None:
    """Simulate a step by every method, and note what it takes or why it is refused."""
    for row in tqdm(rows, desc="every method", disable=None):
        try:
            row.footprint = simulate(model.build, model.batch, row.setting)
        except PrivacyError as error:
            row.refused = str(error)


def as_text(rows: Sequence[Compared], sizes: Mapping[str, int]) -> str:
    """Return the tables in MiB, and how to read them."""
    steps = [["a step", "peak, MiB", "reached in"]]
    kinds = [["memory, MiB", *(title for kind in KINDS for title in (kind, "formula"))]]
    for row in rows:
        if (taken := row.footprint) is None:
            steps.append([row.title, "refused", ""])
            continue
        steps.append([row.title, _mib(taken.total), taken.phase])
        said = formulas_of(row.setting.method, sizes)
        found = simulated_of(taken)
        both = ((_mib(found[k]), _mib(said[k]) if said else "") for k in KINDS)
        kinds.append([row.title, *(cell for pair in both for cell in pair)])
    formulas = [["formula (4 bytes a number)", *KINDS]]
    formulas += [[METHODS[method].title, *texts] for method, texts in FORMULAS.items()]
    refused = "".join(f"{row.title}: {row.refused}\n" for row in rows if row.refused)
    return (
        f"{table(steps, '<>')}{refused}\n{table(kinds, '<>')}\n{table(formulas)}"
        "Sums are over the weights m x n, of which m is projected; parameters that are not "
        "projected count\nas in DP-Adam. The formulas count gradients per sample (DP) or of "
        "the batch. What is simulated is\nthe most of those and of their sum at one time, in "
        "the form in which they are kept. P is kept for\nevery weight.\n"
        "LoRA: rank r on all linear layers.\n"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the comparison for the model of a config."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model_name_or_path", required=True, help="folder or file of a config")
    parser.add_argument("--batch_size", type=int, required=True, help="the physical batch")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args(words)
    config = read_config("model_name_or_path", args.model_name_or_path, None)
    model = ModelOfConfig(config, None, args.seq_len)
    setting = Setting(batch_size=args.batch_size, rank=args.rank)
    rows = every_method(setting)
    compare(model, rows)
    text = as_text(rows, sizes_of(model, setting))
    sys.stdout.write(f"{heading(model, setting)}\n{text}")


if __name__ == "__main__":
    main()
