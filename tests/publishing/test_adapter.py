"""What a run saves as an adapter is, for PEFT, the model that it trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from dp_grape_hf import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.mechanism import Streams
from dp_grape_hf.projections import default_targets
from dp_grape_hf.publishing import ABSENT, MISMATCH, Adapter, verify
from dp_grape_hf.publishing.model_files import ADAPTER, ADAPTER_CONFIG, MODEL, digest
from tests.support.models import ROWS, only, row
from tests.support.trainers import (
    EXACT,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    examples_of,
    make_trainer,
    weights_of,
)

pytestmark = [
    # PEFT reads both.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is depr:FutureWarning"),
]

BERT = "bert-classifier"


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return only(name).model(**changes).to(dtype)


def trainer_of(folder: Path, name: str = BERT, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "projection_update_steps": 2,
        "save_as": "adapter",
        "learning_rate": 0.02,
        "train_dataset": examples_of(name),
    }
    if "model" not in changes:
        settings["model"] = model_of(name)
    return make_trainer(folder, **settings | changes)


def trained(folder: Path, name: str = BERT, **changes: Any) -> Any:
    trainer = trainer_of(folder, name, **changes)
    trainer.train()
    trainer.save_model()
    return trainer


@torch.no_grad()
def logits(model: nn.Module, name: str) -> Tensor:
    batch = {key: value for key, value in only(name).batch(3).items() if key != "labels"}
    dtype = next(model.parameters()).dtype
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model.eval()(**batch).logits.float()


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / ADAPTER_CONFIG).read_text()))


def statuses(folder: Path) -> dict[str, str]:
    return {check.what: check.status for check in verify(folder)}


# ---- The trained model ----

IN_BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16}
PRINCIPAL: dict[str, Any] = {"projection": "principal", "projection_update_steps": None}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2, transposed and tied": ("gpt2", {}, {}),
    "roberta, with a tied decoder": ("roberta-masked-lm", {}, {}),
    "principal directions": (BERT, {}, PRINCIPAL),
    "bfloat16, transposed and tied": ("gpt2", IN_BFLOAT16, {}),
}


# PEFT knows a tied head by its own name, "lm_head"; others it saves, and merges, as two.
untied_by_peft = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer:UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=untied_by_peft if "decoder" in case else ()) for case in CASES],
)
def test_peft_makes_of_base_and_adapter_the_trained_model(case: str, tmp_path: Path) -> None:
    name, kind, changes = CASES[case]
    low = bool(kind)
    trainer = trained(tmp_path, name, model=model_of(name, **kind), **changes)
    assert not (tmp_path / MODEL).exists()
    periods = 1 if changes.get("projection") == "principal" else 2
    assert config_of(tmp_path)["r"] == 2 * periods
    base = model_of(name, **kind)
    ours, before, said = weights_of(trainer.model), weights_of(base), logits(trainer.model, name)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    near = {"rtol": 2**-6, "atol": 2**-7} if low else {"rtol": 1e-5, "atol": 1e-6}
    about = {"rtol": 0.05, "atol": 0.05} if low else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logits(loaded, name), said, **about)
    assert not torch.allclose(logits(model_of(name, **kind), name), said, **about)
    merged = weights_of(loaded.merge_and_unload())
    for key, value in ours.items():
        torch.testing.assert_close(merged[key], value, **near, msg=lambda m, k=key: k + m)
        assert not torch.equal(value, before[key]), f"{key} was not trained"


def test_frozen_parts_are_not_saved_and_the_file_is_smaller(tmp_path: Path) -> None:
    model = model_of(BERT)
    model.bert.embeddings.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "layer.0" in name:
            parameter.requires_grad_(False)
    trainer = trained(tmp_path / "out", model=model, projection_rank=1, max_steps=2)
    names = set(load_file(tmp_path / "out" / ADAPTER))
    assert names
    for part in ("embeddings", "layer.0", "base_layer"):
        assert not [name for name in names if part in name], part
    assert config_of(tmp_path / "out")["bias"] == "none"
    trainer.model.save_pretrained(tmp_path / "whole")
    sizes = [
        path.stat().st_size for path in (tmp_path / "out" / ADAPTER, tmp_path / "whole" / MODEL)
    ]
    assert sizes[0] < sizes[1] / 3


def test_a_model_of_ones_own_is_adapted_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "save_as": "adapter",
        "projection_rank": 1,
        "optim_target_modules": ["body"],
    }
    trainer = make_trainer(tmp_path, **given)
    trainer.train()
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(TinyForSequenceClassification(), tmp_path)
    merged = weights_of(loaded.merge_and_unload())
    assert_same_weights(merged, weights_of(trainer.model), rtol=1e-5, atol=1e-6)


# ---- Any model ----


def check_a_row(name: str, folder: Path) -> Adapter:
    """Moves every trained parameter of a model, and compares what PEFT makes of its adapter."""
    model, generator = row(name).model(), torch.Generator().manual_seed(0)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    adapter = Adapter.of(model, named.values(), default_targets(model))
    factors = {}
    with torch.no_grad():
        for key, weight in named.items():
            if key not in adapter.low_rank.values():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
                continue
            rank = 1 + len(factors) % 2  # not the same for all
            left, right = (torch.randn(s, rank, generator=generator) / 5 for s in weight.shape)
            factors[key] = left, right.T
            weight.add_(left @ right.T)
    adapter.save(model.state_dict(), factors, folder)
    merged = peft.PeftModel.from_pretrained(row(name).model(), folder).merge_and_unload()
    found = dict(merged.named_parameters(remove_duplicate=False))
    for key, value in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)
    return adapter


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=untied_by_peft if "masked LM" in name else ())
        for name in map(str, ROWS)
    ],
)
def test_every_family_is_adapted_as_it_was_trained(name: str, tmp_path: Path) -> None:
    if getattr(row(name).model(), "peft_config", None):
        pytest.skip("it has an adapter already")
    if name == "ConvNeXt, image classification":  # each block has a scale of its own
        with pytest.raises(PrivacyError, match=r"contains .*layer_scale_parameter, and"):
            check_a_row(name, tmp_path)
    else:
        check_a_row(name, tmp_path)


def test_modules_with_the_suffix_of_a_saved_one_are_saved(tmp_path: Path) -> None:
    adapter = check_a_row("DistilBERT, sequence classification", tmp_path)
    assert {"pre_classifier", "classifier"} <= {*adapter.complete}
    assert "pre_classifier" not in adapter.low_rank


class Scaled(nn.Module):
    """A linear layer, and a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(40, 40)


