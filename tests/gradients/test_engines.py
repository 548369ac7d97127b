"""Both engines against the definition: each sample alone, through ordinary autograd."""

import pytest
import torch
from torch import nn

from dp_grape_hf import PrivacyError, UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import ENGINES, make_engine
from dp_grape_hf.gradients.rows import batch_size_of
from tests.gradients.functions import mean_output
from tests.models.matrix import projectors_for
from tests.support.marks import slow_but
from tests.support.models import HEADS, TYPICAL, only, texts
from tests.support.oracles import assert_exact
from tests.support.trainers import examples_of, make_trainer

each_engine = pytest.mark.parametrize("engine", ENGINES)


def toy(layer=None):
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh(), layer or nn.Identity()))


@pytest.mark.parametrize("case", slow_but(("bert-classifier", "gpt2"), TYPICAL))
def test_gradients_are_exact_where_the_batch_size_equals_another_dimension(case):
    model = case.model()
    for batch_size in {1, HEADS, case.positions}:
        assert_exact(model, case.batch(batch_size, case.positions), projectors_for(model, 8))


@each_engine
@pytest.mark.parametrize("case", slow_but(("gpt2",), TYPICAL))
def test_the_model_and_the_random_state_are_as_before(case, engine):
    model = case.model()
    model.get_submodule(next(n for n, _ in model.named_modules() if n.count(".") == 1)).eval()
    next(model.parameters()).requires_grad_(False)

    def state():
        return {
            "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
            "training": {n: m.training for n, m in model.named_modules()},
            "trainable": {n: p.requires_grad for n, p in model.named_parameters()},
            "gradients": [n for n, p in model.named_parameters() if p.grad is not None],
            "attention": model.config._attn_implementation,
        }

    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    before, random = state(), torch.get_rng_state()
    per_sample_gradients(model, case.batch(2), projections=projectors_for(model, 8), engine=engine)
    assert torch.equal(torch.get_rng_state(), random)
    assert state() == before
    assert before["gradients"] == []
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@each_engine
def test_the_result_holds_no_graph(engine):
    losses, gradients = per_sample_gradients(
        only("opt").model(), only("opt").batch(3), engine=engine
    )
    assert not losses.requires_grad
    for name, gradient in gradients.items():
        assert not gradient.squared_norm().requires_grad, name
        assert not gradient.weighted_sum(torch.ones(3)).requires_grad, name


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), r"1\.1: BatchNorm1d mixes samples.*LayerNorm"),
        (nn.Embedding(5, 4, max_norm=1.0), r"1\.1: Embedding.*max_norm"),
        (nn.Embedding(5, 4, scale_grad_by_freq=True), r"1\.1: Embedding.*scale_grad_by_freq"),
    ],
)
def test_a_layer_that_mixes_samples_is_refused_with_its_path(layer, message):
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine("layerwise", toy(layer), mean_output)


@each_engine
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda outputs: outputs.mean(), "0-dimensional tensor"),
        (lambda outputs: outputs[:, :1], "2-dimensional tensor"),
        (lambda outputs: outputs.flatten(), "tensor of another length"),
        (lambda outputs: 0.5, "float"),
    ],
)
def test_a_loss_must_have_one_number_per_sample(engine, loss, kind):
    inputs = {"input": torch.randn(3, 6)}
    with pytest.raises(PrivacyError, match=f"The loss is a {kind}.*one loss per sample"):
        per_sample_gradients(toy(), inputs, engine=engine, loss=lambda outputs, _: loss(outputs))


@each_engine
def test_inputs_that_disagree_on_the_batch_size_are_refused(engine):
    inputs = texts(4, target="class")
    inputs["attention_mask"] = inputs["attention_mask"][:1]
    with pytest.raises(PrivacyError, match=r"'attention_mask' and 'input_ids' have other leading"):
        per_sample_gradients(only("roberta-classifier").model(), inputs, engine=engine)


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(PrivacyError, match=r"engine='hooks' does not.*functorch, layerwise"):
        make_engine("hooks", toy(), mean_output)


def test_flex_attention_is_refused_before_the_model_runs(tmp_path):
    """Its first run is compiled, for a minute."""
    model = only("llama").model(attn_implementation="flex_attention")
    model.register_forward_pre_hook(lambda *given: pytest.fail("the model ran"))
    with pytest.raises(UnsupportedModelError, match=r"attn_implementation='sdpa' or 'eager'"):
        make_trainer(tmp_path, model=model, train_dataset=examples_of("llama"))
    model.set_attn_implementation("sdpa")
    make_engine("layerwise", model)


def test_concatenated_patches_of_images_are_refused_with_the_remedy():
    batch = {"input_ids": torch.zeros(2, 5), "pixel_values": torch.zeros(32, 6)}
    with pytest.raises(PrivacyError) as plain:
        batch_size_of(batch)
    assert "grid" not in str(plain.value)
    with pytest.raises(PrivacyError, match=r"pixel_values \(B, P, d\), of images of one size"):
        batch_size_of({**batch, "image_grid_thw": torch.ones(2, 3)})
