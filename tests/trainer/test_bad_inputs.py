"""Whatever is passed, the answer is a run or our error with the value.

Where a library below fails over examples, its error goes on, with a note of ours.
"""

import contextlib
import math
import tempfile
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from dp_grape_hf import DPGrapeTrainingArguments, PrivacyError
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.trainer.bad_data import described, explaining_bad_data
from tests.support.marks import slow_but
from tests.support.models import row
from tests.support.trainers import FEATURES, Examples, make_trainer, points

HINTS = get_type_hints(DPGrapeArguments)
NAMES = [f.name for f in fields(DPGrapeArguments)]
EDGES = [
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e308, 0.5, 1.5, 1.0, -1.0),
    *(0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, True, False, None),
    *("", "1", "1e-5", "nan", "inf", "yes", "true", "\0", "{}", "{"),
    *([], [1], {}, {"a": 1}, {"a": 0}, {"": 2}, {1: 1}, {"a": "b"}, (), (1,), b"1", object, 1j),
    *(torch.tensor(2.0), torch.ones(3)),
]
VALID = {"output_dir": "unused", "report_to": "none", "use_cpu": True, "target_delta": 1e-3}


def spellings(value):
    """Yields how a message may show a value: as it is, or as the number that was read."""
    yield repr(value)
    for read in (float, int):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            yield repr(read(value))
            yield repr(read(float(value)))


@pytest.mark.parametrize("name", slow_but(("target_epsilon",), NAMES))
def test_an_extreme_value_is_accepted_or_refused_by_name(name):
    kind = HINTS[name]
    for edge in EDGES:
        noise = None if name == "target_epsilon" and edge is not None else 1.0
        refusal = ""
        try:
            args = DPGrapeTrainingArguments(**VALID | {"noise_multiplier": noise, name: edge})
        except PrivacyError as error:
            refusal = str(error)
        if refusal:
            assert any(f"{name}={text}" in refusal for text in spellings(edge)), refusal
            continue
        value = getattr(args, name)
        assert value is None or kind is not bool or type(value) is bool
        assert value is None or kind not in (str, str | None) or isinstance(value, str)
        assert value is None or kind not in (int, int | None) or type(value) is int
        assert value is None or kind not in (float, float | None) or type(value) is float
        assert value == value, "not a number is no value of any argument"


def refusal_of(dataset):
    """Trains on all examples; returns our refusal, or the error from below and our note."""
    size = max(1, min(24, len(dataset))) if hasattr(dataset, "__len__") else 1
    settings = {"per_device_train_batch_size": size, "max_steps": 2}
    failure = Exception()
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(folder, train_dataset=dataset, **settings).train()
        except Exception as error:
            failure = error
    notes = getattr(failure, "__notes__", [])
    assert len(notes) == (not isinstance(failure, PrivacyError))
    assert all("train_dataset[0] " in note or "num_labels" in note for note in notes)
    return "\n".join([f"{failure}", *notes])


def _each(change, *only):
    whole = points(24).examples
    return Examples([change(dict(e)) if not only or e["id"] in only else e for e in whole])


def _without(name):
    return lambda e: {key: value for key, value in e.items() if key != name}


def _with(name, value):
    return lambda e: {**e, name: value}


class Longer(Examples):
    def __len__(self):
        return 30


class Leaky(Examples):
    """Says a value when it fails, from the third example on."""

    first = 2

    def __getitem__(self, index):
        if index >= self.first:
            raise ValueError("could not convert string to float: 'Ada Lovelace'")
        return super().__getitem__(index)


class Failing(Leaky):
    first = 0


