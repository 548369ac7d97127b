"""``dp-grape memory``: the memory of a step, for a model of which there is only a config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig

from dp_grape_hf.comparison import every_method, simulate_all, sizes_of_model
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.fakes import fake_tensors
from dp_grape_hf.fit import GIB, Simulate, largest_batch, turn_each, turn_until_it_fits
from dp_grape_hf.mechanism import Clipping
from dp_grape_hf.memory import DP_GRAPE, METHODS, Setting, compared, simulate
from dp_grape_hf.report import Comparison, Report
from dp_grape_hf.timeline import Peak

_DESCRIPTION = """\
Simulate a training step and print its peak memory, by what the memory is for.

The step is run, forward to update, by the code that trains, on tensors without contents: no GPU
and no weights are needed, only the model's config.

  AdamW           training without privacy, torch's fused kernel
  DP-GRAPE        projected per-sample gradients
  DP-Adam         unprojected, of each weight the form of its gradients that takes least
  DP-Adam dense   unprojected, a gradient of every weight for every sample

--all_methods compares every method of the package instead, at one batch size.

What the GPU takes beyond tensors is not in the figures: the CUDA context, workspaces, fragmentation
and temporary memory inside kernels. --reserve leaves room for it.
"""

_EXAMPLES = """\
What does RoBERTa-large take, what fits a card of 24 GiB, and what would make more fit?

  $ dp-grape memory --model_name_or_path ./roberta-large --batch_size 40 --seq_len 128 \\
      --gpu_memory 24 --knobs

What do the methods take, beside the formulas of the paper?

  $ dp-grape memory --model_name_or_path ./roberta-small --batch_size 16 --seq_len 64 --all_methods
