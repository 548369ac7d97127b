"""A tiny encoder and decoder, sentences to repeat, and the trainer of both made private."""

import torch
from torch.nn import functional

from dp_grape_hf import DPGrapeSeq2SeqTrainer, DPGrapeSeq2SeqTrainingArguments
from tests.models.zoo import END, FIRST_WORD, VOCABULARY
from tests.support.models import row
from tests.support.trainers import Examples, make_trainer

bart = row("BART, seq2seq LM").model


def sentences(num_samples=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (num_samples, 4), generator=generator)
    ids = functional.pad(ids, (0, 1), value=END)
    mask = torch.ones_like(ids[0])
    return Examples([{"input_ids": own, "attention_mask": mask, "labels": own} for own in ids])


def seq2seq(output_dir, **changes):
    settings = {"model": bart(), "train_dataset": sentences()}
    cls, arguments = DPGrapeSeq2SeqTrainer, DPGrapeSeq2SeqTrainingArguments
    return make_trainer(output_dir, cls=cls, arguments=arguments, **settings | changes)
