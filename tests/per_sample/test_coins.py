"""Random numbers that examples share are refused, wherever they are drawn; one's own are not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    HubertConfig,
    HubertForSequenceClassification,
    M2M100Config,
    M2M100ForConditionalGeneration,
    SEWConfig,
    SEWForSequenceClassification,
    UniSpeechConfig,
    UniSpeechForSequenceClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WavLMConfig,
    WavLMForSequenceClassification,
)

from dp_grape_hf import PrivacyError, UnsupportedModelError, per_sample_gradients
from dp_grape_hf.per_sample import make_engine, refuse_shared_collation
from tests.support.marks import slow_but
from tests.support.mechanism import make_private
from tests.support.models import only
from tests.support.trainers import (
    Examples,
    TinyForSequenceClassification,
    examples_of,
    make_trainer,
)

both = pytest.mark.parametrize("engine", ["layerwise", "functorch"])


class Small(nn.Module):
    """Two layers, and between them whatever coins a test tosses."""

    def __init__(self, toss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.toss = nn.Linear(4, 6), nn.Linear(6, 2), toss

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(self.toss(hidden) if self.training else hidden)


def squares(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().sum(1)


def gradients(toss: Callable[[Tensor], Tensor], engine: str = "layerwise") -> Any:
    return per_sample_gradients(
        Small(toss).train(), {"x": torch.randn(3, 4)}, loss=squares, engine=engine
    )


# ---- Coins of one's own ----


def drops_paths(hidden: Tensor) -> Tensor:
    """Stochastic depth, a coin for each sample."""
    return hidden * (0.7 + torch.rand(len(hidden), 1)).floor() / 0.7


def drops_in_a_loop(hidden: Tensor) -> Tensor:
    return torch.stack([row * torch.rand(()) for row in hidden])


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda hidden: functional.dropout(hidden, 0.5),
    "noise": lambda hidden: hidden + torch.randn_like(hidden),
    "drop path": drops_paths,
    "bernoulli": lambda hidden: hidden * torch.bernoulli(torch.full_like(hidden[:, :1], 0.5)),
    "layer drop at rate 0": lambda hidden: hidden if torch.rand([]) >= 0.0 else hidden * 0,
    "a loop over samples": drops_in_a_loop,
}


@pytest.mark.parametrize("name", OWN)
def test_coins_of_ones_own_pass(name: str) -> None:
    losses, _ = gradients(OWN[name])
    assert losses.shape == (3,)


def test_equal_sizes_of_different_draws_are_no_shared_coin() -> None:
    """Two copies of a text of nine words have as many numbers as three of a text of six."""

    class TwoTexts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = (
                functional.dropout(self.layer(t).flatten(0, 1), 0.5, self.training) for t in (x, y)
            )
            return x.view(-1, 36).square().mean(1) + y.view(-1, 24).square().mean(1)

    inputs = {"x": torch.randn(3, 9, 4), "y": torch.randn(3, 6, 4)}
    losses, _ = per_sample_gradients(TwoTexts(), inputs, loss=lambda outputs, _: outputs)
    assert losses.shape == (3,)


# ---- Shared coins ----


def drops_layers(hidden: Tensor) -> Tensor:
    return hidden if torch.rand([]) >= 0.05 else hidden * 0


def drops_the_batch(hidden: Tensor) -> Tensor:
    """``StochasticDepth(mode="batch")``, as torchvision computes it."""
    noise = torch.empty([1] * hidden.dim(), dtype=hidden.dtype).bernoulli_(0.9)
    return hidden * noise.div_(0.9)


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer drop": drops_layers,
    "stochastic depth of a batch": drops_the_batch,
    "layer drop beside dropout": lambda hidden: functional.dropout(drops_layers(hidden), 0.5),
    "a mask of features": lambda hidden: hidden * (torch.rand(6) > 0.1),
    "one scale": lambda hidden: hidden * torch.empty(1).uniform_(0.9, 1.1),
    "a permutation": lambda hidden: hidden[:, torch.randperm(6)],
    "an angle": lambda hidden: hidden + torch.randint(2, ()),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_coin_that_a_batch_shares_is_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="once for all samples of a physical batch"):
        gradients(SHARED[name])


def test_a_shared_coin_is_seen_where_no_output_shows_it_yet() -> None:
    """A head of zeros makes every loss equal; the head's gradient is what is released."""
    model = Small(drops_layers).train()
    nn.init.zeros_(model.second.weight)
    with pytest.raises(PrivacyError, match="once for all samples"):
        per_sample_gradients(
            model,
            {"x": torch.randn(3, 4)},
            loss=lambda outputs, _: (outputs - 1).square().sum(1),
        )