def of(model: nn.Module, projected: list[str]) -> Adapter:
    return Adapter.of(model, [p for p in model.parameters() if p.requires_grad], projected)


def test_what_peft_cannot_save_apart_is_refused() -> None:
    with pytest.raises(PrivacyError, match="scale is a parameter of the model"):
        of(Scaled(), ["layer.weight"])
    inside = nn.ModuleDict({"block": Scaled()})
    with pytest.raises(PrivacyError, match=r"module that contains block\.scale.*Freeze"):
        of(inside, ["block.layer.weight"])
    with pytest.raises(PrivacyError, match="the weight of one linear layer alone"):
        of(inside, [])
    inside["block"].scale.requires_grad_(False)
    assert of(inside, ["block.layer.weight"]).complete == ()
    tied = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(PrivacyError, match="of one linear layer alone"):
        of(tied, ["a.weight"])


def test_names_that_peft_takes_for_others_are_refused() -> None:
    """``layer`` is projected; PEFT would adapt ``other.layer``, too."""
    model = nn.ModuleDict({"layer": nn.Linear(40, 40), "other": nn.ModuleDict()})
    model["other"]["layer"] = nn.Linear(40, 40).requires_grad_(False)
    with pytest.raises(PrivacyError, match=r"other\.layer\.lora_A\.weight"):
        of(model, ["layer.weight"])


def test_an_adapter_of_a_changed_model_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 3)})
    adapter = of(model, ["a.weight"])
    factors = {"a.weight": (torch.zeros(40, 1), torch.zeros(1, 30))}
    with pytest.raises(PrivacyError, match=r"lora_A\.weight has shape \(1, 30\)"):
        adapter.save(model.state_dict(), factors, tmp_path)
    model["b"].bias = None
    with pytest.raises(PrivacyError, match=r"b\.bias has shape None"):
        adapter.save(model.state_dict(), {}, tmp_path)


