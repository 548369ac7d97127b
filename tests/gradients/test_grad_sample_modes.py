"""``auto`` and ``materialise``: other forms, the same release.

Shapes: B samples in a batch.
"""

import pytest
import torch

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import ENGINES, Dense, GradSampleMode, flat as layouts, make_engine
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows
from dp_grape_hf.mechanism import clipping
from dp_grape_hf.projections import Projector, Side
from tests.models.matrix import projectors_for
from tests.support import mechanism
from tests.support.mechanism import make_private, sample_norms, split
from tests.support.networks import MODELS, B, Twice, flat, total
from tests.support.oracles import assert_gradients_equal, relative_error, single_sample_gradients

each_mode = pytest.mark.parametrize("mode", GradSampleMode)


def released(per_sample, batches, projectors=None, bound=0.5):
    """Returns the clipped sum of a logical batch, with no noise."""
    return mechanism.released(make_private(per_sample, max_grad_norm=bound), batches, projectors)


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, 4) for name in MODELS), ("stack", None), ("under vmap", None)]
)
def test_every_mode_releases_what_the_definition_says(name, rank):
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


@each_mode
@pytest.mark.parametrize("waits", [False, True])  # a GPU would have to be waited for
def test_a_sample_that_is_not_finite_contributes_exactly_zero(mode, waits, monkeypatch):
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
    leaves_out = False

    @property
    def times(self):
        return int(not (self.training and self.leaves_out))


@each_mode
def test_layers_that_a_later_pass_leaves_out_get_zero(mode):
    model = InEvaluation()
    projectors = {"layer.weight": Projector(torch.randn(4, 2), Side.RIGHT)}
    per_sample = make_engine("layerwise", model, total, mode)
    batch = {"x": torch.randn(B, 4)}
    released(per_sample, [batch], projectors)
    model.leaves_out = True
    found = released(per_sample, [batch], projectors)
    assert found["layer.weight"].norm() == 0 < found["first.weight"].norm()
    assert found["layer.weight"].shape == (4, 2)


def forms(gradients):
    return {
        name: {type(part) for part in getattr(gradient, "parts", (gradient,))}
        for name, gradient in gradients.items()
    }


@each_mode
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["stack", "under vmap"])
def test_gradients_have_the_form_of_their_mode(name, engine, mode, monkeypatch):
    monkeypatch.setattr(layouts, "MOST", 0)  # no matrix and no table is in the vector
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    gradients = make_engine(engine, model, loss, mode)(inputs, {})[1]
    assert_gradients_equal(gradients, single_sample_gradients(model, inputs, loss=loss)[1])
    found = forms(gradients)
    if mode == "materialise":
        assert all(kinds == {Dense} for kinds in found.values())
        assert not any(isinstance(gradient, GradientSum) for gradient in gradients.values())
    else:
        expected = {"table.weight": {SparseRows, Factored}, "first.weight": {Factored}}
        expected |= {"norm.bias": {Dense}}
        expected = expected if name == "stack" else {"0.table": {SparseRows}}
        assert {name: found[name] for name in expected} == expected


def test_an_unknown_mode_is_refused_with_the_modes():
    model, _, loss = MODELS["stack"]()
    for engine in ENGINES:
        with pytest.raises(PrivacyError, match=r"grad_sample_mode='ghost'.*: auto, materialise"):
            make_engine(engine, model, loss, "ghost")
