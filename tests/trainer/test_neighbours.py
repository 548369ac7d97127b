"""One example more moves the sum that meets the noise by C at most, or the run is refused.

The same coins, with and without one example: what the *others* contribute must stay. Each case is
one in which something that looks at a whole batch would move it by several C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2ForSequenceClassification,
    TrainerCallback,
    default_data_collator,
)

from dp_grape_hf import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks import spot_checks
from dp_grape_hf.mechanism import Streams
from tests.models.zoo import BERT, GPT2, build
from tests.support.collators import longest_first, tokenizer
from tests.support.trainers import Examples, make_trainer, spy_releases

C, WORDS, WIDTH = 0.05, 60, 16
Example = dict[str, Any]


def bert(kind=BertForSequenceClassification, dropout=0.0):
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 64, "initializer_range": 0.3}
    model = build(kind, BertConfig, BERT, **drops, **sizes)
    model.classifier.weight.data.mul_(20)
    return model


def gpt2():
    sizes = {"n_layer": 1, "n_positions": 64, "num_labels": 3}
    model = build(GPT2ForSequenceClassification, GPT2Config, GPT2, **sizes)
    model.score.weight.data.mul_(20)
    return model


class TextForSequenceClassification(nn.Module):
    """A mean over words, of which a subclass makes something else with the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.head = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            self.head.weight.mul_(3)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.head(self.read(self.words(input_ids), attention_mask[..., None].float()))
        out = {"logits": logits}
        return out if labels is None else {"loss": functional.cross_entropy(logits, labels)} | out

    def read(self, x, mask):
        return (self.body(x) * mask).sum(1) / mask.sum(1)


class SortedForSequenceClassification(TextForSequenceClassification):
    """Runs longer texts first, as recurrent networks want them, and puts them back."""

    def read(self, x, mask):
        order = mask.sum((1, 2)).argsort(descending=True, stable=True)
        return super().read(x[order], mask[order])[order.argsort()]


class LongestForSequenceClassification(TextForSequenceClassification):
    def read(self, x, mask):
        return (self.body(x) * mask).sum(1) / mask.sum(1).max()


