"""A tiny encoder and decoder, sentences to repeat, and the trainer of both made private."""

from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

from dp_grape_hf import DPGrapeSeq2SeqTrainer, DPGrapeSeq2SeqTrainingArguments
from tests.support.trainers import Examples, make_trainer

PAD, START, END, FIRST_WORD, VOCABULARY = 1, 0, 2, 5, 20
SETTINGS = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 24,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
    "decoder_start_token_id": END,
    "forced_eos_token_id": None,
}


def bart() -> BartForConditionalGeneration:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BartForConditionalGeneration(BartConfig(**SETTINGS))


def sentences(num_samples: int = 24, seed: int = 0) -> Examples:
    """Returns sentences of four words to be repeated."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (num_samples, 4), generator=generator)
    ids = torch.nn.functional.pad(ids, (0, 1), value=END)
    mask = torch.ones_like(ids)
    return Examples(
        [
            {"input_ids": ids[i], "attention_mask": mask[i], "labels": ids[i]}
            for i in range(num_samples)
        ]
    )


def seq2seq(output_dir: Path, **changes: Any) -> Any:
    """Returns a trainer of a tiny BART on ``sentences``."""
    settings: dict[str, Any] = {
        "cls": DPGrapeSeq2SeqTrainer,
        "arguments": DPGrapeSeq2SeqTrainingArguments,
        "model": bart(),
        "train_dataset": sentences(),
    }
    return make_trainer(output_dir, **settings | changes)
