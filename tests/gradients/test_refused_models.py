"""A model whose loss has no form per sample is refused: why first, then what to do, then lists."""

import pytest
import torch
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification

from dp_grape_hf import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import per_sample_gradients
from dp_grape_hf.gradients.adapters import ADAPTERS
from dp_grape_hf.gradients.losses.heads import HEADS
from dp_grape_hf.gradients.losses.losses import loss_for
from tests.models import zoo
from tests.support.trainers import make_trainer

SMALL = {
    **{"hidden_size": 16, "intermediate_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2},
}
TEXT = {**SMALL, "vocab_size": 60, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}


def clip():
    config = CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)
    return CLIPModel(config).train()


def test_a_contrastive_model_is_told_that_samples_are_compared(tmp_path):
    with pytest.raises(UnsupportedModelError) as refusal:
        make_trainer(tmp_path, model=clip())
    why, what, *rest = str(refusal.value).split(". ")
    assert "contrastive" in why
    assert "compares the samples of a batch with each other" in why
    assert "compute_loss_func=f" in what
    assert not rest


def among_the_batch(outputs, _):
    logits = outputs.logits_per_text
    return functional.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def test_a_contrastive_loss_of_ones_own_is_told_the_same():
    pairs = {"input_ids": torch.randint(5, 60, (4, 6)), "pixel_values": torch.randn(4, 3, 8, 8)}
    with pytest.raises(PrivacyError, match=r"compares the samples of a batch.*\(contrastive"):
        per_sample_gradients(clip(), pairs, loss=among_the_batch)


def test_an_unknown_head_is_refused_with_remedy_before_known_heads():
    class ViTForSomethingNew(ViTForImageClassification):
        """Has a head whose loss nobody knows."""

    with pytest.raises(UnsupportedModelError) as refusal:
        loss_for(ViTForSomethingNew(ViTConfig(**IMAGE)))
    why, what, known = str(refusal.value).split(". ")
    assert why == "The loss of ViTForSomethingNew is not known per sample"
    assert what.startswith("Pass compute_loss_func=f")
    assert all(suffix in known for suffix in HEADS)


def test_the_adapters_that_errors_name_are_those_that_were_compared():
    assert set(ADAPTERS) == set(zoo.ADAPTERS)
    refused = {family.adapter for family in zoo.FAMILIES if family.refused.get("layerwise")}
    assert not refused & set(ADAPTERS)
    assert set(ADAPTERS) <= {family.adapter for family in zoo.FAMILIES}
