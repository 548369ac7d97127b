"""Tiny models and made-up data for the example scripts of transformers, in the forms they read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
import yaml
from PIL import Image
from scipy.io import wavfile
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TRAINING, VALIDATION = 240, 12  # examples
SPECIAL = {
    f"{name}_token": f"[{name.upper()}]"
    for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
}
WORDS = (
    "a bird cat dog fish horse river road house tree sees finds likes takes makes old new red blue "
    "small one two three and but with near under every no who what where"
).split()
VOCABULARY = [*SPECIAL.values(), *WORDS]
LONGEST, IMAGE, RATE = 64, 16, 16_000


# ---- Models ----


_TABLE = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = _TABLE["models"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words of ``VOCABULARY``."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LONGEST, **SPECIAL)


def save_in_cache(name: str, cache: Path) -> str:
    """Saves a model where the Hub's client keeps what it fetched, and returns its name there."""
    repository = cache / "hub" / f"models--tiny--{name}"
    save_model(name, repository / "snapshots" / "0")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text("0")
    return f"tiny/{name}"


def save_model(name: str, folder: Path) -> None:
    """Saves a model with random weights, and what prepares its inputs."""
    kind, settings = MODELS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    if model.can_generate():
        model.generation_config.max_length = 20
    model.save_pretrained(folder)
    if name in ("vit", "mae"):
        size = {"height": IMAGE, "width": IMAGE}
        transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    elif name == "clip":
        size = {"height": IMAGE, "width": IMAGE}
        transformers.CLIPImageProcessor(size=size, crop_size=size).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    elif name == "wav2vec2":
        extractor = transformers.Wav2Vec2FeatureExtractor(
            sampling_rate=RATE, return_attention_mask=True
        )
        extractor.save_pretrained(folder)
    else:
        tokenizer().save_pretrained(folder)


# ---- Data ----


def _text(chance: random.Random, least: int = 6, most: int = 14) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))


def _question(chance: random.Random, index: int) -> dict[str, Any]:
    context = _text(chance, 12, 34 if index % 6 == 0 else 20).split()
    first = chance.randrange(len(context) - 2)
    answer = {
        "text": [" ".join(context[first : first + 2])],
        "answer_start": [len(" ".join(context[:first])) + (first > 0)],
    }
    question = _text(chance, 3, 5)
    return {
        "id": str(index),
        "title": "a",
        "context": " ".join(context),
        "question": question,
        "answers": answer,
    }


def _tagged(chance: random.Random, index: int) -> dict[str, Any]:
    tokens = _text(chance).split()
    return {"tokens": tokens, "ner_tags": ["B-X" if len(word) > 4 else "O" for word in tokens]}


def _choice(chance: random.Random, index: int) -> dict[str, Any]:
    endings = {f"ending{i}": _text(chance, 2, 5) for i in range(4)}
    return {
        "video-id": str(index),
        "sent1": _text(chance, 3, 8),
        "sent2": chance.choice(WORDS),
        **endings,
        "label": index % 4,
    }


def _summarised(chance: random.Random, index: int) -> dict[str, Any]:
    text = _text(chance)
    return {"text": text, "summary": text[: len(text) // 2].rpartition(" ")[0]}


def _translated(chance: random.Random, index: int) -> dict[str, Any]:
    text = _text(chance, 4, 8)
    return {"translation": {"en": text, "de": " ".join(reversed(text.split()))}}


Row = Callable[[random.Random, int], dict[str, Any]]
ROWS: Mapping[str, Row] = {
    "classified": lambda chance, index: {"sentence": _text(chance), "label": index % 2},
    "plain": lambda chance, index: {"text": _text(chance)},
    "questions": _question,
    "tagged": _tagged,
    "choices": _choice,
    "summarised": _summarised,
    "translated": _translated,
}
"""Rows of a file, by what they are."""

SPLITS = {"train": TRAINING, "validation": VALIDATION}


def save_data(kind: str, folder: Path, as_csv: bool = False) -> None:
    """Saves data of a kind of ``ROWS``, ``images``, ``captions``, or ``sounds``."""
    if kind in ROWS:
        save_rows(kind, folder, "csv" if as_csv else "json")
    elif kind == "captions":
        save_captions(folder)
    elif kind == "images":
        save_images(folder / "images")
    else:
        save_sounds(folder / "sounds", transcribed=kind == "transcribed sounds")


def save_rows(kind: str, folder: Path, ending: str = "json") -> None:
    """Saves ``train`` and ``validation`` as a file of rows: JSON lines, a JSON object, or CSV."""
    chance = random.Random(0)
    for split, number in SPLITS.items():
        rows = [ROWS[kind](chance, i) for i in range(number)]
        path = folder / f"{split}.{ending}"
        if ending == "csv":
            pd.DataFrame(rows).to_csv(path, index=False)
        elif kind == "questions":
            path.write_text(json.dumps({"data": rows}))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_images(folder: Path) -> None:
    """Saves squares of noise, dark and light, in a folder for each split and class."""
    chance = np.random.default_rng(0)
    for split, number in SPLITS.items():
        for index in range(number):
            kind = ("dark", "light")[index % 2]
            pixels = chance.integers(0, 128, (IMAGE, IMAGE, 3)) + 127 * (index % 2)
            path = folder / split / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)


def save_captions(folder: Path) -> None:
    """Saves images, and files of rows that name them and say what is on them."""
    save_images(folder / "images")
    chance = random.Random(0)
    for split in SPLITS:
        paths = sorted((folder / "images" / split).rglob("*.png"))
        rows = [{"image_path": str(path), "caption": _text(chance)} for path in paths]
        (folder / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_sounds(folder: Path, transcribed: bool = False) -> None:
    """Saves tones of two pitches in a folder for each split and class, or beside what they say."""
    chance = random.Random(0)
    for split, number in SPLITS.items():
        lines = []
        for index in range(number):
            seconds = np.arange(chance.randint(3200, 6400)) / RATE
            kind, pitch = (("low", 220), ("high", 880))[index % 2]
            name = f"{index}.wav" if transcribed else f"{kind}/{index}.wav"
            samples = 32767 * np.sin(2 * np.pi * pitch * seconds)
            (folder / split / name).parent.mkdir(parents=True, exist_ok=True)
            wavfile.write(folder / split / name, RATE, samples.astype(np.int16))
            lines.append({"file_name": name, "sentence": kind})
        if transcribed:
            pd.DataFrame(lines).to_csv(folder / split / "metadata.csv", index=False)
