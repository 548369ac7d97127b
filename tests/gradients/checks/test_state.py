"""What objects remember of private examples is seen, and what they do not is no false alarm."""

import itertools
import pickle
import random
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from weakref import proxy

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForLanguageModeling

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import StateGuard, warm_up
from dp_grape_hf.gradients.checks import state
from tests.support.collators import tokenizer
from tests.support.models import only


class Keeping:
    def __init__(self, kept=(), keep=lambda *_: None):
        self.kept, self._keep = kept, keep

    def __call__(self, value):
        return self._keep(self.kept, value)


class Counting:
    """Has one attribute, which cannot change in place."""

    def __init__(self):
        self.count = 0

    def __call__(self, value):
        self.count += 1
        return value  # rows, if it is the transform of a data set


class Growing(Counting):
    def __call__(self, value):
        self.count = (self.count, value)


class InItsClass:
    seen: ClassVar[list[int]] = []

    def __call__(self, value):
        self.seen.append(value)


class GrowingClass:
    def __call__(self, value):
        setattr(type(self), f"seen_{value}", True)


class InSlots:
    __slots__ = ("largest",)

    def __init__(self):
        self.largest = 0

    def __call__(self, value):
        self.largest = max(self.largest, value)


def in_a_closure():
    largest = 0

    def remember(value):
        nonlocal largest
        largest = max(largest, value)

    return remember


_RANDOM = random.Random(0)


def from_a_global(value):
    return _RANDOM.random()


def by_a_helper(value):
    return from_a_global(value)


def running():
    total = 0
    while True:
        total += 1
        yield total


def tensor_through_data(tensor, value):
    tensor.data = torch.full_like(tensor, value)


def _set_last(kept, value):
    kept[-1] = value