def test_a_model_is_examined_in_training_mode_after_it_was_in_evaluation_mode() -> None:

    engine = make_engine("layerwise", Small(drops_layers).eval(), squares)
    engine({"x": torch.randn(3, 4)}, {})
    engine.model.train()
    with pytest.raises(PrivacyError, match="once for all samples"):
        engine({"x": torch.randn(3, 4)}, {})


# ---- Models that have them ----

SPEECH: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "mask_time_prob": 0.3,
    "mask_time_length": 2,
    "vocab_size": 20,
}
SPEECH_MODELS = {
    "wav2vec2": (Wav2Vec2Config, Wav2Vec2ForSequenceClassification),
    "hubert": (HubertConfig, HubertForSequenceClassification),
    "wavlm": (WavLMConfig, WavLMForSequenceClassification),
    "unispeech": (UniSpeechConfig, UniSpeechForSequenceClassification),
    "sew": (SEWConfig, SEWForSequenceClassification),
}


def speech(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config, cls = SPEECH_MODELS[name]
    extra = {"squeeze_factor": 1} if name == "sew" else {}
    model = cls(config(**{**SPEECH, **extra, **settings})).train()
    model.base_model.masked_spec_embed.requires_grad_(False)  # of SpecAugment alone
    generator = torch.Generator().manual_seed(0)
    waves = torch.randn(3, 800, generator=generator)
    return model, {"input_values": waves, "labels": torch.tensor([0, 1, 2])}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", slow_but(("wav2vec2",), SPEECH_MODELS))
def test_speech_models_are_refused_with_layer_drop_and_spec_augment_only(name: str) -> None:
    model, inputs = speech(name, layerdrop=0.1, apply_spec_augment=False)
    with pytest.raises(PrivacyError, match=r"layerdrop=0\.0"):
        per_sample_gradients(model, inputs)
    model, inputs = speech(name, layerdrop=0.0, apply_spec_augment=True)
    with pytest.raises(PrivacyError, match="apply_spec_augment=False"):
        per_sample_gradients(model, inputs)
    model, inputs = speech(name, layerdrop=0.0, apply_spec_augment=False)
    losses, _ = per_sample_gradients(model, inputs)
    assert losses.isfinite().all()


TEXT: dict[str, Any] = {
    "vocab_size": 30,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 20,
}


def translates(config: Any, cls: Any, **rates: float) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.arange(24).view(3, 8) % 20 + 4
    return cls(config(**TEXT, **rates)).train(), {"input_ids": ids, "labels": ids.clone()}


def bart(rate: float) -> tuple[nn.Module, dict[str, Tensor]]:
    rates = {"encoder_layerdrop": rate, "decoder_layerdrop": 0.0}
    return translates(BartConfig, BartForConditionalGeneration, **rates)


def m2m100(rate: float) -> tuple[nn.Module, dict[str, Tensor]]:
    rates = {"encoder_layerdrop": 0.0, "decoder_layerdrop": rate}
    return translates(M2M100Config, M2M100ForConditionalGeneration, **rates)


def opt(rate: float) -> tuple[nn.Module, dict[str, Tensor]]:
    return only("opt").model(layerdrop=rate).train(), only("opt").batch(3)


@pytest.mark.slow
@both
@pytest.mark.parametrize("make", [bart, m2m100, opt])
def test_text_models_are_refused_with_layer_drop_only(
    make: Callable[[float], Any], engine: str
) -> None:
    model, inputs = make(0.05)
    with pytest.raises(PrivacyError, match=r"layerdrop=0\.0"):
        per_sample_gradients(model, inputs, engine=engine)
    model, inputs = make(0.0)
    losses, _ = per_sample_gradients(model, inputs, engine=engine)
    assert losses.isfinite().all()


def test_a_private_run_with_layer_drop_is_refused_before_its_first_release(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model=only("opt").model(layerdrop=0.2), train_dataset=examples_of("opt")
    )
    with pytest.raises(PrivacyError, match="once for all samples"):
        trainer.train()
    assert trainer.ledger.steps == 0


# ---- Streams beside torch's, and seeds ----


def shares_numpy(hidden: Tensor) -> Tensor:
    return hidden * float(np.random.rand())


def shares_python(hidden: Tensor) -> Tensor:
    return hidden * random.random()


def rewinds_numpy(hidden: Tensor) -> Tensor:
    state = np.random.get_state()
    hidden = hidden * float(np.random.rand())
    np.random.set_state(state)
    return hidden


@pytest.mark.parametrize("toss", [shares_numpy, shares_python, rewinds_numpy])
def test_a_forward_that_draws_beside_torch_is_refused(toss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PrivacyError, match="numpy or Python"):
        gradients(toss)


def seeds_torch(hidden: Tensor) -> Tensor:
    torch.manual_seed(0)
    return functional.dropout(hidden, 0.5)


def rewinds_torch(hidden: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return functional.dropout(hidden, 0.5)


@pytest.mark.parametrize("toss", [seeds_torch, rewinds_torch])
def test_a_forward_that_sets_torchs_stream_is_refused(toss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PrivacyError, match="seeds torch's global random numbers"):
        gradients(toss)


class NoisyForSequenceClassification(TinyForSequenceClassification):
    """Adds noise to its features."""

    def __init__(self, noise: Callable[[Tensor], Tensor], in_training_only: bool = False) -> None:
        super().__init__()
        self.noise, self.in_training_only = noise, in_training_only

    def forward(self, x: Tensor, labels: Any = None, id: Any = None) -> dict[str, Tensor]:
        quiet = self.in_training_only and not self.training
        return super().forward(x if quiet else self.noise(x), labels, id)


_OWN = torch.Generator().manual_seed(0)


def draws_from_a_generator(hidden: Tensor) -> Tensor:
    return hidden * torch.rand(hidden.shape, generator=_OWN)


def test_a_generator_of_the_models_own_is_not_called_coupling(tmp_path: Path) -> None:
    model = NoisyForSequenceClassification(draws_from_a_generator, in_training_only=True)
    with pytest.raises(PrivacyError, match="a generator of its own"):
        make_trainer(tmp_path, model=model).train()


# ---- Noise in evaluation mode: the same sample is never the same ----


def dropout_by_hand(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.3)


def noise_of_the_embeddings(x: Tensor) -> Tensor:
    return x + 1e-3 * torch.zeros_like(x).uniform_(-1, 1)


def dropout_that_never_ends(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3)


def noise_of_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(*x.shape)).float()


NOISE = {
    dropout_by_hand: "rand_like in ",
    noise_of_the_embeddings: "uniform in ",
    dropout_that_never_ends: "bernoulli in ",
    noise_of_numpy: "of numpy or Python",
    draws_from_a_generator: "a generator of its own",
}


@pytest.mark.parametrize("how", ["layerwise", "functorch", "dpzero"])
@pytest.mark.parametrize("noise", NOISE)
def test_noise_in_evaluation_mode_is_called_noise(
    noise: Callable[[Tensor], Tensor], how: str, tmp_path: Path
) -> None:
    chosen = {"method": how} if how == "dpzero" else {"engine": how}
    trainer = make_trainer(tmp_path, model=NoisyForSequenceClassification(noise), **chosen)
    with pytest.raises(UnsupportedModelError, match=f"{NOISE[noise]}.*in training mode only"):
        trainer.train()
    assert trainer.ledger.steps == 0


def test_noise_shows_before_the_collator_is_blamed(tmp_path: Path) -> None:
    """Texts of several lengths: the collator's padding is tried, and loss by loss compared."""
    case = only("bert-classifier")
    model, labels = case.model(), case.batch(12)["labels"]
    model.dropout.register_forward_hook(lambda module, args, output: dropout_by_hand(output))
    examples = [{"input_ids": list(range(5, 9 + i)), "labels": labels[i]} for i in range(12)]

    def pad(some: list[Any]) -> dict[str, Tensor]:
        ids = [torch.tensor(example["input_ids"]) for example in some]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
        return {"input_ids": padded, "labels": torch.stack([x["labels"] for x in some])}

    trainer = make_trainer(
        tmp_path, model=model, train_dataset=Examples(examples), data_collator=pad
    )
    with pytest.raises(UnsupportedModelError, match="rand_like in Dropout"):
        trainer.train()


# ---- A forward that seeds numpy: what it draws is public ----


def test_bigbirds_seeds_do_not_reach_the_streams_of_collators() -> None:
    """Its random blocks come from numpy, which it seeds with the number of the layer."""
    config = BigBirdConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, attention_type="block_sparse",
        block_size=2, num_random_blocks=1, num_labels=3, sep_token_id=2,
    )  # fmt: skip
    model = BigBirdForSequenceClassification(config).train()
    model.bert.pooler.requires_grad_(False)  # which its head leaves out
    engine = make_private(make_engine("layerwise", model))
    inputs = {"input_ids": torch.randint(5, 30, (3, 32)), "labels": torch.tensor([0, 1, 2])}
    np.random.seed(3)
    expected = np.random.RandomState(3).rand(2)
    engine.begin({})
    found = []
    for _ in range(2):
        engine.accumulate(inputs)
        assert engine.per_sample.reseeds_host
        found.append(np.random.rand())
    assert found == expected.tolist()


