"""Small models whose runs choose all that is not given."""

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, set_seed

from tests.support.trainers import Examples, Watch, make_trainer

WORDS, EVERY = 50, 3


def model_of(weights):
    set_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(**sizes, **more, max_position_embeddings=16))
    if weights == "pretrained":
        for name, weight in model.named_parameters():
            if "LayerNorm.weight" in name:  # which training moves
                nn.init.uniform_(weight, 0.9, 1.1)
    return model


def examples():
    ids = torch.randint(5, WORDS, (64, 8), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(8, dtype=torch.long)
    return Examples(
        [{"attention_mask": ones, "input_ids": x, "labels": int(x[0] % 3)} for x in ids]
    )


def trainer_of(folder, model, **changes):
    """Returns a trainer with epsilon, delta and epochs alone, but for what ``changes`` give."""
    own = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    settings = {"num_train_epochs": 2, "train_dataset": examples()} | own
    return make_trainer(folder, chooses=True, **settings | changes)


def saving_trainer_of(folder, model, stop_at=None, **changes):
    """Returns such a trainer that saves checkpoints, and stops after a step."""
    saving = {"save_strategy": "steps", "save_steps": EVERY, "callbacks": [Watch(stop_at=stop_at)]}
    return trainer_of(folder, model, **saving | changes)