UNSOUND = {
    "numpy generator": lambda: Keeping(np.random.default_rng(0), lambda g, _: g.random()),
    "old numpy generator": lambda: Keeping(np.random.RandomState(0), lambda g, _: g.rand()),
    "Python generator": lambda: Keeping(random.Random(0), lambda g, _: g.random()),
    "torch generator": lambda: Keeping(torch.Generator(), lambda g, _: torch.rand(1, generator=g)),
    "count": lambda: Keeping(itertools.count(), lambda n, _: next(n)),
    "running generator": lambda: Keeping(running(), lambda n, _: next(n)),
    "attribute": Counting,
    "list": lambda: Keeping([], list.append),
    "set": lambda: Keeping(set(), set.add),
    "deque": lambda: Keeping(deque([0], 1), deque.append),
    "dictionary": lambda: Keeping({}, lambda kept, value: kept.update({value: 1})),
    "dictionary's value": lambda: Keeping({0: 1}, lambda kept, value: kept.update({0: value})),
    "long list": lambda: Keeping([0] * 1000, list.append),
    "long list's value": lambda: Keeping([0] * 1000, _set_last),
    "long dictionary's value": lambda: Keeping(dict.fromkeys(range(-1, 999), 0), _set_last),
    "array": lambda: Keeping(np.zeros(3), _set_last),
    "large array": lambda: Keeping(np.zeros(2**17), _set_last),
    "tensor": lambda: Keeping(torch.zeros(3), lambda kept, value: kept.add_(value)),
    "tensor's data": lambda: Keeping(torch.zeros(3), tensor_through_data),
    "class": InItsClass,
    "class that grows": GrowingClass,
    "only attribute": Growing,
    "slots": InSlots,
    "nested": lambda: Keeping({"a": [Counting()]}, lambda kept, value: kept["a"][0](value)),
    "closure": in_a_closure,
    "method": lambda: Counting().__call__,
    "partial": lambda: partial(Counting.__call__, Counting()),
    "global": lambda: from_a_global,
    "global of a helper": lambda: by_a_helper,
    "transform": lambda: Dataset.from_list([{"x": 1}] * 9).with_transform(Counting()).__getitem__,
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_a_collator_remembers_is_seen(name):
    thing = UNSOUND[name]()
    owner = getattr(thing, "__self__", thing) if name == "transform" else thing
    guard = StateGuard(data_collator=owner)
    for value in (7, 8):
        with pytest.raises(PrivacyError, match=r"changed .*data collator"), guard.unchanged():
            thing(value)


class Reads:
    """Opens its file when it is first asked, and computes from constants."""

    def __init__(self, path):
        self._path, self._file = path, None
        self.table, self.scale, self.names = {"a": 1}, np.ones(3), ["a"]

    def __call__(self, value):
        if self._file is None:
            self._file = open(self._path, "rb")
        self._file.seek(0)
        return self._file.read(1), self.scale * value, random.random(), np.random.rand()


def test_opening_a_file_at_first_read_is_no_state(tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    reads = Reads(tmp_path / "data")
    guard = StateGuard(train_dataset=reads)
    for value in (1, 2):
        with guard.unchanged():
            reads(value)
    reads._file.close()


def test_a_collator_of_transformers_is_no_false_alarm():
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    guard = StateGuard(data_collator=collator)
    for length in (3, 9):
        with guard.unchanged():
            collator([{"input_ids": [*range(5, 5 + length)]}])


def test_what_changes_between_two_looks_is_no_memory():
    thing = Counting()
    guard = StateGuard(data_collator=thing)
    for value in range(3):
        thing.count = value  # an epoch that a callback sets, say
        with guard.unchanged():
            pass


def test_a_guard_travels_to_another_process():
    with pickle.loads(pickle.dumps(StateGuard(data_collator=Counting()))).unchanged():
        pass


def test_an_error_says_nothing_of_what_was_remembered():
    kept = {}
    thing = Keeping(kept, lambda kept, value: kept.update({"a private text": value}))
    with pytest.raises(PrivacyError) as refusal, StateGuard(data_collator=thing).unchanged():
        thing(3)
    assert "private text" not in str(refusal.value)
    assert "kept of the data collator (Keeping)" in str(refusal.value)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("odd", torch.arange(5, dtype=torch.bfloat16)[1:])
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.largest = 0.0


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.norm = nn.LayerNorm(3)


def exchanged(model):
    del model.layer.largest
    model.layer.smallest = 0.0


def replaced(model):
    model.layer.table = model.layer.table + 1


CHANGES = {
    "a weight": (lambda m: m.layer.weight.data.add_(1), "weight"),
    "a weight's place": (lambda m: setattr(m.layer.weight, "data", torch.ones(3)), "weight"),
    "a norm of torch": (lambda m: m.norm.bias.data.add_(1), "bias"),
    "a buffer that is not saved": (lambda m: m.layer.table.add_(1), "table"),
    "a buffer that is replaced": (replaced, "table"),
    "a buffer whose numbers are exchanged": (
        lambda m: m.layer.table.data.copy_(m.layer.table.flip(0)),
        "table",
    ),
    "a short number": (lambda m: m.layer.odd.data.mul_(2), "odd"),
    "a flag": (lambda m: m.layer.flags.data.fill_(True), "flags"),
    "a complex number": (lambda m: m.layer.waves.data.mul_(1j), "waves"),
    "an attribute": (lambda m: setattr(m.layer, "largest", 1.0), "largest"),
    "an attribute that is new": (lambda m: setattr(m.layer, "seen", 1), "seen"),
    "an attribute that is deleted": (lambda m: delattr(m.layer, "largest"), "largest"),
    "an attribute with another name": (exchanged, "smallest"),
    "an attribute that is a tensor": (
        lambda m: setattr(m.layer, "largest", torch.ones(1)),
        "largest",
    ),
    "a module that is new": (lambda m: setattr(m, "second", nn.Linear(2, 2)), "second"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_model_remembers_is_seen(name):
    change, where = CHANGES[name]
    model = Parent()
    saved = any(key.endswith(where) for key in model.state_dict())
    guard = StateGuard(model=model)
    with pytest.raises(UnsupportedModelError, match=rf"{where} of the model") as refusal:
        with guard.unchanged(thorough=True):
            change(model)
    assert ("saved with the weights" in str(refusal.value)) == saved
    with guard.unchanged(thorough=True):
        model.eval()
        model.train()


@pytest.mark.parametrize("where", ["the layer", "a closure"])
def test_what_a_hook_remembers_is_seen(where):
    model, largest = Parent(), [0.0]

    def remember(module, inputs, output):
        if where == "the layer":
            module.largest = float(output.detach().max())
        else:
            largest[0] = float(output.detach().max())

    model.norm.register_forward_hook(remember)
    name = "norm.largest" if where == "the layer" else "norm.hook"
    with pytest.raises(UnsupportedModelError, match=f"{name} of the model"):
        with StateGuard(model=model).unchanged():
            model.norm(torch.randn(2, 3))


class Trainer:
    """Counts as the trainer of transformers, by its name."""

    def __init__(self):
        self.state, self.args = SimpleNamespace(), SimpleNamespace()
        self.meter, self.teacher = Counting(), Parent()

    def compute_loss(self):
        pass


@pytest.mark.parametrize("loss", [proxy, lambda trainer: trainer.compute_loss])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda t: t.meter(1), "meter.count"),
        (lambda t: t.teacher.layer.table.add_(1), "table"),
        (lambda t: setattr(t.state, "mean", 1), "mean"),
        (lambda t: setattr(t.args, "mean", 1), "mean"),
    ],
)
def test_what_a_subclass_of_the_trainer_remembers_is_seen(change, where, loss):
    trainer = Trainer()
    with pytest.raises(PrivacyError, match=f"{where} of the loss"):
        with StateGuard(loss=loss(trainer)).unchanged():
            change(trainer)


def test_changes_between_passes_are_noticed_except_those_of_a_trainer():
    model, trainer, loss = Parent(), Trainer(), Counting()
    for used, change, noticed in (
        (loss, lambda: loss(1), True),
        (loss, lambda: setattr(model.layer, "largest", 2.0), True),
        (loss, lambda: None, False),
        (trainer.compute_loss, lambda: setattr(trainer.state, "global_step", 1), False),
        (trainer.compute_loss, lambda: setattr(model.layer, "largest", 3.0), True),
    ):
        guard = StateGuard(model=model, loss=used)
        guard.snapshot()
        change()
        guard.snapshot()
        assert guard.changed_before == noticed
        guard.snapshot()
        assert not guard.changed_before


def test_a_large_model_hides_no_memory_of_the_loss(monkeypatch):
    monkeypatch.setattr(state, "_MOST_PLACES", 3)
    loss = Keeping([], list.append)
    with pytest.raises(PrivacyError, match="kept of the loss"):
        with StateGuard(model=Parent(), loss=loss).unchanged():
            loss(1)


def test_a_change_in_place_is_seen_by_the_version_counter():
    model = Parent()
    guard = StateGuard(model=model)
    with pytest.raises(UnsupportedModelError, match="weight"), guard.unchanged():
        with torch.no_grad():
            model.layer.weight.add_(1)


class Caching(nn.Module):
    """Makes its table when it first runs, as long as its inputs."""

    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, 4)
        self.table = None

    def forward(self, input_ids):
        if self.table is None:
            self.table = torch.arange(float(len(input_ids)))
        return self.embedding(input_ids).sum(1)


def test_a_table_made_on_public_inputs_is_no_memory():
    config = only("bert-classifier").model().config
    ids = torch.randint(5, 20, (4, 6))
    cold, warm = Caching(config), Caching(config)
    with pytest.raises(UnsupportedModelError, match="table"), StateGuard(model=cold).unchanged():
        cold(ids)
    warm_up(warm, iter([{"input_ids": ids[:2]}]))
    with StateGuard(model=warm).unchanged():
        warm(ids)


def test_a_model_that_fails_on_public_inputs_is_not_probed():
    model = Parent()
    warm_up(model, iter([{"input_ids": torch.ones(2, 3)}]))
    warm_up(model, iter([]))
    assert model.training
