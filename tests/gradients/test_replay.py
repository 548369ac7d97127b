"""The examination of a first batch: silent on models that are right, and what it catches."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from dp_grape_hf import DPGrapeTrainer, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import Dense, functions, make_engine
from dp_grape_hf.gradients.checks.sketches import FULL, differing
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.gradients.plans import Plans
from dp_grape_hf.gradients.rules import RULES, LayerRule
from dp_grape_hf.optimizers import require_each_once
from tests.gradients.functions import TinyFunctionForSequenceClassification, cross_entropies, plain
from tests.models.matrix import projectors_for
from tests.support.marks import slow_but
from tests.support.models import TYPICAL, only
from tests.support.trainers import (
    WIDTH,
    TinyForSequenceClassification,
    Watch,
    assert_refused,
    make_trainer,
    weights_of,
)


def batch_of(case, size=3):
    return case.batch(size, case.positions)


@pytest.mark.parametrize("case", slow_but(("gpt2", "vit"), TYPICAL))
@pytest.mark.parametrize("bits", ["32", "16", "autocast"])
def test_the_models_of_the_suite_pass(case, bits):
    model = case.model().to(torch.bfloat16 if bits == "16" else None)
    batch = {
        key: value.to(model.dtype) if value.is_floating_point() else value
        for key, value in batch_of(case).items()
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=bits == "autocast"):
        assert make_engine("layerwise", model).examine(batch, projectors_for(model, 2))
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_draws_of_a_pass_begun_again_do_not_count():
    """The first texts are not padded, so T5's attention receives a mask in a later pass."""
    settings = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    config = T5Config(**settings, num_layers=1, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    words = torch.randint(2, 50, (4, 6))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[:, :3]}
    engine = make_engine("layerwise", model)
    assert engine.examine(batch, projectors_for(model, 2))
    assert engine.restarts > 0


class LosesATerm(LayerRule):
    def gradients(self, layer, saved, grad_output, batch_size):
        rows = grad_output.reshape(batch_size, -1, grad_output.shape[-1])
        return {"weight": Dense(rows.sum(1)), "bias": Dense(rows.sum(1))}


def _record_once(monkeypatch):
    """Of a square linear layer, every second call of a pass is not recorded."""
    rule, calls = type(RULES[nn.Linear]), [0]
    right = rule.gradients

    def wrong(self, layer, saved, grad_output, *args):
        if layer.weight.shape == (WIDTH, WIDTH):
            calls[0] += 1
            grad_output = grad_output * (calls[0] % 2)
        return right(self, layer, saved, grad_output, *args)

    monkeypatch.setattr(rule, "gradients", wrong)


def used_twice(m, x, labels):
    hidden = torch.tanh(m.twice(torch.tanh(m.body(x))))
    return {"logits": m.head(torch.tanh(m.twice(hidden)))}


def test_a_rule_that_drops_a_term_is_found(monkeypatch):
    case = only("gpt2")
    monkeypatch.setitem(RULES, nn.LayerNorm, LosesATerm())
    monkeypatch.setattr(Plans, "of", lambda *args: None)  # layers run by their rules
    engine = make_engine("layerwise", case.model())
    with pytest.raises(UnsupportedModelError) as error:
        engine.examine(batch_of(case), {})
    text = str(error.value)
    assert "transformer.h.0.ln_1.weight (of transformer.h.0.ln_1, a LayerNorm)" in text
    assert "bias" not in text
    assert 'engine="functorch"' in text.replace("'", '"')
    assert "requires_grad_(False)" in text


@pytest.mark.parametrize("projected", [True, False])
def test_a_function_that_is_wrong_by_a_tenth_is_found(projected, monkeypatch):
    case, right = only("llama"), functions.product
    monkeypatch.setattr(functions, "product", lambda *factors: 1.1 * right(*factors))
    model = case.model()
    engine = make_engine("layerwise", model)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight"):
        engine.examine(batch_of(case), projectors_for(model, 2) if projected else {})


def test_losses_that_depend_on_batch_mates_are_found(monkeypatch):
    """Though the gradients returned are those of each sample alone."""
    case, original = only("opt"), LayerwiseEngine.unchecked

    def coupled(self, *args):
        losses, gradients = original(self, *args)
        return losses + 0.5 * losses.mean(), gradients

    made = LayerwiseEngine(case.model())
    monkeypatch.setattr(LayerwiseEngine, "unchecked", coupled)
    with pytest.raises(PrivacyError, match="changes with the number or the contents"):
        made.examine(batch_of(case), {})


