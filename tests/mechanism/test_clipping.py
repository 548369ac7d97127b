"""Clipping per layer: the same sensitivity as flat clipping, and nothing outlives its layer.

Shapes: B samples in a batch.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

from dp_grape_hf import PrivacyError
from dp_grape_hf.per_sample import make_engine
from dp_grape_hf.per_sample.layerwise.capture import Pass, Stream
from dp_grape_hf.per_sample.layerwise.engine import LayerwiseEngine
from tests.support.mechanism import joint_norm, make_private, released
from tests.support.models import Case, only
from tests.support.networks import Twice, total
from tests.support.oracles import projectors_for, single_sample_gradients

B, C = 5, 0.5
per_layer = partial(make_private, clipping="per_layer", max_grad_norm=C)


def test_groups_are_the_modules_that_own_parameters_and_share_none() -> None:
    model = only("gpt2").model()
    groups = make_engine("layerwise", model).groups
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert ("transformer.wte.weight",) in groups  # the tied head owns the same tensor
    assert ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias") in groups


def test_modules_that_share_a_parameter_make_one_group() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    groups = make_engine("layerwise", model, lambda outputs, labels: outputs).groups
    assert [set(group) for group in groups] == [
        {"0.weight", "0.bias", "2.bias"},
        {"1.weight", "1.bias"},
    ]


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *((only(name), "layerwise") for name in ("bert-classifier", "gpt2", "vit")),
        (only("gpt2"), "functorch"),
    ],
    ids=str,
)
def test_the_release_equals_its_definition(case: Case, engine: str) -> None:
    model, batch = case.model(), case.batch(B, case.positions)
    projectors = projectors_for(model, 8)
    per_sample = make_engine(engine, model)
    found = released(per_layer(per_sample), [batch], projectors)
    gradients = single_sample_gradients(model, batch, projectors)[1]
    bound = C / math.sqrt(len(per_sample.groups))
    for group in per_sample.groups:
        squared = [gradients[name].flatten(1).square().sum(1) for name in group]
        factors = (bound / torch.stack(squared).sum(0).sqrt()).clamp(max=1)  # (B,)
        for name in group:
            expected = torch.einsum("b,b...->...", factors, gradients[name])
            difference = (found[name] - expected).norm()
            assert difference < 2e-3 * max(expected.norm(), 1e-2 * bound), name


def test_one_sample_moves_the_release_by_at_most_c() -> None:
    case = only("gpt2")
    model, batch = case.model(), case.batch(B)
    mechanism = per_layer(make_engine("layerwise", model))
    all_of_them = released(mechanism, [batch])
    for i in range(B):
        rest = {key: torch.cat([v[:i], v[i + 1 :]]) for key, v in batch.items()}
        without = released(mechanism, [rest])
        assert joint_norm({n: all_of_them[n] - without[n] for n in without}) <= C * (1 + 1e-5)


def test_a_sample_that_is_large_everywhere_contributes_c() -> None:
    case = only("roberta-classifier")
    model, batch = case.model(), case.batch(1)
    found = released(per_layer(make_engine("layerwise", model), max_grad_norm=1e-4), [batch])
    assert joint_norm(found) == pytest.approx(1e-4, rel=2e-2)


def test_a_broken_sample_contributes_nothing_where_it_is_broken() -> None:
    case = only("vit")
    model, batch = case.model(), case.batch(B, 5)
    mechanism = per_layer(make_engine("layerwise", model))
    batch["pixel_values"][2, 0, 0, 0] = math.nan
    found = released(mechanism, [batch])
    good = {key: value[[0, 1, 3, 4]] for key, value in batch.items()}
    expected = released(mechanism, [good])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_an_infinite_bound_makes_both_kinds_of_clipping_the_same() -> None:
    case = only("opt")
    model, batch = case.model(), case.batch(B)
    per_sample = make_engine("layerwise", model)
    flat = released(make_private(per_sample, max_grad_norm=math.inf), [batch])
    grouped = released(per_layer(per_sample, max_grad_norm=math.inf), [batch])
    for name, value in flat.items():
        torch.testing.assert_close(grouped[name], value, msg=name)


def test_nothing_per_sample_outlives_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = only("llama")
    model, batch = case.model(), case.batch(B)
    engine = LayerwiseEngine(model)
    engine(batch, {})  # the probe looks at whole passes
    held: list[int] = []
    original = Pass._hand_out

    def hand_out(self: Pass, name: str, stream: Stream) -> None:
        held.append(sum(len(uses) for uses in self._captured.values()))
        original(self, name, stream)

    monkeypatch.setattr(Pass, "_hand_out", hand_out)
    consumed: list[tuple[str, ...]] = []
    losses = engine.stream(batch, {}, lambda gradients: consumed.append(tuple(gradients)))
    assert losses.shape == (B,)
    assert sorted(consumed) == sorted(engine.groups)
    assert consumed[0] == ("lm_head.weight",)
    assert consumed[-1] == ("model.embed_tokens.weight",)
    assert len(held) == len(engine.trainable)
    assert max(held) == 1, "a layer's gradients wait for those of other layers"


def test_a_use_that_comes_after_the_group_was_clipped_is_refused() -> None:
    model = Twice()
    mechanism = per_layer(make_engine("layerwise", model, total))
    released(mechanism, [{"x": torch.randn(B, 4)}])
    model.times = 2
    mechanism.begin({})
    with pytest.raises(PrivacyError, match=r"layer\.(weight|bias) is used more often"):
        mechanism.accumulate({"x": torch.randn(B, 4)})
    with pytest.raises(PrivacyError, match="never released"):
        mechanism.begin({})


def test_a_layer_left_out_contributes_nothing_and_the_others_as_before() -> None:
    model = Twice()
    mechanism = per_layer(make_engine("layerwise", model, total))
    released(mechanism, [{"x": torch.randn(B, 4)}])
    model.times = 0
    found = released(mechanism, [{"x": torch.randn(B, 4)}])
    assert found["layer.weight"].norm() == 0 < found["first.weight"].norm()


def test_an_unknown_clipping_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PrivacyError, match=r"clipping='global'.*flat, per_layer"):
        make_private(make_engine("layerwise", Twice(), total), clipping="global")
