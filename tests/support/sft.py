"""A tiny language model, its words, and TRL's trainer of it made private."""

from functools import partial

import datasets
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tests.support.models import build, only
from tests.support.trainers import make_trainer

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
WORDS = [f"w{i}" for i in range(24)]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    found.chat_template = CHAT
    return found


def llama():
    """Returns a model of one layer with these words."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), "num_hidden_layers": 1}
    return only("llama").model(**sizes, **special)


def prompts(num_samples=24, seed=0, words=None):
    """Returns prompts and completions, of ``words`` words each or of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(length):
        chosen = torch.randint(0, len(WORDS), (length,), generator=generator)
        return " ".join(WORDS[i] for i in chosen)

    rows = [
        {"prompt": text(words or 2 + i % 4), "completion": " " + text(words or 1 + i % 3)}
        for i in range(num_samples)
    ]
    return datasets.Dataset.from_list(rows)


QUIET = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}


def send_nothing(monkeypatch):
    """Shows no progress bars of ``map``, and makes sending anything an error."""
    datasets.disable_progress_bars()

    def send(**kwargs):
        raise AssertionError("the run was reported to somebody")

    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", send)


def sft(output_dir, **changes):
    from dp_grape_hf import DPGrapeSFTConfig, DPGrapeSFTTrainer  # they need TRL, an optional extra

    settings = {
        "cls": DPGrapeSFTTrainer,
        "arguments": DPGrapeSFTConfig,
        "model": llama(),
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
    }
    return make_trainer(output_dir, **settings | QUIET | changes)


def pairs(num_pairs=12, seed=0, **columns):
    chosen, rejected = (prompts(num_pairs + s, seed=seed + s).to_list() for s in (0, 1))
    rows = [
        {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]}
        for a, b in zip(chosen, rejected[1:], strict=True)
    ]
    found = datasets.Dataset.from_list(rows)
    for name, values in columns.items():
        found = found.add_column(name, values)
    return found


def policy(kind, seed=0):
    """Returns the model of a trainer on pairs, by its kind."""
    made = llama().config
    if kind == "reward":
        made.num_labels = 1
    cls = LlamaForCausalLM if kind == "dpo" else LlamaForSequenceClassification
    return build(cls, lambda **changes: made, {}, seed)


def on_pairs(kind, output_dir, **changes):
    from dp_grape_hf import DPGrapeDPOTrainer, DPGrapeRewardTrainer  # they need TRL

    cls = {"dpo": DPGrapeDPOTrainer, "reward": DPGrapeRewardTrainer}[kind]
    own = {name: changes.pop(name) for name in ("ref_model",) if name in changes}
    if kind == "dpo" and "peft_config" not in changes:
        own.setdefault("ref_model", policy(kind, seed=1))
    settings = {"model": policy(kind), "train_dataset": pairs(), "processing_class": tokenizer()}
    return make_trainer(
        output_dir,
        cls=partial(cls, **own),
        arguments=cls.arguments_class,
        **{**settings, **QUIET, **changes},
    )
