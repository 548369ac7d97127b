"""Adapters on a frozen base in 4 or 8 bits, of bitsandbytes and torchao."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dp_grape_hf import UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import StateGuard
from tests.models.zoo import QUANTISED
from tests.support.marks import slow_but
from tests.support.oracles import assert_exact

each_kind = pytest.mark.parametrize("kind", QUANTISED)


def base(folder, kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=QUANTISED[kind](), dtype=torch.float32
    )


def adapted(model):
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def batch():
    ids = torch.randint(1, 64, (3, 9))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@each_kind
def test_gradients_of_adapters_on_a_quantised_base_are_exact(tmp_path, kind):
    model = adapted(base(tmp_path, kind))
    assert_exact(model.train(), batch())
    model.eval()
    with torch.no_grad():
        model(**batch())  # bitsandbytes lays 4-bit weights out for inference, without a gradient
    gradients = assert_exact(model.train(), batch())
    assert all(gradient.squared_norm().any() for gradient in gradients.values())


@pytest.mark.filterwarnings("ignore:.*gemm_4bit.*:UserWarning")
@pytest.mark.parametrize("kind", slow_but(("nf4",), ["nf4", "torchao"]))
def test_functorch_is_exact_too(tmp_path, kind):
    assert_exact(adapted(base(tmp_path, kind)), batch(), engine="functorch")


def test_functorch_refuses_a_layer_that_cannot_be_vectorised(tmp_path):
    model = adapted(base(tmp_path, "int8"))
    with pytest.raises(UnsupportedModelError, match=r'setup_context.*engine="layerwise"'):
        per_sample_gradients(model, batch(), engine="functorch")


def test_a_statistic_in_a_quantised_layer_is_refused(tmp_path):
    model = base(tmp_path, "nf4")
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.register_buffer("seen", torch.zeros(1))
    layer.register_forward_hook(lambda m, args, _: m.seen.add_(args[0].detach().mean()))
    with (
        pytest.raises(
            UnsupportedModelError, match=r"changed model\.layers\.0\.mlp\.down_proj\.seen"
        ),
        StateGuard(model=model).unchanged(),
    ):
        model(**batch())