def test_a_draw_beside_torch_that_the_probe_did_not_see_is_refused() -> None:
    draws = [False]
    model = Small(lambda hidden: hidden * float(np.random.rand()) if draws[0] else hidden)
    engine = make_private(make_engine("layerwise", model.train(), squares))
    engine.begin({})
    engine.accumulate({"x": torch.randn(3, 4)})
    draws[0] = True
    with pytest.raises(PrivacyError, match="numpy or Python"):
        engine.accumulate({"x": torch.randn(3, 4)})


# ---- Collators ----


def stacked(examples: list[Any]) -> dict[str, Tensor]:
    return {key: torch.stack([e[key] for e in examples]) for key in ("x", "labels")}


def crops_a_batch(examples: list[Any]) -> dict[str, Tensor]:
    batch, size = stacked(examples), random.randint(3, 6)
    return batch | {"x": batch["x"] * (torch.arange(6) < size)}


def flips_a_batch(examples: list[Any]) -> dict[str, Tensor]:
    batch = stacked(examples)
    return batch | {"x": batch["x"].flip(1) if np.random.rand() < 0.5 else batch["x"]}


def masks_at_one_rate(examples: list[Any]) -> dict[str, Tensor]:
    """One coin decides how much is masked, and further ones what: rows differ all the same."""
    batch, rate = stacked(examples), torch.rand(()) / 2
    return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) > rate)}


