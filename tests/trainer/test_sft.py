"""TRL's ``SFTTrainer`` made private: its preparation of data, its evaluation."""

import sys

import datasets
import pytest
import torch

import dp_grape_hf
from dp_grape_hf import PrivacyError
from tests.support.sft import WORDS, llama, prompts, send_nothing, sft
from tests.support.trainers import assert_same_weights, weights_of

pytest.importorskip("trl", reason="TRL is an optional extra")
peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    send_nothing(monkeypatch)


@pytest.mark.parametrize("completions_only", [False, None])
def test_the_loss_is_the_mean_over_the_samples_own_completion(completions_only, tmp_path):
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
def test_a_peft_config_trains_the_adapter_alone(tmp_path):
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
def test_conversations_train_with_autocast_and_checkpointing(tmp_path):
    """bfloat16 autocast, gradient checkpointing and the chat template."""
    said = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}]
    chats = datasets.Dataset.from_list([{"messages": said}] * 24)
    trainer = sft(tmp_path, bf16=True, gradient_checkpointing=True, train_dataset=chats)
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert text.split() == ["<user>", "w0", "</s>", "<assistant>", "w1", "</s>"]
    assert trainer.args.bf16
    assert trainer.args.gradient_checkpointing_kwargs["use_reentrant"] is False
    trainer.train()
    assert trainer.ledger.steps == 4


def test_rows_that_are_dropped_are_not_counted(tmp_path):
    """A prompt that fills ``max_length`` leaves nothing to learn; N is what is left."""
    rows = [*prompts(20), {"prompt": " ".join(WORDS[:9]), "completion": " w1"}]
    trainer = sft(tmp_path, train_dataset=datasets.Dataset.from_list(rows), max_length=8)
    assert trainer.plan.mechanism.num_samples == len(trainer.train_dataset) == 20


@pytest.mark.parametrize("prepared", [True, False])
def test_evaluating_on_the_training_data_is_refused(prepared, tmp_path):
    data = prompts()
    with pytest.raises(PrivacyError, match="training rows"):
        sft(tmp_path, train_dataset=data, eval_dataset={"seen": data})
    trainer = sft(tmp_path, train_dataset=data)
    with pytest.raises(PrivacyError, match="training rows"):
        trainer.evaluate(trainer.train_dataset if prepared else data)


def test_without_trl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "dp_grape_hf.trainer.sft")
    monkeypatch.delattr(dp_grape_hf.trainer, "sft")
    with pytest.raises(ImportError, match=r"pip install 'dp_grape_hf\[sft\]'"):
        dp_grape_hf.__getattr__("DPGrapeSFTTrainer")
    with pytest.raises(AttributeError, match="DPGrapeNothing"):
        dp_grape_hf.__getattr__("DPGrapeNothing")


@pytest.mark.parametrize("name", ["DPGrapeSFTConfig", "DPGrapeDPOConfig", "DPGrapeRewardConfig"])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_configs_are_made_on_any_machine(name, has_bfloat16, tmp_path, monkeypatch):
    for module in ("dp_grape_hf.trainer.sft", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: has_bfloat16)
    config = getattr(dp_grape_hf, name)(output_dir=str(tmp_path), eps=8, delta=1e-4)
    assert config.bf16 is has_bfloat16
