"""Labelled images: from the Hub or from files, kept as bytes, and made into batches for a model.

Data come from the Hub or from a folder as ``recipes.paper.data`` reads them, or from a folder with

* the four IDX files of MNIST and Fashion-MNIST, gzipped or not (``train-images-idx3-ubyte.gz``);
* ``NAME_train.npz`` and ``NAME_test.npz``, the path ending with ``NAME``, with ``label`` and either
  ``img``, (N, H, W[, C]) uint8, or ``jpeg`` and ``offsets``: image i is the file
  ``jpeg[offsets[i]:offsets[i + 1]]``.

Each batch is computed from its images alone. Means and deviations of a private data set would be
a further release.

Shapes: N images in a data set, B in a batch, C channels, H x W pixels, S the model's image size.
"""

import gzip
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from recipes.paper.data import load_split

SPLITS = ("train", "test")
_IDX_NAMES = {"train": "train", "test": "t10k"}
_IDX_BYTES = 0x08  # the third byte of an IDX file whose numbers are unsigned bytes


@dataclass(frozen=True)
class Source:
    """The origin of a data set, and its columns."""

    hub: str  # its name on the Hub
    image: str  # the column of the images there
    label: str  # the column of the labels there
    classes: int  # how many labels there are; they are counted from 0


@dataclass
class Images(Dataset[dict[str, Tensor]]):
    """Images and labels in memory; an example has a model's names."""

    pixels: Tensor  # (N, C, H, W), uint8
    labels: Tensor  # (N,)
    lossy: bool = False  # whether they were stored in a form that changed them

    def __len__(self) -> int:
        """Returns N."""
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns an image, (C, H, W) uint8, with its label."""
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


# ---- Loading ----


def load_images(source: Source, path: str | None = None) -> dict[str, Images]:
    """Return the training and the test split; the path is as in ``recipes.paper.data``."""
    splits = _load(source, path)
    for split, images in splits.items():
        found = int(images.labels.min()), int(images.labels.max())
        if found[0] < 0 or found[1] >= source.classes:
            raise ValueError(
                f"The labels of {path or source.hub} ({split}) go from {found[0]} to {found[1]}, "
                f"and those of the task from 0 to {source.classes - 1}."
            )
    return splits


def _load(source: Source, path: str | None) -> dict[str, Images]:
    if path is not None:
        folder = Path(path)
        if any(folder.glob("*-images-idx3-ubyte*")):
            return {split: _from_idx(folder, name) for split, name in _IDX_NAMES.items()}
        archives = {split: Path(f"{path}_{split}.npz") for split in SPLITS}
        if all(archive.is_file() for archive in archives.values()):
            return {split: _from_npz(archive) for split, archive in archives.items()}
    return {split: _from_datasets(load_split(split, path, source.hub), source) for split in SPLITS}


def _from_datasets(data: Any, source: Source) -> Images:
    """Reads a split of a library whose images are decoded when they are asked for."""
    images = [_to_array(image) for image in data[source.image]]
    return _images(images, np.asarray(data[source.label]))


def _from_idx(folder: Path, name: str) -> Images:
    pixels = _read_idx(_only(folder, f"{name}-images-idx3-ubyte*"))
    labels = _read_idx(_only(folder, f"{name}-labels-idx1-ubyte*"))
    return _images(pixels, labels)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} must hold one {pattern}, and holds {len(found)}.")
    return found[0]


def _read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Reads an IDX file of bytes: two zeros, the type, the number of dimensions, sizes, numbers."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if data[:3] != bytes([0, 0, _IDX_BYTES]):
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts with {data[:4]!r}.")
    start = 4 + 4 * data[3]
    sizes = tuple(np.frombuffer(data[4:start], dtype=">u4").tolist())
    numbers = np.frombuffer(data, dtype=np.uint8, offset=start)
    if numbers.size != math.prod(sizes):
        raise ValueError(f"{path} says {sizes}, and holds {numbers.size} numbers.")
    return numbers.reshape(sizes)


def _from_npz(path: Path) -> Images:
    with np.load(path) as archive:
        labels = archive["label"]
        if "img" in archive:
            return _images(archive["img"], labels)
        files, offsets = archive["jpeg"], archive["offsets"]
    ends = itertools.pairwise(offsets.tolist())
    pictures = [Image.open(io.BytesIO(files[start:end].tobytes())) for start, end in ends]
    lossy = any(picture.format == "JPEG" for picture in pictures)
    return _images([_to_array(picture) for picture in pictures], labels, lossy)


def _to_array(picture: Image.Image) -> np.ndarray[Any, Any]:
    """Returns (H, W) of a grey picture, and (H, W, 3) of any other."""
    return np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))


def _images(pixels: Any, labels: np.ndarray[Any, Any], lossy: bool = False) -> Images:
    """Returns images from arrays (N, H, W) or (N, H, W, C), or a list of N such arrays."""
    tensor = torch.tensor(np.stack(pixels) if isinstance(pixels, list) else pixels)
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2).contiguous()
    return Images(tensor, torch.tensor(labels.astype(np.int64)), lossy)


# ---- Batches ----


@dataclass(frozen=True)
class Batches:
    """Collates examples of ``Images``: resizes and normalises whole batches.

    A channel of a pixel is ``(byte / 255 - mean) / std``. Resizing interpolates linearly, and
    averages first where it makes images smaller. Nothing mixes one image with another.
    """

    size: int  # S; images are resized to S x S
    channels: int  # of the model; a grey image is repeated in all of them
    mean: float  # what is subtracted, a constant of the model and never of private images
    std: float  # what is divided by, likewise

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns ``pixel_values``, (B, C, S, S) float32, and ``labels``, (B,)."""
        pixels = torch.stack([example["pixel_values"] for example in examples]).float() / 255
        if pixels.shape[1] not in (1, self.channels):
            raise ValueError(
                f"Images of {pixels.shape[1]} channels do not fit num_channels={self.channels}."
            )
        if pixels.shape[2:] != (self.size, self.size):
            pixels = functional.interpolate(
                pixels, (self.size, self.size), mode="bilinear", antialias=True
            )
        pixels = ((pixels - self.mean) / self.std).expand(-1, self.channels, -1, -1)
        labels = torch.stack([example["labels"] for example in examples])
        return {"pixel_values": pixels.contiguous(), "labels": labels}