class LaterForSequenceClassification(TextForSequenceClassification):
    """Couples rows, but only once its weights have moved."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first = float(self.head.weight.detach().sum())

    def read(self, x, mask):
        h = super().read(x, mask)
        moved = float(self.head.weight.detach().sum()) != self.first
        return self.coupled(h) if self.training and moved else h

    def coupled(self, h):
        return h + h.mean(0)


class BankForSequenceClassification(LaterForSequenceClassification):
    bank: Tensor | None = None

    def coupled(self, h):
        known, self.bank = self.bank, h.detach().mean(0)
        return h if known is None else h + 0.3 * known


def text(length, label, *, pad=0, word=None, seed=0):
    generator = torch.Generator().manual_seed(100 * length + seed)
    ids = torch.randint(5, WORDS, (length,), generator=generator).tolist()
    ids = [word] * length if word else ids
    rest = max(pad - length, 0)
    mask = [1] * length + [0] * rest
    return {"input_ids": ids + [1] * rest, "attention_mask": mask, "labels": label}


EQUAL = [text(8, i % 3, seed=i) for i in range(47)]  # all of one length
LONG = text(30, 0, word=7)
PADDED = [text(8, i % 3, pad=12, seed=i) for i in range(47)]
FULL = text(12, 0, pad=12, word=7)


def without_mask(examples):
    longest = max(len(e["input_ids"]) for e in examples)
    rows = [e["input_ids"] + [1] * (longest - len(e["input_ids"])) for e in examples]
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


def mixes(examples):
    """Ends every text as another one of the batch ends."""
    batch = without_mask(examples)
    ids = batch["input_ids"]
    return batch | {"input_ids": torch.cat([ids[:, :4], ids.roll(1, 0)[:, 4:]], 1)}


class PadsAll(Examples):
    """A data set that answers a list of indices with texts padded to the longest."""

    def __getitems__(self, indices):
        rows = without_mask([self.examples[i] for i in indices])
        return [
            {"input_ids": rows["input_ids"][k], "labels": rows["labels"][k]}
            for k in range(len(indices))
        ]


def no_mask(example):
    return {name: value for name, value in example.items() if name != "attention_mask"}


def of_tokens(example):
    return example | {"labels": [(w + example["labels"]) % 3 for w in example["input_ids"]]}


@dataclass(frozen=True)
class Case:
    """A model, data, one example more and where it stands.

    Args:
        refused: whether nothing may be released; else the others must not move.
    """

    name: str
    model: Callable[[], nn.Module]
    data: list[Example]
    more: Example
    at: int = 47
    collator: Any = default_data_collator
    dataset: Any = Examples
    refused: str = ""

    def __str__(self):
        return self.name


LEFT = DataCollatorWithPadding(tokenizer("left"))
CASES = [
    Case("padding on the left, positions counted from there", gpt2, EQUAL, LONG, collator=LEFT),
    Case("padding that nothing masks", bert, EQUAL, LONG, collator=without_mask),
    Case("rows stretched to the longest", bert, EQUAL, LONG, collator=longest_first),
    Case("a column that is None", bert, PADDED, FULL | {"attention_mask": None}, at=32),
    Case("a column that only one has", bert, [no_mask(e) for e in PADDED], PADDED[0], at=16),
    Case("labels of tokens, padded", partial(bert, BertForTokenClassification),
         [of_tokens(e) for e in EQUAL], of_tokens(LONG),
         collator=DataCollatorForTokenClassification(tokenizer("left"))),
    Case("a data set that pads", bert, [no_mask(e) for e in EQUAL], no_mask(LONG), dataset=PadsAll),
    Case("mixed by the collator", bert, EQUAL, EQUAL[0], collator=mixes,
         refused="of an example from other examples"),
    Case("sorted by length", SortedForSequenceClassification, PADDED, FULL,
         refused="one example at a time|order of the samples"),
    Case("divided by the longest", LongestForSequenceClassification, PADDED, FULL,
         refused="changes with the number or the contents"),
]  # fmt: skip
IN_FOURS = {"padding that nothing masks", "labels of tokens, padded", "mixed by the collator"}


def released(case, data, folder, monkeypatch, **settings):
    releases = spy_releases(monkeypatch)
    size = len(case.data) + 1
    torch.manual_seed(5)
    trainer = make_trainer(
        folder,
        model=case.model(),
        train_dataset=case.dataset(data),
        data_collator=case.collator,
        **{
            "method": "dp_adam",
            "noise_multiplier": 0,
            "max_grad_norm": C,
            "expected_batch_size": size,
            "num_samples": size,
            "per_device_train_batch_size": 16,
            "max_steps": 1,
            "known_streams": Streams.seeded(),
            **settings,
        },
    )
    torch.manual_seed(5)
    trainer.train()
    return {name: size * value for name, value in releases[-1].items()}


@pytest.mark.parametrize(
    ("case", "physical"),
    [
        *(
            pytest.param(
                case, 16, id=f"{case}-16", marks=pytest.mark.slow if case.name in IN_FOURS else ()
            )
            for case in CASES
        ),
        *(pytest.param(case, 4, id=f"{case}-4") for case in CASES if case.name in IN_FOURS),
    ],
)
def test_one_example_more_moves_the_sum_by_its_bound(case, physical, tmp_path, monkeypatch):
    data = [*case.data[: case.at], case.more, *case.data[case.at :]]
    run = partial(released, case, monkeypatch=monkeypatch, per_device_train_batch_size=physical)
    if case.refused:
        for number, examples in enumerate((case.data, data)):
            with pytest.raises((PrivacyError, UnsupportedModelError), match=case.refused):
                run(examples, tmp_path / str(number))
        return
    without, with_it = run(case.data, tmp_path / "without"), run(data, tmp_path / "with")
    moved = sum((with_it[n] - without[n]).square().sum() for n in without).sqrt() / C
    assert 0.9 < moved < 1.001  # the example's own contribution is clipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LaterForSequenceClassification, "differs from its gradient alone.*Nothing of this step"),
        (BankForSequenceClassification, "changed bank of the model"),
    ],
    ids=["mixes", "bank"],
)
def test_what_remembers_or_mixes_later_is_stopped_before_that_release(
    model, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(spot_checks, "SHARE", 1.0)
    case = Case("", model, PADDED, FULL)
    with pytest.raises(PrivacyError, match=reason):
        released(case, PADDED, tmp_path, monkeypatch, max_steps=60)


class Centering(TrainerCallback):
    """Lets a model read the differences to the mean row."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            model = kwargs["model"]
            read = model.read
            model.read = lambda x, mask: read(x - x.mean(0), mask)


@pytest.mark.parametrize("step", [0, 1])
def test_a_callback_that_changes_the_model_is_checked_at_once(step, tmp_path, monkeypatch):
    monkeypatch.setattr(spot_checks, "SHARE", 0.0)
    case = Case("", TextForSequenceClassification, PADDED, FULL)
    with pytest.raises(PrivacyError, match="differs from its gradient alone"):
        released(case, PADDED, tmp_path, monkeypatch, max_steps=2, callbacks=[Centering(step)])


@pytest.mark.slow
def test_watching_changes_no_release(tmp_path, monkeypatch):
    """With dropout, whose masks a row is given again when it is alone."""
    found = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(spot_checks, "SHARE", share)
        case = Case("", partial(bert, dropout=0.4), PADDED, FULL)
        found.append(released(case, PADDED, tmp_path / f"{share}", monkeypatch, max_steps=3))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=0)
