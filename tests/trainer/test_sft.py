"""TRL's ``SFTTrainer`` made private: the same releases, its preparation of data, its evaluation."""

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import dp_grape_hf
from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.mechanism import Streams
from tests.support.sft import QUIET, WORDS, chats, llama, prompts, sft, tokenizer
from tests.support.trainers import (
    EXACT,
    Watch,
    assert_same_weights,
    make_trainer,
    weights_of,
)

trl = pytest.importorskip("trl", reason="TRL is an optional extra")
peft = pytest.importorskip("peft")

from dp_grape_hf import DPGrapeSFTConfig, DPGrapeSFTTrainer  # noqa: E402  (needs TRL)
from dp_grape_hf.trainer.sft import REFUSED_IF_SET  # noqa: E402

# TRL sets the old name of the option by default, and transformers says so.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bars of ``map``; sending anything is an error."""
    datasets.disable_progress_bars()

    def send(**kwargs: Any) -> None:
        raise AssertionError("the run was reported to somebody")

    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", send)


# ---- Training ----


@pytest.mark.slow
def test_releases_are_those_of_the_plain_private_trainer(tmp_path: Path) -> None:
    """The same tokens, labels, coins and noise: the same weights, bit by bit."""
    first = sft(tmp_path / "sft", known_streams=Streams.known())
    rows, collator = first.train_dataset, first.data_collator
    assert rows[0]["labels"].count(-100) == 2  # the prompt
    first.train()
    second = make_trainer(
        tmp_path / "plain",
        cls=DPGrapeTrainer,
        model=llama(),
        train_dataset=rows.select_columns(["input_ids", "labels"]),
        data_collator=collator,
        known_streams=Streams.known(),
    )
    second.train()
    assert first.ledger.steps == second.ledger.steps == 4
    assert_same_weights(weights_of(first.model), weights_of(second.model))


@pytest.mark.slow
def test_without_noise_and_projection_it_trains_as_the_original(tmp_path: Path) -> None:
    """All completions have as many words, so that the mean over words is the mean of the means."""
    settings: dict[str, Any] = {"max_steps": 3, "report_to": "none", "save_strategy": "no"}
    settings |= {"disable_tqdm": True, "use_cpu": True, **QUIET}
    model = llama()
    args = trl.SFTConfig(
        str(tmp_path / "plain"),
        per_device_train_batch_size=24,
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
        **settings,
    )
    data, words = prompts(words=3), tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **kwargs: None)
        plain = trl.SFTTrainer(model, args, train_dataset=data, processing_class=words)
    plain.train()
    private = sft(tmp_path, train_dataset=data, projection="identity", **EXACT | settings)
    private.train()
    assert_same_weights(weights_of(private.model), weights_of(model), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("completions_only", [False, None])
def test_the_loss_is_the_mean_over_the_samples_own_completion(
    completions_only: bool | None, tmp_path: Path
) -> None:
    """Two completions of different length weigh the same; the prompt counts only if asked for."""
    trainer = sft(tmp_path, completion_only_loss=completions_only)
    rows = trainer.train_dataset
    batch = trainer.data_collator([rows[0], rows[2]])
    found = trainer.private_run.per_sample.losses(batch)
    for i, row in enumerate((rows[0], rows[2])):
        ids = torch.tensor(row["input_ids"])
        raw = prompts()[[0, 2][i]]
        start = len(raw["prompt"].split()) if completions_only is not False else 1
        logits = trainer.model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = -logits.gather(1, ids[1:, None])[start - 1 :].mean()
        torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_peft_config_trains_the_adapter_alone(tmp_path: Path) -> None:
    model = llama()
    before = weights_of(model)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = sft(tmp_path, model=model, peft_config=lora)
    trainer.train()
    after = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): value
        for name, value in weights_of(trainer.model).items()
    }
    assert_same_weights({name: after[name] for name in before}, before)
    moved = [value for name, value in after.items() if "lora_B" in name]
    assert moved
    assert all(value.any() for value in moved)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert (tmp_path / "saved" / "privacy_ledger.json").exists()


@pytest.mark.slow
def test_the_defaults_of_the_host_stay_and_train(tmp_path: Path) -> None:
    """bfloat16 autocast and gradient checkpointing are on."""
    trainer = sft(tmp_path, bf16=None, gradient_checkpointing=True)
    assert trainer.args.bf16
    assert trainer.args.gradient_checkpointing_kwargs["use_reentrant"] is False
    trainer.train()
    assert trainer.ledger.steps == 4


@pytest.mark.slow
def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    trainer = sft(tmp_path, train_dataset=chats())
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert text.split() == ["<user>", "w0", "</s>", "<assistant>", "w1", "</s>"]
    trainer.train()
    assert trainer.ledger.steps == 4


