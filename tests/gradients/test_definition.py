"""The functorch engine: what ``test_engines`` does not ask of both engines alike."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dp_grape_hf import UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import make_engine
from dp_grape_hf.gradients.definition import vmap_safe
from tests.gradients.functions import Function, mean_output
from tests.models.matrix import dense, projectors_for
from tests.support.models import only
from tests.support.oracles import assert_exact


def toy(rest, **layers):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(6, 8)
    return Function(lambda m, x: rest(m, m.first(x)), first=first, **layers)


def positions(batch_size=4):
    return {"x": torch.randn(batch_size, 5, 6, generator=torch.Generator().manual_seed(0))}


check = partial(assert_exact, engine="functorch")


def test_dropout_of_attention_alone_differs_between_samples():
    model = only("gpt2").model(attn_pdrop=0.5)
    copies = {k: v[:1].repeat(6, *[1] * (v.dim() - 1)) for k, v in only("gpt2").batch(1).items()}
    losses, _ = per_sample_gradients(model, copies, engine="functorch")
    assert losses.unique().numel() == 6


def test_the_gradient_is_that_of_the_dropout_that_was_drawn():
    """With dropout before one linear layer, the drawn mask shows in the layer's gradient."""

    def drop(model, hidden):
        return model.last(functional.dropout(hidden, 0.5, model.training))

    model = toy(drop, last=nn.Linear(8, 1, bias=False))
    inputs = {"x": positions()["x"][:, :1]}
    losses, gradients = per_sample_gradients(
        model, inputs, engine="functorch", loss=lambda outputs, labels: outputs.sum((1, 2))
    )
    weight = dense(gradients, 4)["last.weight"]  # the dropped and scaled input
    hidden = model.first(inputs["x"]).detach()
    torch.testing.assert_close((weight * model.last.weight).sum((1, 2)), losses)
    kept = weight != 0
    torch.testing.assert_close(weight[kept], 2 * hidden[kept])
    assert 0 < kept.sum() < kept.numel()
    assert kept.flatten(1).unique(dim=0).shape[0] > 1


@pytest.mark.parametrize(
    ("shape", "masked"),
    [((5, 8), False), ((2, 5, 4), True), ((1, 2, 5, 4), True), ((3, 2, 5, 4), False)],
    ids=str,
)
def test_attention_never_mixes_samples_whatever_the_dimensions(shape, masked):
    mask = torch.ones(5, 5, dtype=torch.bool).tril(1)

    def attend(model, hidden):
        """Sees one sample, (1, 5, 8), under either way to compute."""
        assert len(hidden) == 1
        count = torch.Size(shape).numel()
        heads = hidden.repeat(1, count // 40 + 1, 1).flatten()[:count].view(shape)
        output = functional.scaled_dot_product_attention(
            heads, heads.sin(), heads, attn_mask=mask if masked else None
        )
        return output.reshape(1, -1)

    check(toy(attend), positions(), loss=mean_output)


def holding():
    """Holds a reference to a weight, as an LSTM's list of flat weights, which is not replaced."""
    layer = nn.Linear(8, 8)
    held = [layer.weight]
    return toy(lambda m, h: functional.linear(h, held[0], m.layer.bias), layer=layer)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (holding(), r"layer\.weight.*accepts no other tensor"),
        (toy(lambda m, h: h, unused=nn.Linear(8, 8)), r"no part in the loss: unused\.weight"),
        (toy(lambda m, h: h if h.sum() > 0 else -h), r"Function.*data-dependent control flow"),
        (
            toy(lambda m, h: checkpoint(m.last, h, use_reentrant=False), last=nn.Linear(8, 8)),
            r'Function repeats parts.*engine="layerwise"',
        ),
    ],
    ids=["a held weight", "an unused weight", "a branch", "a pass that is repeated outside"],
)
def test_what_vmap_cannot_run_or_replace_is_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        per_sample_gradients(model, positions(), engine="functorch", loss=mean_output)


def test_checkpointing_of_transformers_models_makes_no_difference():
    model = only("llama").model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, only("llama").batch(3), projectors_for(model, 8))


def under_vmap(tensor):
    return torch._C._functorch.is_batchedtensor(tensor)