"""

_CHOICES = 4  # options of a multiple-choice question


@dataclass(frozen=True)
class _Head:
    """A kind of head: its class, how architectures with it are called, and its labels."""

    auto_class: str
    suffixes: tuple[str, ...]
    labels: Callable[[Any, int, int], dict[str, Tensor]]  # (config, B, T)
    inputs: str = "text"


def _per_sample(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    several = config.problem_type == "multi_label_classification"
    shape = (batch_size, config.num_labels) if several else (batch_size,)
    numbers = several or config.num_labels == 1
    return {"labels": torch.zeros(shape, dtype=torch.float32 if numbers else torch.long)}


def _per_choice(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    return {"labels": torch.zeros(batch_size, dtype=torch.long)}


def _per_token(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    return {"labels": torch.zeros(batch_size, seq_len, dtype=torch.long)}


def _span(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    names = ("start_positions", "end_positions")
    return {name: torch.zeros(batch_size, dtype=torch.long) for name in names}


_HEADS = {
    "sequence-classification": _Head(
        "AutoModelForSequenceClassification", ("ForSequenceClassification",), _per_sample
    ),
    "token-classification": _Head(
        "AutoModelForTokenClassification", ("ForTokenClassification",), _per_token
    ),
    "question-answering": _Head("AutoModelForQuestionAnswering", ("ForQuestionAnswering",), _span),
    "multiple-choice": _Head(
        "AutoModelForMultipleChoice", ("ForMultipleChoice",), _per_choice, "choices"
    ),
    "masked-lm": _Head("AutoModelForMaskedLM", ("ForMaskedLM",), _per_token),
    "causal-lm": _Head("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), _per_token),
    "seq2seq-lm": _Head("AutoModelForSeq2SeqLM", ("ForConditionalGeneration",), _per_token),
    "speech-seq2seq": _Head(
        "AutoModelForSpeechSeq2Seq", ("WhisperForConditionalGeneration",), _per_token, "speech"
    ),
    "image-classification": _Head(
        "AutoModelForImageClassification", ("ForImageClassification",), _per_sample, "image"
    ),
}


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape memory``: the memory of a step, before there is a GPU."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.set_defaults(run=_memory)
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="path", help="folder or file of a config")
    add("--head", choices=_HEADS, metavar="head", help=f"{', '.join(_HEADS)} (default: config's)")
    add("--num_labels", type=_positive, metavar="n", help="of a classifier (default: config's)")
    add("--batch_size", type=_positive, required=True, metavar="B", help="the physical batch")
    add("--seq_len", type=_positive, default=128, metavar="T", help="tokens (default: 128)")
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="method",
        help=f"of {', '.join(METHODS)} (default: all of these)",
    )
    add("--all_methods", action="store_true", help="compare every method")
    add("--rank", "--r", type=_positive, default=16, metavar="r", help="default: 16")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--gradient_checkpointing", action="store_true", help="recompute activations")
    add("--clipping", choices=Clipping, default=Clipping.FLAT, help="default: flat")
    add("--project_embeddings", action="store_true", help="and vocabulary heads")
    add("--gpu_memory", type=float, metavar="GiB", help="also find the largest batch that fits")
    add("--reserve", type=float, default=1.0, metavar="GiB", help="left to CUDA (default: 1)")
    add("--knobs", action="store_true", help="show what saves memory also where the batch fits")
    add("--json", action="store_true", help="print JSON instead of tables; memory in bytes")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _memory(args: argparse.Namespace) -> str:
    _refuse_combinations(args)
    request = _Request.of(args)
    if args.all_methods:
        return _compare(request, args)
    progress = tqdm(disable=None, unit=" steps", desc="simulating")

    @cache
    def peak_of(setting: Setting) -> Peak:
        progress.update()
        return simulate(request.build, request.batch, setting)

    names = list(dict.fromkeys(args.methods or METHODS))
    settings = {name: compared(name, request.setting) for name in names}
    peaks = {name: peak_of(setting) for name, setting in settings.items()}
    report = Report(request.model, request.parameters, request.length, request.setting, peaks)
    name = DP_GRAPE if DP_GRAPE in settings else names[0]
    chosen = settings[name]
    limit = None
    if args.gpu_memory is not None:
        report.card = (args.gpu_memory, args.reserve)
        limit = int((args.gpu_memory - args.reserve) * GIB)
        report.largest = {
            method: largest_batch(_total(peak_of, setting), limit, setting.batch_size)
            for method, setting in settings.items()
        }
    too_large = limit is not None and peak_of(chosen).total > limit
    if args.knobs or too_large:
        report.chosen, report.turned = name, turn_each(peak_of, chosen)
    if limit is not None and too_large:
        report.fit = turn_until_it_fits(peak_of, chosen, limit, report.turned)
    progress.close()
    return report.as_json() if args.json else report.as_text()


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.gpu_memory is not None and not args.gpu_memory > args.reserve >= 0:
        raise PrivacyError(
            f"gpu_memory={args.gpu_memory:g} leaves no room beside reserve={args.reserve:g}; both "
            "are in GiB, and the reserve must be at least 0."
        )
    for name in ("methods", "gpu_memory", "knobs"):
        if args.all_methods and getattr(args, name):
            raise PrivacyError(
                f"all_methods=True and {name}={getattr(args, name)!r}: --all_methods compares "
                "every method at one batch size, and searches for nothing. Leave one of them out."
            )


def _compare(request: _Request, args: argparse.Namespace) -> str:
    """Returns the tables of every method."""
    rows = every_method(request.setting)
    with tqdm(disable=None, total=len(rows), desc="every method") as progress:
        simulate_all(request.build, request.batch, rows, progress.update)
    sizes = sizes_of_model(request.build, request.setting)
    report = Comparison(
        Report(request.model, request.parameters, request.length, request.setting, {}),
        rows,
        sizes,
    )
    return report.as_json() if args.json else report.as_text()


def _total(peak_of: Simulate, setting: Setting) -> Callable[[int], int]:
    """Returns the peak in bytes as a function of the batch size."""
    return lambda size: peak_of(replace(setting, batch_size=size)).total


class _Request:
    """The model and the batches that were asked for."""

    def __init__(self, config: Any, head: _Head, seq_len: int, setting: Setting) -> None:
        self.config, self.seq_len, self.setting = config, seq_len, setting
        self._head = head
        with fake_tensors():
            model = self.build(setting.dtype)
        self.model = type(model).__name__
        self.parameters = sum(p.numel() for p in model.parameters())
        height, width = _sides(config) if head.inputs == "image" else (0, 0)
        self.length = f"{height}x{width} pixels" if height else f"{seq_len} tokens"

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Request:
        """Returns what the command line asks for."""
        name = args.model_name_or_path
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise PrivacyError(
                f"model_name_or_path={name!r} has no config that Transformers can read: {error}"
            ) from error
        if args.num_labels is not None:
            config.num_labels = args.num_labels
        most = getattr(config, "max_position_embeddings", None) or args.seq_len
        if args.seq_len > most:
            raise PrivacyError(f"seq_len={args.seq_len} is more than the model's {most} positions.")
        setting = Setting(
            batch_size=args.batch_size,
            dtype=getattr(torch, args.dtype),
            gradient_checkpointing=args.gradient_checkpointing,
            rank=args.rank,
            clipping=args.clipping,
            project_embeddings=args.project_embeddings,
        )
        return cls(config, _head_of(config, args.head), args.seq_len, setting)

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Returns the model, with weights of that type."""
        auto_class = getattr(transformers, self._head.auto_class)
        try:
            return auto_class.from_config(self.config, dtype=dtype)
        except ValueError as error:
            raise PrivacyError(
                f"{type(self.config).__name__} makes no {self._head.auto_class}: {error}"
            ) from error

    def batch(self, size: int) -> dict[str, Tensor]:
        """Returns a batch with the shapes of a real one."""
        inputs = _INPUTS[self._head.inputs](self.config, size, self.seq_len)
        return inputs | self._head.labels(self.config, size, self.seq_len)


def _head_of(config: Any, name: str | None) -> _Head:
    if name is not None:
        return _HEADS[name]
    architecture = (config.architectures or [""])[0]
    fitting = {
        suffix: head
        for head in _HEADS.values()
        for suffix in head.suffixes
        if architecture.endswith(suffix)
    }
    if not fitting:
        raise PrivacyError(
            f"The config names the architecture {architecture!r}, from which no head follows. Give "
            f"--head, one of: {', '.join(_HEADS)}."
        )
    return fitting[max(fitting, key=len)]


def _text(config: Any, *shape: int) -> dict[str, Tensor]:
    words = getattr(config.get_text_config(), "vocab_size", 2)
    ids = torch.randint(words, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sides(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _image(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(batch_size, config.num_channels, *_sides(config))}


def _speech(config: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.zeros(batch_size, config.num_mel_bins, frames)}


_INPUTS: dict[str, Callable[[Any, int, int], dict[str, Tensor]]] = {
    "text": _text,
    "choices": lambda config, size, length: _text(config, size, _CHOICES, length),
    "image": _image,
    "speech": _speech,
}