BAD_DATA = {
    "empty": (lambda: [], "train_dataset is empty"),
    "a generator": (lambda: (e for e in points(24).examples), "list(...)"),
    "a text": (lambda: "a" * 24, "train_dataset[0] is str"),
    "one None": (lambda: _each(lambda e: None, 5), "train_dataset[5] is NoneType"),
    "no columns": (lambda: _each(lambda e: {}), "train_dataset[0] is {}"),
    "one without labels": (lambda: _each(_without("labels"), 5), "The batch has no 'labels'"),
    "no inputs": (lambda: _each(_without("x")), "missing 1 required positional argument: 'x'"),
    "one without inputs": (lambda: _each(_without("x"), 5), "train_dataset[5] is {labels: "),
    "one large label": (lambda: _each(_with("labels", torch.tensor(77)), 20), "Target 77 is out"),
    "one wide input": (
        lambda: _each(_with("x", torch.zeros(FEATURES + 1)), 5),
        "train_dataset[5] has x of another size",
    ),
    "too long": (lambda: Longer(points(24).examples), "train_dataset[24] cannot be fetched"),
    "failing": (lambda: Failing([{}] * 24), "train_dataset[0] cannot be fetched (ValueError"),
}


@pytest.mark.parametrize("fault", slow_but(("one None", "too long"), BAD_DATA))
def test_bad_data_is_refused_and_described(fault):
    make, expected = BAD_DATA[fault]
    assert expected in refusal_of(make())


def test_what_is_described_has_no_values_sizes_or_inner_keys():
    first = {"x": torch.full((2,), 7.5), "name": "Ada", "ids": [41, 42], "age": 36}
    first["extra"] = {"Ada": 1, "Bob": 2}
    text = described([first, {**first, "ids": [0] * 43}])
    assert text == (
        "train_dataset[0] is {x: 1-dimensional torch.float32, name: str, ids: list, age: int, "
        "extra: dict}, and train_dataset[1] has ids of another size."
    )
    text = described(Leaky([{"x": 1}] * 9))
    assert text.endswith("and train_dataset[2] cannot be fetched (ValueError).")


def test_errors_that_do_not_concern_data_are_unchanged():
    for error in (
        *(PrivacyError("ours"), OSError("disk"), torch.OutOfMemoryError("full")),
        *(NotImplementedError("aten::foo"), RuntimeError("CUDA error: device-side assert")),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("MPS backend out of memory"),
    ):
        with pytest.raises(type(error)) as raised, explaining_bad_data([{}], "It"):
            raise error
        assert raised.value is error
        assert not hasattr(error, "__notes__")


def test_an_empty_text_is_named_as_the_trouble(tmp_path):
    rows = [
        {"input_ids": torch.tensor([7, 8, 3])[:n], "labels": torch.ones(1).long()} for n in (0, 3)
    ]
    settings = {"expected_batch_size": 2, "per_device_train_batch_size": 1, "method": "dp_sgd"}
    model = row("T5, seq2seq LM").model()
    trainer = make_trainer(tmp_path, model=model, train_dataset=Examples(rows), **settings)
    with pytest.raises(RuntimeError, match="0 elements") as caught:
        trainer.train()
    assert "empty input" in caught.value.__notes__[0]


DIED = RuntimeError("DataLoader worker (pid 3) exited unexpectedly")


@pytest.mark.parametrize(
    ("error", "example", "advice"),
    [
        (TypeError("expected Ada"), {"x": 1.5}, "It failed. train_dataset[0] is {x: float}. Each"),
        (IndexError("Target 4 is out of bounds."), {"x": 1.5}, "num_labels=6"),
        (ValueError("give me input_ids"), {"text": "Ada", "label": 1}, "Tokenize them first"),
        (PrivacyError("no 'labels'"), {"input_ids": [1], "label": "good"}, "class_encode_column"),
        (KeyError("image"), {"label": 1}, "remove_unused_columns=False"),
        (KeyError("input_ids"), {"text": "Ada", "label": 1}, "Tokenize them first"),
        (ValueError("no tensor"), {"input_ids": [1], "label": "good"}, "class_encode_column"),
        (DIED, {}, "It failed. A process that fetched examples died"),
    ],
)
def test_an_error_over_the_data_goes_on_with_advice(error, example, advice):
    said = error.args
    with pytest.raises(type(error)) as raised, explaining_bad_data([example], "It"):
        raise error
    assert raised.value is error
    assert error.args == said
    (note,) = error.__notes__
    assert advice in note
    assert not any(value in note for value in ("Ada", "1.5"))