def large(hidden):
    """Is 1 for the second sample of ``positions()`` and 0 for the first."""
    return (hidden.square().sum() > 22.5).float()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda hidden: 1.01 * hidden, "another loss"),
        (lambda hidden: (1 + 0.01 * large(hidden)) * hidden, "another loss"),
        (lambda hidden: hidden / 0, "another loss"),
        (lambda hidden: 1.1 * hidden - 0.1 * hidden.detach(), "other gradients"),
    ],
    ids=["loss", "loss of the second sample", "NaN", "gradients"],
)
def test_a_model_that_computes_something_else_under_vmap_is_refused(change, what):
    model = toy(lambda m, h: m.last(change(h) if under_vmap(h) else h), last=nn.Linear(8, 8))
    projectors, inputs = projectors_for(model, 2), positions()
    assert [large(model.first(x)).item() for x in inputs["x"][:2]] == [0, 1]
    with pytest.raises(UnsupportedModelError, match=f"Function computes {what}.*of one example"):
        per_sample_gradients(
            model, inputs, projections=projectors, engine="functorch", loss=mean_output
        )


def count_in_place(model, hidden):
    model.seen.add_(hidden.detach().mean((0, 1)))
    return hidden


def count_anew(model, hidden):
    model.seen = hidden.detach().mean((0, 1))
    return hidden


def refuse_itself(model, hidden):
    if under_vmap(hidden):
        raise TypeError("an unknown tensor")
    return hidden


@pytest.mark.parametrize(
    ("rest", "cause"),
    [
        (count_in_place, RuntimeError),
        (count_anew, None),
        (lambda m, h: h * len(h.mean((0, 2)).tolist()), RuntimeError),
        (refuse_itself, TypeError),
    ],
    ids=["buffer changed in place", "buffer kept", "list of values", "own error"],
)
def test_an_error_that_vmap_alone_brings_about_is_a_refusal(rest, cause):
    model = toy(rest)
    model.register_buffer("seen", torch.zeros(8), persistent=False)
    model(**positions())  # all is well without vmap
    with pytest.raises(UnsupportedModelError, match=r"Function.*engine=\"layerwise\"") as refusal:
        per_sample_gradients(model, positions(), engine="functorch", loss=mean_output)
    assert isinstance(refusal.value.__cause__, cause or type(None))


def owner(rest):
    """A module without a rule that does something to what it is given."""
    module = Function(lambda m, hidden: rest(m, hidden * m.weight), weight=torch.ones(8))
    module.register_buffer("seen", torch.zeros(8), persistent=False)
    return module


@pytest.mark.parametrize("rest", [count_in_place, count_anew])
def test_a_module_whose_buffer_keeps_a_sample_is_refused(rest):
    reads = owner(lambda m, h: rest(m, h) * len(h.mean((0, 2)).tolist()))
    model = toy(lambda m, h: m.owner(h), owner=reads)
    with pytest.raises(
        UnsupportedModelError, match=r"^owner \(Function\) .*changes its buffer 'seen'"
    ):
        per_sample_gradients(model, positions(), loss=mean_output)


def test_a_sample_that_fails_alone_is_refused_with_the_error():
    def fail(_, hidden):
        if len(hidden) == 1:
            raise ValueError("one is too few")
        return hidden

    model = toy(lambda m, h: m.owner(h), owner=owner(fail))
    with pytest.raises(UnsupportedModelError, match=r"for one example alone.*ValueError: one is"):
        per_sample_gradients(model, positions(), loss=mean_output)


def test_the_layerwise_engine_refuses_a_module_given_the_batch_size():
    start = Function(lambda m, h, size: m.start.expand(size, 5, 8), start=torch.ones(5, 8))
    model = toy(lambda m, h: h + m.beginning(h, len(h)), beginning=start)
    check(model, positions(), loss=mean_output)
    with pytest.raises(UnsupportedModelError, match=r"beginning \(Function\) returned.*a number"):
        per_sample_gradients(model, positions(), loss=mean_output)


def test_an_error_on_bad_data_stays_what_it_is():
    def rest(model, hidden):
        if hidden.shape[1] > 5:
            raise ValueError("too long")
        return hidden

    engine = make_engine("functorch", toy(rest), mean_output)
    engine(positions(), {})
    with pytest.raises(ValueError, match="too long") as error:
        engine({"x": torch.zeros(4, 6, 6)}, {})
    assert type(error.value) is ValueError


def test_attention_keeps_its_name_and_masks_are_put_back():
    def mask(*args, **kwargs):
        return None

    model = only("bert-classifier").model()
    model.bert.config = type(model.config)(attn_implementation="my_attention")
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    before = dict(masks)
    try:
        masks["sdpa"] = mask  # a user's own, for the time being
        for name, inside in (("flash_attention_2", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")):
            model.config._attn_implementation = name
            with vmap_safe(model), vmap_safe(model):
                assert model.config._attn_implementation == inside
                assert model.bert.config._attn_implementation == "my_attention"
                assert masks["sdpa"] is not mask
            assert model.config._attn_implementation == name
            assert masks["sdpa"] is mask
    finally:
        del masks["sdpa"]
    assert dict(masks) == before
