"""``ghost``, ``book_keeping`` and ``materialise``: other forms and passes, the same release.

Shapes: B samples in a batch.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import (
    Dense,
    Gradients,
    GradSampleMode,
    PerSampleEngine,
    make_engine,
    per_sample_gradients,
)
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.gradients.passes import Pass
from dp_grape_hf.mechanism import clipping
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function
from tests.models.matrix import projectors_for
from tests.support import mechanism
from tests.support.mechanism import make_private, sample_norms, split
from tests.support.models import only
from tests.support.networks import MODELS, B, Twice, flat, total
from tests.support.oracles import assert_gradients_equal, relative_error, single_sample_gradients

each_mode = pytest.mark.parametrize("mode", GradSampleMode)


def released(
    per_sample: PerSampleEngine,
    batches: list[dict[str, Tensor]],
    projectors: Mapping[str, Projector] | None = None,
    bound: float = 0.5,
) -> dict[str, Tensor]:
    """Returns the clipped sum of a logical batch, with no noise."""
    return mechanism.released(make_private(per_sample, max_grad_norm=bound), batches, projectors)


# ---- The release ----


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, 4) for name in MODELS), ("stack", None), ("under vmap", None)]
)
def test_every_mode_releases_what_the_definition_says(name: str, rank: int | None) -> None:
    """Half of the samples are clipped; the batch is split, unevenly, into physical batches."""
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    projectors = projectors_for(model, rank)
    gradients = single_sample_gradients(model, inputs, projectors, loss)[1]
    norms = sample_norms(gradients)
    bound = norms.median().item()
    factors = (bound / norms).clamp(max=1).float()
    assert (factors < 1).any()
    expected = {n: torch.einsum("b,b...->...", factors, g) for n, g in gradients.items()}
    ways = [("layerwise", mode) for mode in GradSampleMode]
    ways += [("functorch", "materialise")] if loss is not None else []
    for engine, mode in ways:
        per_sample = make_engine(engine, model, loss, mode)
        found = released(per_sample, split(inputs, [4, 2]), projectors, bound)
        error = relative_error(flat(found), flat(expected))
        assert error < 2e-5, (engine, mode, error)


@pytest.mark.slow
@each_mode
def test_dropout_masks_are_equal_in_both_passes_and_when_recomputed(
    mode: str,
) -> None:
    """The oracle is the plain mode, whose release is that of one pass, with the same seed."""
    case = only("roberta-classifier")
    batch = case.batch(B)
    found = []
    for engine, checkpointing in ((mode, False), (mode, True), ("auto", False)):
        model = case.model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        per_sample = LayerwiseEngine(model, None, checkpointing, engine)
        per_sample(batch, {})  # the probe takes random numbers of its own
        torch.manual_seed(5)
        found.append(released(per_sample, [batch]))
    for other in found[:2]:
        assert relative_error(flat(other), flat(found[2])) < 2e-5


@each_mode
@pytest.mark.parametrize("waits", [False, True])  # a GPU would have to be waited for
def test_a_sample_that_is_not_finite_contributes_exactly_zero(
    mode: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if waits:
        monkeypatch.setattr(clipping, "_SYNCHRONOUS", set[str]())
    model, inputs, _ = MODELS["vit"]()
    per_sample = make_engine("layerwise", model, grad_sample_mode=mode)
    released(per_sample, [inputs])
    inputs["pixel_values"][2, 0, 0, 0], inputs["pixel_values"][4, 0, 1, 1] = torch.nan, torch.inf
    good = {key: value[[0, 1, 3, 5]] for key, value in inputs.items()}
    found, expected = (released(per_sample, [batch]) for batch in (inputs, good))
    assert relative_error(flat(found), flat(expected)) < 1e-5


class InEvaluation(Twice):
    """Leaves its second layer out in training, once it is told to."""

    leaves_out = False

    @property
    def times(self) -> int:  # type: ignore[override]
        return int(not (self.training and self.leaves_out))


@each_mode
def test_layers_that_a_later_pass_leaves_out_get_zero(mode: str) -> None:
    model = InEvaluation()
    projectors = {"layer.weight": Projector(torch.randn(4, 2), Side.RIGHT)}
    per_sample = make_engine("layerwise", model, total, mode)
    batch = {"x": torch.randn(B, 4)}
    released(per_sample, [batch], projectors)
    model.leaves_out = True
    found = released(per_sample, [batch], projectors)
    assert found["layer.weight"].norm() == 0 < found["first.weight"].norm()
    assert found["layer.weight"].shape == (4, 2)


def test_ghost_norms_refuse_layers_that_run_more_often_than_before() -> None:
    model = Twice()
    per_sample = make_engine("layerwise", model, total, "ghost")
    batch = {"x": torch.randn(B, 4)}
    released(per_sample, [batch])
    model.times = 2
    with pytest.raises(PrivacyError, match="not grad_sample_mode='ghost'"):
        released(per_sample, [batch])


# ---- The forms ----


def forms(gradients: Gradients) -> dict[str, set[type]]:
    return {
        name: {type(part) for part in getattr(gradient, "parts", (gradient,))}
        for name, gradient in gradients.items()
    }


@each_mode
@pytest.mark.parametrize("name", ["stack", "under vmap"])
def test_gradients_have_the_form_of_their_mode(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    gradients = per_sample_gradients(model, inputs, loss=loss, grad_sample_mode=mode)[1]
    assert_gradients_equal(gradients, single_sample_gradients(model, inputs, loss=loss)[1])
    found = forms(gradients)
    matrices = {"stack": ("first.weight", "last.weight"), "under vmap": ("0.matrix", "1.weight")}
    tables = {"stack": "table.weight", "under vmap": "0.table"}
    if mode == "materialise":
        assert all(kinds == {Dense} for kinds in found.values())
        assert not any(isinstance(gradient, GradientSum) for gradient in gradients.values())
    elif mode in ("ghost", "book_keeping"):
        assert all(found[name] == {Factored} for name in matrices[name])
        tied = {Factored} if name == "stack" else set()
        assert found[tables[name]] == {SparseRows} | tied


def test_functorch_materialises_what_it_would_keep_in_factors() -> None:
    model, inputs, loss = MODELS["stack"]()
    for mode, kind in (("auto", Factored), ("materialise", Dense)):
        one = {key: value[:, :1] for key, value in inputs.items()}  # one position is few
        gradients = per_sample_gradients(
            model, one, loss=loss, engine="functorch", grad_sample_mode=mode
        )[1]
        assert forms(gradients)["last.weight"] == {kind}


# ---- Two passes ----


def test_modules_that_share_a_parameter_make_one_group() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    groups = make_engine("layerwise", model, lambda outputs, labels: outputs).groups
    assert [set(group) for group in groups] == [
        {"0.weight", "0.bias", "2.bias"},
        {"1.weight", "1.bias"},
    ]


def test_ghost_norms_need_one_forward_pass_and_keep_no_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every gradient of a layer, nothing is alive when the next group is handed out."""
    case = only("llama")
    batch, per_sample = case.batch(B), make_engine("layerwise", case.model(), None, "ghost")
    released(per_sample, [batch])
    forwards = []
    losses = PerSampleEngine.losses
    monkeypatch.setattr(
        PerSampleEngine, "losses", lambda *args: forwards.append(1) or losses(*args)
    )
    held: list[int] = []
    hand_out = Pass._hand_out

    def noting(self: Pass, name: str, stream: Any) -> None:
        held.append(sum(len(uses) for uses in self._captured.values()))
        hand_out(self, name, stream)

    monkeypatch.setattr(Pass, "_hand_out", noting)
    alive: list[weakref.ref[Any]] = []
    consumed: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([], [])

    def consumer(names: list[tuple[str, ...]]) -> Callable[[Gradients], None]:
        def consume(gradients: Gradients) -> None:
            assert not any(reference() is not None for reference in alive)
            alive[:] = [weakref.ref(gradient) for gradient in gradients.values()]
            names.append(tuple(gradients))

        return consume

    per_sample.stream(batch, {}, *map(consumer, consumed))
    assert sorted(consumed[0]) == sorted(consumed[1]) == sorted(per_sample.groups)
    assert consumed[0] == consumed[1]
    assert forwards == [1]
    assert max(held) == 1