class Empty(Watch):
    """Makes the draws of the first steps empty, by their sampler."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        sampler = kwargs["train_dataloader"].batch_sampler
        draw, drawn = sampler.draw, []

        def fewer():
            drawn.append(draw())
            return drawn[-1][: len(drawn) - 1]

        sampler.draw = fewer


def test_examples_are_added_if_the_first_batch_has_too_few(monkeypatch, tmp_path):
    _record_once(monkeypatch)
    model = TinyFunctionForSequenceClassification(used_twice)
    model.twice = nn.Linear(WIDTH, WIDTH)
    monkeypatch.setattr(Plans, "of", lambda *args: None)  # layers run by their rules
    trainer = make_trainer(tmp_path, model=model, callbacks=[Empty()], method="dp_adam")
    assert_refused(trainer, r"twice\.weight \(of twice, a Linear\)", UnsupportedModelError)


class HasTwice(DPGrapeTrainer):
    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        first, second = optimizer.param_groups
        first["params"] = [*first["params"], self.model.head.bias]
        assert any(p is self.model.head.bias for p in second["params"])
        return optimizer


def test_a_parameter_that_the_optimizer_has_twice_is_found(tmp_path):
    trainer = make_trainer(tmp_path, cls=HasTwice)
    assert_refused(trainer, r"head\.bias is in the optimizer 2 times.*=None")


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        (True, r"body\.weight is in the optimizer but not trainable.*Unfreeze it"),
        (False, r"body\.weight is trainable and not in the optimizer.*Freeze it"),
    ],
    ids=["frozen", "unfrozen"],
)
def test_an_optimizer_older_than_a_freezing_is_created_again(frozen, found, tmp_path):
    model = TinyForSequenceClassification()
    model.body.weight.requires_grad_(frozen)
    trainer = make_trainer(tmp_path, model=model, learning_rate=0.5)
    trainer.create_optimizer()
    model.body.weight.requires_grad_(not frozen)
    assert_refused(trainer, found)
    trainer.optimizer = None
    before = weights_of(model)
    trainer.train()
    moved = {name: not torch.equal(before[name], now) for name, now in weights_of(model).items()}
    assert moved == dict.fromkeys(before, True) | {"body.weight": not frozen}


def test_the_optimizer_rejects_tensors_that_are_no_model_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(PrivacyError, match="A tensor that is not in the model is in the"):
        require_each_once(optimizer, model, dict(model.named_parameters()))


@pytest.mark.parametrize("confident", [True, False])
def test_rounding_of_large_16_bit_logits_is_no_coupling(confident):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=1.0,
        num_labels=3,
    )
    model = BertForSequenceClassification(config).to(torch.bfloat16)
    words = torch.randint(5, 100, (8, 9))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    classes = model.eval()(**batch).logits.argmax(1) if confident else torch.arange(8) % 3
    engine = make_engine("layerwise", model.train())
    engine.examine(batch | {"labels": classes}, {})


def coupled(m, x, labels):
    return {"logits": plain(m, x.bfloat16())["logits"] * (1.3 if len(x) > 3 else 1.0)}


def test_coupling_shows_in_16_bits(tmp_path):
    model = TinyFunctionForSequenceClassification(coupled).to(torch.bfloat16)
    with pytest.raises(PrivacyError, match="changes with the number"):
        make_trainer(tmp_path, model=model, compute_loss_func=cross_entropies).train()


@pytest.mark.parametrize(
    ("sketch", "differs"),
    [([1.5, 2.0, -3.0], False), ([0.9, 2.0, -3.0], True), ([1.5, 2.0, 3.0], True)],
    ids=["a larger norm", "a smaller norm", "another direction"],
)
def test_a_norm_may_be_an_upper_bound(sketch, differs):
    """As of a tied weight, if the terms of its gradient cancel: of a pair of similar texts."""
    exact, given = (torch.tensor([[x]], dtype=torch.float64) for x in ([1.0, 2.0, -3.0], sketch))
    assert bool(differing(given, exact, FULL, bounds=True)) is differs
    assert bool(differing(given, exact, FULL))
