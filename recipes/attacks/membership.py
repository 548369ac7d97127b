"""Small text classifiers, trained with and without privacy, and what membership inference needs.

The third notebook of ``recipes/tutorial`` trains and attacks them. Two scores of a text are used:

* the confidence of a model (loss threshold, Yeom et al. 2018): a text with a smaller loss is more
  likely a member;
* LiRA, offline (Carlini et al. 2022): the confidence of the model is compared with the confidences
  of models that were not trained on the text, in standard deviations of a Gaussian. With few shadow
  models, one standard deviation is fitted for all texts, as the authors advise.

Shapes: M models, n texts, T words.
"""

import math
import tempfile
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn
from transformers import PrinterCallback, default_data_collator, set_seed

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments

VOCABULARY, LENGTH, HIDDEN, LABELS = 2048, 32, 64, 2
PAD = 0
LEAST_SPREAD = 1e-3  # smallest standard deviation of the confidences of shadow models

Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]
Example = dict[str, Tensor]


def made_up(count: int, seed: int) -> list[tuple[str, int]]:
    """Return sentences with words that depend on the label; a tenth of the labels is wrong."""
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        label = int(generator.random() < 0.5)
        telling = [f"{'good' if label else 'bad'}{i}" for i in generator.integers(0, 20, 3)]
        other = [f"word{i}" for i in generator.integers(0, 400, 12)]
        words = [*telling, *other]
        generator.shuffle(words)
        texts.append((" ".join(words), label if generator.random() < 0.9 else 1 - label))
    return texts


def encode(text: str, label: int) -> Example:
    """Return hashes of the first T words, which need no vocabulary from the data."""
    ids = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text.split()[:LENGTH]]
    padding = LENGTH - len(ids)
    return {
        "input_ids": torch.tensor(ids + [PAD] * padding),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
        "labels": torch.tensor(label),
    }


class BagForSequenceClassification(nn.Module):
    """A bag-of-words classifier: a hidden layer and a head on the sum of word embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.words.weight, std=0.1)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, LABELS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the logits (B, 2) of texts (B, T), without a loss."""
        words = self.words(input_ids) * attention_mask[:, :, None]
        total = words.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1).sqrt()
        return {"logits": self.head(torch.tanh(self.body(total)))}


def train(examples: list[Example], seed: int, **options: Any) -> tuple[nn.Module, float]:
    """Return a model trained on the examples by the options, and the epsilon spent."""
    set_seed(seed)
    model = BagForSequenceClassification()
    with tempfile.TemporaryDirectory() as folder:
        args = DPGrapeTrainingArguments(
            **{"output_dir": folder, "per_device_train_batch_size": 512, "seed": seed},
            **{"save_strategy": "no", "logging_strategy": "no", "report_to": "none"},
            **{"disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False},
            **options,
        )
        trainer = DPGrapeTrainer(model, args, train_dataset=examples)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return model, trainer.privacy_spent().epsilon


@torch.no_grad()
def confidence_of(model: nn.Module, examples: list[Example]) -> Scores:
    """Return log(p / (1 - p)) for the probability p of the true label of each example, (n,).

    It decreases with the loss, -log p, and its distribution is closer to normal (Carlini et al.
    2022).
    """
    batch = default_data_collator(examples)
    labels = batch.pop("labels")[:, None]
    logits = model.eval()(**batch)["logits"].double()
    rest = logits.scatter(1, labels, -math.inf).logsumexp(1)
    return (logits.gather(1, labels)[:, 0] - rest).numpy()


def lira(confidences: Scores, member: Mask) -> Scores:
    """Return the scores of offline LiRA for each model, with the others as shadow models, (M, n).

    For a text in the training sets of all shadow models, the mean over all texts is used.

    Args:
        confidences: confidence of each model on each text, (M, n).
        member: whether each model was trained on each text, (M, n).
    """
    scores = np.empty_like(confidences)
    for target in range(len(confidences)):
        shadows = [i for i in range(len(confidences)) if i != target]
        out = np.ma.array(confidences[shadows], mask=member[shadows])
        mean = out.mean(0).filled(out.mean())
        spread = max(float((out - mean).std()), LEAST_SPREAD)
        scores[target] = norm.logcdf((confidences[target] - mean) / spread)
    return scores