@pytest.mark.parametrize("collate", [crops_a_batch, flips_a_batch, masks_at_one_rate])
def test_a_collator_with_one_coin_a_call_is_refused(
    collate: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=r"one coin for all|once for all samples"):
        make_trainer(tmp_path, data_collator=collate).train()


def test_a_collator_that_pads_on_a_side_chosen_for_the_batch_is_refused(tmp_path: Path) -> None:
    def pads(examples: list[Any]) -> dict[str, Tensor]:
        longest, left = max(len(e["x"]) for e in examples), random.random() < 0.5
        rows = []
        for example in examples:
            missing = longest - len(example["x"])
            rows.append(functional.pad(example["x"], (missing, 0) if left else (0, missing)))
        return {"x": torch.stack(rows), "labels": torch.stack([e["labels"] for e in examples])}

    label = torch.tensor(0)
    short, long = ({"x": torch.ones(size), "labels": label} for size in (3, 6))
    with pytest.raises(PrivacyError, match="on which side they are padded"):
        refuse_shared_collation(pads, short, long)
    refuse_shared_collation(pads, short, short)  # where nothing is padded no coin shows


def masks_positions(examples: list[Any]) -> dict[str, Tensor]:
    batch = stacked(examples)
    return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) > 0.1)}


def flips_each(examples: list[Any]) -> dict[str, Tensor]:
    batch = stacked(examples)
    rows = [row.flip(0) if random.random() < 0.5 else row for row in batch["x"]]
    return batch | {"x": torch.stack(rows)}


def jitters_each(examples: list[Any]) -> dict[str, Tensor]:
    batch = stacked(examples)
    return batch | {"x": batch["x"] + torch.from_numpy(np.random.randn(*batch["x"].shape)).float()}


@pytest.mark.parametrize("collate", [stacked, masks_positions, flips_each, jitters_each])
def test_a_collator_with_coins_for_each_example_trains(
    collate: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, data_collator=collate, max_steps=2)
    trainer.train()
    assert trainer.ledger.steps == 2


def seeds_numpy(examples: list[Any]) -> dict[str, Tensor]:
    np.random.seed(0)
    return jitters_each(examples)


def rewinds_python(examples: list[Any]) -> dict[str, Tensor]:
    state = random.getstate()
    batch = flips_each(examples)
    random.setstate(state)
    return batch


@pytest.mark.parametrize("collate", [seeds_numpy, rewinds_python])
def test_a_collator_that_seeds_or_rewinds_a_global_stream_is_refused(
    collate: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match="data collator seeds the global random numbers"):
        make_trainer(tmp_path, data_collator=collate).train()
