"""The memory of a step next to weights of few bits."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import OPTConfig

from dp_grape_hf.memory import WEIGHTS, Setting, simulate
from recipes.benchmark.memory import as_markdown
from recipes.benchmark.packed import METHOD, PackedLinear, PackedModel, main

RANK = 2
CONFIG = OPTConfig(
    **{"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 70},
    architectures=["OPTForCausalLM"],
)


@pytest.mark.slow
def test_weights_of_few_bits_are_counted_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = PackedModel(CONFIG, 8, 4, RANK).build(torch.bfloat16)
    packed = [m for m in built.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 2 * 6
    for layer in packed:
        numbers = layer.in_features * layer.out_features
        assert layer.weight.nbytes == numbers / 2
        assert layer.scales.nbytes == numbers / 64 * 4
    assert {n.split(".")[-3] for n, w in built.named_parameters() if w.requires_grad} == {"lora_B"}
    few, more = (
        simulate(model.build, model.batch, Setting(METHOD, rank=RANK, dtype=torch.bfloat16))
        for model in (PackedModel(CONFIG, 8, bits, RANK) for bits in (4, 8))
    )
    packed_numbers = sum(m.in_features * m.out_features for m in packed)
    assert more.kinds[WEIGHTS] - few.kinds[WEIGHTS] == packed_numbers / 2
    CONFIG.save_pretrained(tmp_path)
    main(f"--model_name_or_path {tmp_path} --bits 8 --rank {RANK} --seq_len 8".split())
    report = json.loads(capsys.readouterr().out)
    assert report["bits"] == 8
    assert report["parameters"] == PackedModel(CONFIG, 8, 8, RANK).parameters
    assert len(as_markdown([report]).splitlines()) == 2 + 1


def test_a_packed_layer_multiplies_forward_and_backward() -> None:
    layer = nn.Linear(6, 5)
    packed = PackedLinear(layer, 8)
    packed.unpacked = lambda: layer.weight.detach()  # type: ignore[method-assign]
    x = torch.randn(3, 6, requires_grad=True)
    (found,) = torch.autograd.grad(packed(x).square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
