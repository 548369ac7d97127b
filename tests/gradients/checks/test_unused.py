"""What takes no part in a loss is frozen by inputs that are nobody's, and nothing else is."""

from inspect import Parameter, Signature

import pytest
import torch
from torch import nn

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients import freeze_unused, loss_for
from dp_grape_hf.projections import synthetic_batches
from tests.models.zoo import FAMILIES, WIDE, rows
from tests.support.marks import slow_but
from tests.support.trainers import weights_of

pytestmark = [
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
# Nothing is frozen where it is not known what a model reads, or where it may read more than that.
NOT_MADE_UP = ("Perceiver", "ResNet", "Wav2Vec2-BERT", "LLaVA")
MAY_READ_MORE = ("Longformer", "LED", "XLNet")  # global_attention_mask, target_mapping


@pytest.mark.parametrize("entry", slow_but(QUICK, EVERY))
def test_exactly_the_unused_parameters_of_each_model_are_frozen(entry):
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
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    known = entry.family.name not in NOT_MADE_UP + MAY_READ_MORE
    left_out = left_out if known else []
    assert freeze_unused(model, loss, synthetic_batches(model)) == left_out
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - left == {*left_out}
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    for name in plain:
        torch.testing.assert_close(model.get_parameter(name), before[name], rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)


def ids(*tokens):
    return {"input_ids": torch.tensor([tokens])}


class Branching(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table = nn.Embedding(8, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.own = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.mask = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids):
        return self.chosen(self.table(input_ids), input_ids)

    def chosen(self, hidden, input_ids):
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


def of_logits(outputs, labels):
    return outputs["logits"].sum(1)


LAYERS = ("experts.0", "experts.1", "experts.2", "last")


@pytest.mark.parametrize(
    ("how", "frozen"),
    [
        ("experts", ["mask", "own.0", "own.1", "own.2", "last.weight", "last.bias"]),
        ("parameters", ["mask", *(f"{m}.{n}" for m in LAYERS for n in ("weight", "bias"))]),
        (
            "the last layer",
            [
                *("mask", "own.0", "own.1", "own.2"),
                *(f"{m}.{n}" for m in LAYERS[2:] for n in ("weight", "bias")),
            ],
        ),
    ],
)
def test_an_expert_without_tokens_is_not_frozen(how, frozen):
    """Nor if it is in use by others only; a layer that runs, and whose output is dropped, is."""
    model = Branching(how)
    found = freeze_unused(model, of_logits, [ids(0, 1), ids(1, 2)])
    assert sorted(found) == sorted(frozen)
    assert all(not model.get_parameter(name).requires_grad for name in frozen)


@pytest.mark.parametrize(
    ("named", "default", "frozen"),
    [
        *((name, None, True) for name in ("bbox", "past_key_values")),
        *((name, None, True) for name in ("start_positions", "tag_labels", "output_norms")),
        *((name, None, False) for name in ("side", "global_attention_mask")),
        *(("how_many", 0, True), ("whether", False, True)),
        *(("side", Parameter.empty, False), ("others", Parameter.empty, True)),
    ],
)
def test_optional_inputs_are_recognised_by_the_names_in_forward(named, default, frozen):
    model = Branching("no branch")

    def forward(input_ids, **others):
        return Branching.forward(model, input_ids)

    kind = Parameter.KEYWORD_ONLY
    more = Parameter(named, kind, default=default)
    if named == "others":
        more = more.replace(kind=Parameter.VAR_KEYWORD)
    forward.__signature__ = Signature([Parameter("input_ids", kind), more])
    model.forward = forward
    assert ("mask" in freeze_unused(model, of_logits, [ids(0, 1)])) == frozen


@pytest.mark.parametrize("name", ["T5, seq2seq LM", "Whisper, speech recognition"])
def test_a_decoder_receives_tokens_if_public_inputs_have_none(name):
    entry = next(entry for entry in EVERY if str(entry) == name)
    model, batch = entry.model(), entry.batch(2)
    model.extra = nn.Parameter(torch.zeros(2))
    batch.pop("labels")
    assert freeze_unused(model, loss_for(model), [batch]) == ["extra"]


def test_layers_recomputed_in_the_backward_pass_are_not_frozen():
    entry = next(entry for entry in EVERY if str(entry) == "Llama, causal LM")
    model = entry.model(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert freeze_unused(model, loss_for(model), synthetic_batches(model)) == []