# ---- Resuming ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, IN_BFLOAT16], ids=str)
def test_a_resumed_run_has_the_adapter_of_an_uninterrupted_one(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit: checkpoints hold all weights, and the optimizer the change."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def run(folder: Path, resume: bool = False, **changes: Any) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5} | changes
        trainer = trainer_of(
            folder,
            model=model_of(BERT, **kind, **still),
            known_streams=Streams.seeded(3),
            **EXACT | settings | {"per_device_train_batch_size": 12},
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return trainer

    run(tmp_path / "whole")
    run(tmp_path / "parts", callbacks=[Watch(stop_at=3)])
    checkpoint = {path.name for path in (tmp_path / "parts" / "checkpoint-3").iterdir()}
    assert checkpoint & {MODEL, ADAPTER, ADAPTER_CONFIG} == {MODEL}
    run(tmp_path / "parts", resume=True)
    assert config_of(tmp_path / "parts") == config_of(tmp_path / "whole")
    assert config_of(tmp_path / "parts")["r"] == 2 * 3
    found, expected = (load_file(tmp_path / name / ADAPTER) for name in ("parts", "whole"))
    assert_same_weights(found, expected)
    assert MISMATCH not in statuses(tmp_path / "parts").values()
    assert MISMATCH not in statuses(tmp_path / "parts" / "checkpoint-3").values()


@pytest.mark.slow
def test_a_change_that_nobody_kept_is_refused(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, save_as="model", max_steps=2, **saving)
    again = trainer_of(tmp_path, **saving)
    with pytest.raises(PrivacyError, match="the model was trained before"):
        again.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(PrivacyError, match=r"has optimizer\.pt"):
        trainer_of(tmp_path, **saving).train(resume_from_checkpoint=True)
    model = model_of(BERT)
    trained(tmp_path / "one", model=model, save_as="model")
    other = trainer_of(tmp_path / "two", model=model, earlier_data="same")
    with pytest.raises(PrivacyError, match="Save the model and load it again as the base"):
        other.train()


# ---- Ledger and card ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    model_of(BERT).save_pretrained(folder / "base")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base")
    trained(folder / "out", model=model)
    return folder


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "out", tmp_path / "out"))


def test_an_adapter_is_verified_with_its_ledger_and_its_card(out: Path) -> None:
    found = statuses(out)
    assert MISMATCH not in found.values()
    for what in (f"weights: {ADAPTER}", ADAPTER_CONFIG, "card: statement"):
        assert found[what] == "ok"
    assert [what for what in found if found[what] == ABSENT] == [f"{ADAPTER_CONFIG}: base"]
    assert "library_name: peft" in (out / "README.md").read_text()
    recorded = Ledger.load(out / LEDGER_NAME).saved[-1].files
    assert recorded == {name: digest(out / name) for name in (ADAPTER, ADAPTER_CONFIG)}
    tensors = {name: tensor * 2 for name, tensor in load_file(out / ADAPTER).items()}
    save_file(tensors, out / ADAPTER, metadata={"format": "pt"})
    assert statuses(out)[f"weights: {ADAPTER}"] == MISMATCH
    assert statuses(out)[ADAPTER_CONFIG] == "ok"


def test_ranks_add_up_over_the_projections_and_scale_nothing(out: Path) -> None:
    config, tensors = config_of(out), load_file(out / ADAPTER)
    assert config["r"] == config["lora_alpha"] == 4  # of two projections of rank 2
    assert {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name} == {4}
    assert config["bias"] == "lora_only"


def test_peft_finds_the_base_where_the_model_was_loaded_from(saved: Path) -> None:
    loaded = peft.AutoPeftModel.from_pretrained(saved / "out")
    base = AutoModelForSequenceClassification.from_pretrained(saved / "base")
    expected = peft.PeftModel.from_pretrained(base, saved / "out")
    torch.testing.assert_close(logits(loaded, BERT), logits(expected, BERT), rtol=1e-4, atol=1e-5)


# ---- What is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_decay": 0.1}, r"weight_decay=0\.1"),
        ({"method": "dp_adam"}, "method='dp_adam' and projection='identity'"),
        (
            {
                "load_best_model_at_end": True,
                "eval_data_is_public": True,
                "eval_strategy": "steps",
                "save_strategy": "steps",
                "eval_dataset": [],
            },
            "load_best_model_at_end=True",
        ),
        ({"save_as": "lora"}, "save_as='lora' must be one of"),
        ({"projection_update_steps": 1, "max_steps": 9}, "2 x 9 projections.* at most 7 proj"),
        ({"projection_rank": 16}, "rank 16 x 2 projections"),
    ],
    ids=str,
)
def test_a_run_without_a_change_of_low_rank_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=message):
        trainer_of(tmp_path, **changes)


def test_a_model_with_an_adapter_gets_no_other(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["query"])
    with pytest.raises(PrivacyError, match="merge_and_unload"):
        trainer_of(tmp_path, model=peft.get_peft_model(model_of(BERT), config))


def test_before_training_there_is_no_change_to_save(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="Train first"):
        trainer_of(tmp_path).save_model()
    assert not list(tmp_path.iterdir())
