"""An adapter in fixed directions trains as DP-GRAPE does, also beside weights in 4 and 8 bits."""

import peft
import pytest
import torch

from dp_grape_hf import principal_adapter
from dp_grape_hf.projections import principal, probes
from dp_grape_hf.publishing import MISMATCH, verify
from tests.models.zoo import QUANTISED, quantised
from tests.support.models import only, without_dropout
from tests.support.trainers import (
    EXACT,
    Watch,
    assert_same_weights,
    examples_of,
    make_trainer,
    weights_of,
)

SETTINGS = {"projection_rank": 2, "max_steps": 4, "learning_rate": 0.02}
PRINCIPAL = {"projection": "principal", "projection_update_steps": None}


def llama():
    return without_dropout(only("llama").model(bos_token_id=1))  # 0 is the padding


@pytest.mark.slow
def test_its_change_is_that_of_dp_grape(tmp_path, monkeypatch):
    monkeypatch.setattr(principal, "_TURNS", 100)  # random weights have no few directions
    for module in (principal, probes):  # which are worse conditioned on fewer tokens
        monkeypatch.setattr(module, "TOKENS", 1024)
    monkeypatch.setattr(principal, "_MOST_KEPT", 2**20)
    data, adapted, plain = examples_of("llama", 24), principal_adapter(llama(), 2), llama()
    moved = {
        name.removeprefix("base_model.model.").replace(".lora_B.default", "")
        for name, weight in adapted.named_parameters()
        if weight.requires_grad
    }
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name in moved)
    for model, own in ((plain, PRINCIPAL), (adapted, {"method": "dp_lora"})):
        settings = SETTINGS | EXACT | own
        folder = tmp_path / f"{len(own)}"
        make_trainer(folder, model=model, train_dataset=data, **settings).train()
    merged = adapted.merge_and_unload()
    assert_same_weights(weights_of(merged), weights_of(plain), atol=2e-6, rtol=1e-5)
    start = weights_of(llama())
    assert all((weights_of(plain)[name] - start[name]).abs().max() > 1e-3 for name in moved)
    assert {name for name in moved if "mlp" in name or "self_attn" in name} == moved


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # its base is gone
@pytest.mark.slow
@pytest.mark.parametrize("how", QUANTISED)
def test_it_trains_beside_weights_in_few_bits(how, tmp_path):
    base = quantised(llama(), how)
    model, watch = principal_adapter(base, 2), Watch()
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_B" in name for name in trained)
    trainer = make_trainer(
        tmp_path,
        model=model,
        train_dataset=examples_of("llama", 24),
        method="dp_lora",
        earlier_data="other",  # the folder that the weights were loaded from is gone
        callbacks=[watch],
        **SETTINGS,
    )
    trainer.train()  # which compares gradients with those of autograd first
    trainer.save_model()
    assert MISMATCH not in {check.status for check in verify(tmp_path)}
    saved = peft.load_peft_weights(str(tmp_path), device="cpu")
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(saved[name.replace(".default", "")], weight.detach())
        if "lora_A" in name:  # orthonormal, as measured
            torch.testing.assert_close(weight @ weight.T, torch.eye(2), rtol=0, atol=1e-4)
    assert all(watch.weights[-1][name].abs().max() > 0 for name in trained)


def test_directions_may_be_trained_and_be_those_of_other_inputs():
    batch = {k: v for k, v in only("llama").batch(4).items() if k != "labels"}
    model = principal_adapter(llama(), 2, inputs=lambda: [batch], train_directions=True)
    usual = principal_adapter(llama(), 2)
    for (name, ours), other in zip(model.named_parameters(), usual.parameters(), strict=True):
        assert ours.requires_grad is ("lora_" in name)
        assert other.requires_grad is ("lora_B" in name)
        if "lora_A" in name:
            assert not torch.equal(ours, other)
