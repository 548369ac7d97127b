"""A model whose loss has no form per sample is refused: why first, then what to do, then lists."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

from dp_grape_hf import DPGrapeTrainer, PrivacyError, UnsupportedModelError
from dp_grape_hf.per_sample import per_sample_gradients
from dp_grape_hf.per_sample.adapters import ADAPTERS
from dp_grape_hf.per_sample.losses.heads import HEADS
from dp_grape_hf.per_sample.losses.losses import loss_for
from recipes.models import zoo
from tests.support.trainers import Examples, make_trainer

SMALL: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2},
}
TEXT = {**SMALL, "vocab_size": 60, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}


def clip() -> CLIPModel:
    config = CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)
    return CLIPModel(config).train()


def test_a_contrastive_model_is_told_that_samples_are_compared(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        make_trainer(tmp_path, model=clip())
    why, what, *rest = str(refusal.value).split(". ")
    assert "contrastive" in why
    assert "compares the samples of a batch with each other" in why
    assert "compute_loss_func=f" in what
    assert not rest


def pairs(count: int = 4) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(5, 60, (count, 6)),
        "pixel_values": torch.randn(count, 3, 8, 8),
    }


def among_the_batch(outputs: Any, _: Any) -> Tensor:
    """Contrasts each text with all images of the batch."""
    logits = outputs.logits_per_text
    return functional.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def test_a_contrastive_loss_of_ones_own_is_told_the_same() -> None:
    with pytest.raises(PrivacyError, match=r"compares the samples of a batch.*\(contrastive"):
        per_sample_gradients(clip(), pairs(), loss=among_the_batch)


def test_negatives_in_ones_own_row_are_the_way_out() -> None:
    class OwnNegatives(nn.Module):
        """A text and three images a row, the first of which is its own."""

        def __init__(self) -> None:
            super().__init__()
            self.clip = clip()

        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
            texts = self.clip.get_text_features(input_ids=input_ids).pooler_output
            images = self.clip.get_image_features(pixel_values=pixel_values.flatten(0, 1))
            images = images.pooler_output.unflatten(0, pixel_values.shape[:2])
            scores = functional.cosine_similarity(texts[:, None], images, dim=-1)
            return scores * self.clip.logit_scale.exp()

    def loss(scores: Tensor, _: Any) -> Tensor:
        own = torch.zeros(len(scores), dtype=torch.long)
        return functional.cross_entropy(scores, own, reduction="none")

    inputs = pairs() | {"pixel_values": torch.randn(4, 3, 3, 8, 8)}
    losses, gradients = per_sample_gradients(OwnNegatives().train(), inputs, loss=loss)
    assert losses.shape == (4,)
    assert all(gradient.squared_norm().shape == (4,) for gradient in gradients.values())


def test_an_unknown_head_is_told_what_to_do_before_what_is_known() -> None:
    class ViTForSomethingNew(ViTForImageClassification):
        """Has a head whose loss nobody knows."""

    with pytest.raises(UnsupportedModelError) as refusal:
        loss_for(ViTForSomethingNew(ViTConfig(**IMAGE)))
    why, what, known = str(refusal.value).split(". ")
    assert why == "The loss of ViTForSomethingNew is not known per sample"
    assert what.startswith("Pass compute_loss_func=f")
    assert all(suffix in known for suffix in HEADS)


# ---- Pairs of answers, of which one was preferred ----


class Rewards(nn.Module):
    """Rewards of texts of five tokens; of both answers of a pair at once, if there are two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(60, 8), nn.Linear(8, 1)

    def forward(self, input_ids: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.words(input_ids)).mean(-2)).squeeze(-1)}


def preference(outputs: Any, labels: Any = None) -> Tensor:
    chosen, rejected = outputs["logits"].unbind(1)
    return -functional.logsigmoid(chosen - rejected)


class RewardTrainer(DPGrapeTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sides = [model(input_ids=inputs[name])["logits"] for name in ("chosen", "rejected")]
        return preference({"logits": torch.stack(sides, 1)}).mean()


def answers(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randint(60, (2, 5))) for _ in range(count)]


def test_two_calls_for_a_pair_are_told_of_one_call_for_both(tmp_path: Path) -> None:
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in answers()]
    trainer = make_trainer(
        tmp_path,
        cls=RewardTrainer,
        model=Rewards(),
        train_dataset=Examples(rows),
        remove_unused_columns=False,
    )
    with pytest.raises(PrivacyError, match=r"calls the model 2 times.*\. Where an example is a p"):
        trainer.train()


def test_two_rows_for_a_pair_are_told_of_one_row_for_both(tmp_path: Path) -> None:
    def two_rows(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"input_ids": torch.cat([example["input_ids"] for example in examples])}

    trainer = make_trainer(
        tmp_path,
        model=Rewards(),
        train_dataset=Examples([{"input_ids": torch.stack(pair)} for pair in answers()]),
        data_collator=two_rows,
        compute_loss_func=preference,
    )
    with pytest.raises(PrivacyError, match=r"another number of rows.*pairs .* make one row each"):
        trainer.train()


# ---- Adapters ----


def test_the_adapters_that_errors_name_are_those_that_were_compared() -> None:
    assert set(ADAPTERS) == set(zoo.ADAPTERS)
    refused = {family.adapter for family in zoo.FAMILIES if family.refused.get("layerwise")}
    assert not refused & set(ADAPTERS)
    assert set(ADAPTERS) <= {family.adapter for family in zoo.FAMILIES}