def test_rows_that_are_dropped_are_not_counted(tmp_path: Path) -> None:
    """A prompt that fills ``max_length`` leaves nothing to learn; N is what is left."""
    rows = [*prompts(20), {"prompt": " ".join(WORDS[:9]), "completion": " w1"}]
    trainer = sft(tmp_path, train_dataset=datasets.Dataset.from_list(rows), max_length=8)
    assert trainer.plan.mechanism.num_samples == len(trainer.train_dataset) == 20


# ---- What is logged ----


def test_nothing_of_the_training_data_is_logged(tmp_path: Path) -> None:
    watch = Watch()
    trainer = sft(
        tmp_path,
        callbacks=[watch],
        eval_dataset=prompts(6, seed=1),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    allowed = {"grad_norm", "learning_rate", "epsilon", "epoch", "train_runtime"}
    groups = ["", *(f"_{group.name}" for group in trainer.rates.groups)]
    allowed |= {f"{what}{of}" for what in ("signal", "noise") for of in groups}
    allowed |= {"train_samples_per_second", "train_steps_per_second"}
    evaluated = {"loss", "runtime", "samples_per_second", "steps_per_second", "entropy"}
    evaluated |= {"mean_token_accuracy"}
    names = {name for logs in watch.logs for name in logs}
    assert names == allowed | {f"eval_{name}" for name in evaluated}


def test_the_loss_of_the_host_is_refused_on_training_batches(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    trainer.model.train()
    with pytest.raises(PrivacyError, match="training mode"):
        trainer.compute_loss(trainer.model, batch)
    trainer.model.eval()
    assert trainer.compute_loss(trainer.model, batch) > 0


@pytest.mark.parametrize("prepared", [True, False])
def test_evaluating_on_the_training_data_is_refused(prepared: bool, tmp_path: Path) -> None:
    data = prompts()
    with pytest.raises(PrivacyError, match="eval_dataset is the train_dataset"):
        sft(tmp_path, train_dataset=data, eval_dataset={"seen": data})
    trainer = sft(tmp_path, train_dataset=data)
    with pytest.raises(PrivacyError, match="eval_dataset is the train_dataset"):
        trainer.evaluate(trainer.train_dataset if prepared else data)


# ---- Arguments ----

REFUSED = [
    *((name, 0.1 if "coef" in name else True) for name in REFUSED_IF_SET),
    ("loss_type", "dft"),
    ("use_liger_kernel", True),
    ("fp16", True),
    ("train_sampling_strategy", "batch_rebalance"),
    ("neftune_noise_alpha", 5.0),
]


@pytest.mark.parametrize(("option", "value"), REFUSED)
def test_an_option_that_voids_the_guarantee_is_refused(
    option: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=rf"{option}={value!r} is refused"):
        sft(tmp_path, **{option: value})


def test_short_names_work(tmp_path: Path) -> None:
    args = DPGrapeSFTConfig(str(tmp_path), eps=3.0, delta=1e-5, r=4, F=7, use_cpu=True, **QUIET)
    assert (args.target_epsilon, args.projection_rank, args.projection_update_steps) == (3.0, 4, 7)
    with pytest.raises(PrivacyError, match="same quantity"):
        DPGrapeSFTConfig(str(tmp_path), eps=3.0, target_epsilon=2.0)


def test_arguments_of_the_original_are_refused(tmp_path: Path) -> None:
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, **QUIET)
    with pytest.raises(PrivacyError, match="SFTConfig; pass a DPGrapeSFTConfig"):
        DPGrapeSFTTrainer(llama(), args, train_dataset=prompts(), processing_class=tokenizer())


def test_without_trl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "dp_grape_hf.trainer.sft")
    monkeypatch.delattr(dp_grape_hf.trainer, "sft")
    with pytest.raises(ImportError, match=r"pip install 'dp_grape_hf\[sft\]'"):
        dp_grape_hf.__getattr__("DPGrapeSFTTrainer")
    with pytest.raises(AttributeError, match="DPGrapeNothing"):
        dp_grape_hf.__getattr__("DPGrapeNothing")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_run_is_saved_as_an_adapter_with_its_tokenizer(tmp_path: Path) -> None:
    trainer = sft(tmp_path, save_as="adapter", max_steps=2)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "tokenizer.json").is_file()
    assert not (tmp_path / "model.safetensors").exists()
    merged = peft.PeftModel.from_pretrained(llama(), tmp_path).merge_and_unload()
    assert_same_weights(weights_of(merged), weights_of(trainer.model), rtol=1e-5, atol=1e-6)
