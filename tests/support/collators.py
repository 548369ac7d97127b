"""Collators of texts of several lengths."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def tokenizer(side="right"):
    vocabulary = {str(i): i for i in range(60)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="0")),
        pad_token="1", unk_token="0", mask_token="2", padding_side=side,
    )  # fmt: skip


def longest_first(examples):
    longest = max(len(e["input_ids"]) for e in examples)
    rows = [
        [x for x in e["input_ids"] for _ in range(longest // len(e["input_ids"]))] for e in examples
    ]
    rows = [row + [1] * (longest - len(row)) for row in rows]
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }
