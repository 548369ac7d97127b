"""A tiny language model, its words, and TRL's trainer of it made private."""

from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.trainers import make_trainer

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
WORDS = [f"w{i}" for i in range(24)]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, with a chat template."""
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


def llama(**changes: Any) -> LlamaForCausalLM:
    settings = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**settings | changes))


def prompts(num_samples: int = 24, seed: int = 0, words: int | None = None) -> datasets.Dataset:
    """Returns prompts and completions, of ``words`` words each or of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> str:
        chosen = torch.randint(0, len(WORDS), (length,), generator=generator)
        return " ".join(WORDS[i] for i in chosen)

    rows = [
        {"prompt": text(words or 2 + i % 4), "completion": " " + text(words or 1 + i % 3)}
        for i in range(num_samples)
    ]
    return datasets.Dataset.from_list(rows)


def chats(num_samples: int = 24) -> datasets.Dataset:
    rows = [
        {
            "messages": [
                {"role": "user", "content": WORDS[i % len(WORDS)]},
                {"role": "assistant", "content": WORDS[(i + 1) % len(WORDS)]},
            ]
        }
        for i in range(num_samples)
    ]
    return datasets.Dataset.from_list(rows)


QUIET = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}


def sft(output_dir: Path, **changes: Any) -> Any:
    """Returns a trainer of a tiny Llama on ``prompts``."""
    from dp_grape_hf import DPGrapeSFTConfig, DPGrapeSFTTrainer  # they need TRL, an optional extra

    settings: dict[str, Any] = {
        "cls": DPGrapeSFTTrainer,
        "arguments": DPGrapeSFTConfig,
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
    }
    model = changes.pop("model", None) or llama()
    return make_trainer(output_dir, model=model, **settings | QUIET | changes)
