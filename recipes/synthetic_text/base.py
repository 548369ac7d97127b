"""A tiny causal language model, trained without privacy on the public questions of SQuAD.

    python -m recipes.synthetic_text.base --dataset_path data/squad --output_dir runs/public-lm

Each question stands behind its answer, so the model learns that a text depends on its prefix. It
takes the place of pretrained weights where none can be downloaded. Hardware: one CPU core, eight
minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg

from recipes.common.provenance import origin, write
from recipes.paper.data import load_split

PAD, END = "<pad>", "</s>"
HELD_OUT = 500  # texts


@dataclass
class BaseArguments:
    """Public texts, and the size of the model."""

    dataset_path: str = HfArg(help="SQuAD, or a data set of its form: a folder or a name.")
    output_dir: str = HfArg(help="Folder of the model and its tokenizer.")
    splits: str = HfArg(default="train+validation+test", help="Splits that are read.")
    vocab_size: int = HfArg(default=2048, help="Number of tokens of the tokenizer.")
    hidden_size: int = HfArg(default=128, help="Width of the transformer.")
    num_hidden_layers: int = HfArg(default=3, help="Number of its layers.")
    max_length: int = HfArg(default=40, help="Texts are cut at so many tokens.")
    num_train_epochs: float = HfArg(default=4, help="Passes over the texts.")
    seed: int = HfArg(default=0, help="Seed of weights and order.")


def main(args: BaseArguments) -> dict[str, Any]:
    """Train, save, and return the loss on texts that were held out."""
    set_seed(args.seed)
    rows = load_split(args.splits, args.dataset_path, args.dataset_path)
    pairs = zip(rows["answers"], rows["question"], strict=True)
    distinct = {question: f"{found['text'][0]}\n{question}" for found, question in pairs}
    held_out, texts = [*distinct.values()][:HELD_OUT], [*distinct.values()][HELD_OUT:]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    def tokenized(texts: list[str]) -> Dataset:
        ended = [text + END for text in texts]
        ids = tokenizer(ended, truncation=True, max_length=args.max_length)["input_ids"]
        return Dataset.from_dict({"input_ids": ids})

    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.output_dir,
            num_train_epochs=args.num_train_epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=100,
            weight_decay=0.01,
            train_sampling_strategy="group_by_length",
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
            use_cpu=True,
            seed=args.seed,
        ),
        train_dataset=tokenized(texts),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer.save_model()
    tokenizer.save_pretrained(args.output_dir)
    loss = trainer.evaluate(tokenized(held_out))["eval_loss"]
    results = {"texts": len(texts), "held_out_loss": loss, **origin()}
    write(Path(args.output_dir) / "results.json", results)
    sys.stdout.write(f"Saved in {args.output_dir}. Loss on {HELD_OUT} held-out texts: {loss:.2f}\n")
    return results


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of public texts."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token=PAD, eos_token=END)


if __name__ == "__main__":
    main(*HfArgumentParser(BaseArguments).parse_args_into_dataclasses())
