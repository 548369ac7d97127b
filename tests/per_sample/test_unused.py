"""What takes no part in a loss is frozen by inputs that are nobody's, and nothing else is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.per_sample import freeze_unused, inputs_of_model, loss_for, make_engine
from dp_grape_hf.per_sample import refuse_reached as refuse
from dp_grape_hf.projections import synthetic_batches
from recipes.models.zoo import FAMILIES, Row, rows
from recipes.models.zoo_wide import WIDE
from tests.support.marks import slow_but
from tests.support.trainers import weights_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is depr:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.utils.checkpoint. the use_reentrant:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding:UserWarning"),  # WavLM
]

EVERY = rows(FAMILIES + WIDE)
QUICK = (
    *("BERT, sequence classification", "GPT-2, causal LM", "BART's decoder, causal LM"),
    *("DINOv2, image classification", "Wav2Vec2, classification of waves", "Nemotron, causal LM"),
    *("Switch, seq2seq LM", "Mixtral, a loop over experts, causal LM", "ESM, masked LM"),
    *("CLIP vision, image classification", "Llama + LoRA, causal LM"),
)
# Nothing is frozen where it is not known what a model reads, or where it reads more than that.
NOT_MADE_UP = ("Perceiver", "ResNet", "Wav2Vec2-BERT", "LLaVA")


@pytest.mark.parametrize("entry", slow_but(QUICK, EVERY))
def test_of_every_model_what_takes_no_part_is_frozen_and_nothing_else(entry: Row) -> None:
    model = entry.model()
    left_out = [
        name
        for name, _ in model.named_parameters()
        if any(part in name for part in entry.family.without_part)
    ]
    for name in left_out:
        model.get_parameter(name).requires_grad_(True)
    plain = [name for name, p in model.named_parameters() if type(p) is nn.Parameter]  # not packed
    before, state = weights_of(model), torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if entry.family.name == "YOLOS":
        with pytest.raises(UnsupportedModelError, match="not known per sample"):
            loss_for(model)
        return
    loss = loss_for(model)
    names = inputs_of_model(loss, entry.batch(2)).keys()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    known = entry.family.name not in NOT_MADE_UP
    left_out = left_out if known else []
    assert freeze_unused(model, loss, synthetic_batches(model), names) == left_out
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - left == {*left_out}
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    for name in plain:
        torch.testing.assert_close(model.get_parameter(name), before[name], rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)


# ---- What only some examples use ----

Inputs = dict[str, Tensor]


def ids(*tokens: int) -> Inputs:
    return {"input_ids": torch.tensor([tokens])}


class Branching(nn.Module):
    """Chooses by the tokens what it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(8, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.own = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.mask = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: Tensor, masked: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        if masked is not None:
            hidden = torch.where(masked[:, :, None], self.mask, hidden)
        first = int(input_ids[0, 0])
        match self.how:
            case "experts":
                hidden = self.experts[first % 2](hidden)
            case "parameters":
                hidden = hidden * self.own[first % 2]
            case "the last layer":
                for i, expert in enumerate(self.experts):
                    hidden, given = expert(hidden), hidden
                    if i == 2:
                        hidden = given
            case "a value" if (input_ids == 7).any():
                hidden = self.last(hidden)
        return {"logits": hidden.mean(1)}


def of_logits(outputs: Any, labels: Any) -> Tensor:
    return outputs["logits"].sum(1)


LAYERS = ("experts.0", "experts.1", "experts.2", "last")


@pytest.mark.parametrize(
    ("how", "frozen"),
    [
        ("experts", ["mask", "own.0", "own.1", "own.2", "last.weight", "last.bias"]),
        (
            "parameters",
            ["mask", *(f"{m}.{n}" for m in LAYERS for n in ("weight", "bias"))],
        ),
        (
            "the last layer",
            [
                *("mask", "own.0", "own.1", "own.2"),
                *(f"{m}.{n}" for m in LAYERS[2:] for n in ("weight", "bias")),
            ],
        ),
    ],
)
def test_an_expert_that_no_token_was_sent_to_is_not_frozen(how: str, frozen: list[str]) -> None:
    """Nor if it is in use by others only; a layer that runs, and whose output is dropped, is."""
    model = Branching(how)
    found = freeze_unused(model, of_logits, [ids(0, 1), ids(1, 2)], ["input_ids"])
    assert sorted(found) == sorted(frozen)
    assert all(not model.get_parameter(name).requires_grad for name in frozen)


def test_nothing_is_frozen_where_an_input_of_the_model_cannot_be_made_up() -> None:
    model = Branching("no branch")
    assert freeze_unused(model, of_logits, [ids(0, 1)], ["input_ids", "masked"]) == []
    assert freeze_unused(model, of_logits, [], ["input_ids"]) == []
    assert all(p.requires_grad for p in model.parameters())
    masked = ids(0, 1) | {"masked": torch.tensor([[True, False]])}
    assert "mask" not in freeze_unused(model, of_logits, [masked], ["input_ids", "masked"])


def test_layers_that_are_run_again_in_the_backward_pass_are_not_frozen() -> None:
    entry = next(entry for entry in EVERY if str(entry) == "Llama, causal LM")
    model = entry.model(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    names = inputs_of_model(loss_for(model), entry.batch(2)).keys()
    assert freeze_unused(model, loss_for(model), synthetic_batches(model), names) == []


def test_data_that_reach_what_was_frozen_are_refused() -> None:
    model = Branching("a value")
    frozen = freeze_unused(model, of_logits, [ids(0, 1)], ["input_ids"])
    assert {"last.weight", "last.bias"} <= {*frozen}
    engine = make_engine("layerwise", model, of_logits)
    refuse(engine, ids(3, 4), frozen)
    with pytest.raises(UnsupportedModelError, match=r"last\.weight, last\.bias was frozen"):
        refuse(engine, ids(3, 7), frozen)
    assert not model.last.weight.requires_grad
