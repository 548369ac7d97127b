"""The paper's comparisons against their definitions, and the suites that every method passes."""

import math
import sys
from collections import defaultdict
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import Side
from dp_grape_hf.projections.seeds import projection_generator
from recipes.common.provenance import with_adapter
from recipes.paper.methods import released, whole_batch, zeroth_order
from tests.support.methods import (
    PLAIN,
    Moments,
    assert_same_steps,
    batch_of_all,
    definition,
    noisy_run,
    plain_trainer,
    run,
)
from tests.support.trainers import (
    EXACT,
    TinyForSequenceClassification,
    assert_same_weights,
    make_trainer,
    tiny,
)

ROWS = zeroth_order.ROWS | released.ROWS | whole_batch.ROWS


NOT_PRIVATE = [name for name, row in ROWS.items() if not row.private]


def singular_vectors(gradient, rank):
    """Returns the leading singular vectors on the side of the smaller dimension, in columns."""
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    return right[:rank].T if gradient.shape[0] >= gradient.shape[1] else left[:, :rank]


def along(gradient, basis, update):
    if len(basis) == gradient.shape[1]:
        return update(gradient @ basis) @ basis.T
    return basis @ update(basis.T @ gradient)


def public_galore(monkeypatch):
    """Imports galore-torch, whose 8-bit optimizer, not needed here, wants a library for GPUs."""
    if find_spec("bitsandbytes") is None:
        for name in ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        stub = sys.modules["bitsandbytes.optim.optimizer"]
        stub.Optimizer2State = object
    return pytest.importorskip("galore_torch")


def test_galore_is_the_public_implementation(tmp_path, monkeypatch):
    """Step for step, with a redraw in between. Its eps counts before the bias correction."""
    reference = public_galore(monkeypatch)
    found = run(tmp_path, "galore", **PLAIN, max_steps=5, adam_epsilon=1e-12)
    model = TinyForSequenceClassification()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    settings = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "proj_type": "std"}
    optimizer = reference.GaLoreAdamW(
        [{"params": others}, {"params": matrices, **settings}],
        lr=1e-2,
        eps=1e-12,
        no_deprecation_warning=True,
    )
    for actual in found[1:]:
        batch = batch_of_all()
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        wanted = {name: weight.detach() for name, weight in model.named_parameters()}
        assert_same_weights(actual, wanted, atol=2e-5, rtol=1e-4)


def along_singular_vectors():
    """GaLore (Zhao et al. 2024, Algorithm 2, alpha = 1): SVD of the gradient every few steps."""
    moments = defaultdict(Moments)
    bases = {}

    def update(step, private_grads):
        if step % 3 == 0:
            matrices = {n: g for n, g in private_grads.items() if g.dim() == 2}
            bases.update({n: singular_vectors(g, 2) for n, g in matrices.items()})
        return {
            n: along(g, bases[n], moments[n].update) if n in bases else moments[n].update(g)
            for n, g in private_grads.items()
        }

    return update


def along_random_directions():
    """SGD along the random projection of the private gradient."""

    def update(step, private_grads):
        moves = {}
        for name, gradient in private_grads.items():
            if gradient.dim() == 2:
                generator = projection_generator(0, step // 3, name)
                p = torch.randn(min(gradient.shape), 2, generator=generator) / 2**0.5
                gradient = along(gradient, p, lambda projected: projected)
            moves[name] = 1e-2 * gradient
        return moves

    return update


def test_singular_vectors_are_orthonormal_and_computed_in_float32():
    vectors = released.leading_vectors(torch.zeros(6, 16), 3, Side.LEFT)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(3))
    gradient = torch.randn(16, 6).bfloat16()
    found = [released.leading_vectors(g, 3, Side.RIGHT) for g in (gradient, gradient.float())]
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["adam", "lora"])
def test_a_counterpart_is_the_plain_trainer(method, tmp_path):
    expected = plain_trainer(tmp_path / "plain", tiny(method), steps=5)
    found = run(tmp_path / "ours", method, **PLAIN, max_steps=5)
    assert_same_steps(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("private", "plain"), [("dp_adam", "adam"), ("dp_lora", "lora"), ("dp_galore", "galore")]
)
def test_a_private_method_without_noise_and_clipping_is_its_counterpart(private, plain, tmp_path):
    one = run(tmp_path / "a", private, **EXACT, max_steps=5)
    other = run(tmp_path / "b", plain, **PLAIN, max_steps=5)
    assert_same_steps(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", NOT_PRIVATE)
def test_a_method_that_is_not_private_says_so(method, tmp_path):
    trainer = make_trainer(
        tmp_path, method=method, model=tiny(method), noise_multiplier=None, max_steps=2
    )
    trainer.train()
    trainer.save_model()
    spent = trainer.privacy_spent()
    assert not spent.private
    assert spent.epsilon == float("inf")
    assert trainer.ledger.mechanism.method == method
    assert trainer.ledger.steps == 2
    card = (tmp_path / "README.md").read_text()
    assert "**This model has no privacy guarantee**" in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16": True}, "mixed_precision='bf16' with method="),
        ({"perturbation": 1e-5}, "perturbation=1e-05 is below 0.0001"),
        ({"perturbation": 0.0}, "perturbation=0.0 must be greater than 0"),
        ({"perturbation": math.nan}, "perturbation=nan must be greater than 0"),
        ({"n_directions": 0}, "n_directions=0 must be greater than 0"),
        ({"update_rule": "adam"}, "update_rule='adam' needs gradients"),
        ({"model": TinyForSequenceClassification().bfloat16()}, "Load the model in float32"),
    ],
)
def test_a_finite_difference_that_rounding_would_spoil_is_refused(changes, message, tmp_path):
    with pytest.raises(PrivacyError, match=message):
        make_trainer(tmp_path, method="dpzero", **changes)


@pytest.mark.parametrize(
    ("method", "update", "atol", "rtol"),
    [
        ("dp_galore", along_singular_vectors, 2e-5, 1e-4),
        ("d2p2", along_random_directions, 1e-6, 1e-5),
    ],
)
def test_a_private_method_is_its_definition(method, update, atol, rtol, tmp_path):
    found = noisy_run(tmp_path, method)
    expected = definition(found[0], 5, update())
    assert_same_steps(found[1:], expected, atol=atol, rtol=rtol)


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("model", "layers", "alpha"),
    [
        (
            OPTForCausalLM(OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8)),
            {"q_proj", "v_proj"},
            16,
        ),
        (RobertaForMaskedLM(RobertaConfig(**TINY, intermediate_size=8)), {"query", "value"}, 16),
        (ViTForImageClassification(ViTConfig(**TINY, intermediate_size=8)), None, 8),
    ],
    ids=["opt", "roberta", "vit"],
)
def test_lora_uses_the_layers_of_mezo_if_mezo_names_any(model, layers, alpha):
    adapted = with_adapter(model, "dp_lora", 8)
    (config,) = adapted.peft_config.values()
    trained = {n.split(".lora_")[0] for n, p in adapted.named_parameters() if p.requires_grad}
    assert (config.r, config.lora_alpha) == (8, alpha)
    assert {name.rpartition(".")[2] for name in trained} == layers or layers is None
    assert len(trained) == (len(layers) if layers else 7)  # of the one layer, and the head
