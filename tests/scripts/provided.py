"""Runs a script in this process, with what it would fetch from elsewhere provided on the spot.

What is provided stands in ``PROVIDED``: metrics, which the package evaluate reads from the Hub; the
sentences of nltk, whose model is a download; sound and images, where a library of its own decodes
them. The script's text is run as it is.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import runpy
import sys
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dp_grape_hf import PrivacyError
from recipes.report.checks import FAILED, REFUSED, TRAINED

# ---- What is provided ----


def _share(predictions: Any, references: Any) -> float:
    """The share of predictions that are what they should be."""
    pairs = list(zip(predictions, references, strict=True))
    return float(np.mean([np.array_equal(found, wanted) for found, wanted in pairs]))


def _squad(predictions: Any, references: Any) -> float:
    answers = {row["id"]: row["answers"]["text"] for row in references}
    return float(np.mean([row["prediction_text"] in answers[row["id"]] for row in predictions]))


_OVERALL = ("overall_precision", "overall_recall", "overall_f1", "overall_accuracy")
METRICS: Mapping[str, Callable[[Any, Any], Any]] = {
    "accuracy": lambda found, wanted: {"accuracy": _share(found, wanted)},
    "rouge": lambda found, wanted: {"rouge1": _share(found, wanted)},
    "sacrebleu": lambda found, wanted: {"score": 100 * _share(found, [w[0] for w in wanted])},
    "seqeval": lambda found, wanted: dict.fromkeys(_OVERALL, _share(found, wanted)),
    "squad": lambda found, wanted: {"exact_match": 100 * _squad(found, wanted)},
    "wer": lambda found, wanted: 1 - _share(found, wanted),
}
"""What stands for a metric: the share of exact matches, under the metric's keys."""


class _Metric:
    def __init__(self, name: str) -> None:
        self.name = name

    def compute(self, predictions: Any, references: Any, **options: Any) -> Any:
        return METRICS[self.name](predictions, references)


def _encoded(self: Any, value: Any) -> dict[str, Any]:
    """Returns where a sound is kept."""
    value = value if isinstance(value, Mapping) else {"path": str(value)}
    return {"bytes": value.get("bytes"), "path": value.get("path")}


def _decoded(self: Any, value: Mapping[str, Any], **ignored: Any) -> dict[str, Any]:
    """Returns a sound of 16 bits as an array between -1 and 1."""
    source = value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"])
    with wave.open(source) as sound:
        frames = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
        return {"array": frames / 32768, "sampling_rate": sound.getframerate()}


def _image(path: str, *ignored: Any, **options: Any) -> Tensor:
    """Returns an image as 3 x height x width bytes."""
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)


PROVIDED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "evaluate.load": ("metric", lambda name, *ignored, **options: _Metric(name)),
    "datasets.Audio.encode_example": ("decoder of sound", _encoded),
    "datasets.Audio.decode_example": ("decoder of sound", _decoded),
    "torchvision.io.read_image": ("decoder of images", _image),
    "nltk.data.find": ("sentences", lambda name: name),
    "nltk.sent_tokenize": ("sentences", lambda text: text.split(". ")),
}
"""What stands in the place of what would be fetched: what it is called, and the function."""


@contextmanager
def provided() -> Iterator[set[str]]:
    """Provides what there is a package for, and yields what of it is used."""
    used: set[str] = set()

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            used.add(what)
            return function(*args, **options)

        return noted

    with ExitStack() as patches:
        for name, (what, function) in PROVIDED.items():
            if importlib.util.find_spec(name.partition(".")[0]):
                patches.enter_context(mock.patch(name, noting(what, function)))
        yield used


# ---- The run ----


class _Heard(logging.Handler):
    """Keeps the warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def run(script: Path, words: Sequence[str]) -> dict[str, Any]:
    """Runs a script as ``python SCRIPT WORDS`` does.

    Returns:
        ``outcome``; ``reason``, what it was refused or failed with; ``warnings``, those of this
        package; and ``provided``, what it used of ``PROVIDED``.
    """
    heard, outcome, reason = _Heard(), TRAINED, None
    package = logging.getLogger("dp_grape_hf")
    package.addHandler(heard)
    with (
        mock.patch.object(sys, "argv", [str(script), *words]),
        mock.patch.object(sys, "path", [str(script.parent.resolve()), *sys.path]),
        provided() as used,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except PrivacyError as error:
            outcome, reason = REFUSED, str(error)
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit) or error.code:
                logging.getLogger(__name__).exception("%s failed", script.name)
                outcome, reason = FAILED, f"{type(error).__name__}: {error}"
        finally:
            package.removeHandler(heard)
    return {"outcome": outcome, "reason": reason, "warnings": heard.said, "provided": sorted(used)}


def run_in(folder: Path, script: str, words: Sequence[str]) -> None:
    """Runs a script of a folder, in it, and leaves ``log.txt`` and ``result.json`` there."""
    os.chdir(folder)
    with Path("log.txt").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
        Path("result.json").write_text(json.dumps(run(Path(script), words)))
        sys.stdout.flush()