def checkpointed(**options: Any) -> nn.Module:
    case = only("roberta-classifier")
    model = case.model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    model.activation_checkpointing_enable({"use_reentrant": False, **options})
    return model


@pytest.mark.slow
def test_a_backward_pass_that_cannot_be_repeated_is_refused() -> None:
    """Norms would come from other masks than the gradients that are clipped by them."""
    batch = only("roberta-classifier").batch(B)
    for mode, options in (("ghost", {}), ("auto", {"preserve_rng_state": False})):
        released(make_engine("layerwise", checkpointed(**options), None, mode), [batch])
    per_sample = make_engine("layerwise", checkpointed(preserve_rng_state=False), None, "ghost")
    with pytest.raises(UnsupportedModelError, match="grew when the backward pass was repeated"):
        released(per_sample, [batch])


class _InPlace(torch.autograd.Function):
    """Squares; made in the forward pass, its gradient is scaled in place, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = 2 * x
        return x.square().sum(1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return ctx.gradient.mul_(grad_output[:, None])


@pytest.mark.parametrize(("growth", "refused"), [(5e-6, False), (5e-3, True), (4.0, True)])
def test_a_recomputed_gradient_stays_within_c_or_is_refused(growth: float, refused: bool) -> None:
    """Rounding of kernels that add in no fixed order; what grows by more is not rounding.

    With a weight of 1 the kernel repeats itself, and the first batch shows nothing.
    """
    model = Function(
        lambda m, x, weight: weight * _InPlace.apply(m.layer(x)), layer=nn.Linear(4, 3)
    )
    per_sample = make_engine("layerwise", model, lambda outputs, labels: outputs, "ghost")
    x = 100 * torch.randn(1, 4)
    released(per_sample, [{"x": x, "weight": torch.ones(1)}])
    batch = {"x": x, "weight": torch.full((1,), 1 + growth)}
    if refused:
        with pytest.raises(UnsupportedModelError, match="grew when the backward pass was repeated"):
            released(per_sample, [batch])
        return
    sums = released(per_sample, [batch])
    norm = torch.stack([value.double().norm() for value in sums.values()]).norm()
    assert 0.5 * (1 - 1e-4) < norm <= 0.5 * (1 + 1e-7)


# ---- Refusals ----


def test_an_unknown_mode_is_refused_with_the_engines_modes() -> None:
    model, _, loss = MODELS["stack"]()
    with pytest.raises(PrivacyError, match=r"grad_sample_mode='hooks'.*auto, ghost, book_keeping"):
        make_engine("layerwise", model, loss, "hooks")
    for mode in ("ghost", "book_keeping"):
        with pytest.raises(PrivacyError, match=rf"'{mode}' is not a mode of.*auto, materialise\."):
            make_engine("functorch", model, loss, mode)
