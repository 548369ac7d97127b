"""Membership inference against small text classifiers, trained with and without privacy.

    python -m recipes.attacks.membership --dataset_path sst2

The folder contains ``train.jsonl``, with one object per line that has a ``label`` and a
``sentence`` or ``text``. Without ``--dataset_path``, sentences are made up. Several models are
trained in each way, each on a random half of a pool of texts. Each is attacked in turn, with the
others as shadow models:

* loss threshold (Yeom et al. 2018): a text with a smaller loss is more likely a member;
* LiRA, offline (Carlini et al. 2022): the confidence of the model is compared with the confidences
  of models that were not trained on the text, in standard deviations of a Gaussian. With few shadow
  models, one standard deviation is fitted for all texts, as the authors advise.

For an (epsilon, delta)-private run, TPR <= e^epsilon FPR + delta holds for every attack. The ROC
curve is over all pairs of a text and a model.

Shapes: M models, n texts in the pool, T words.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import auc, roc_curve
from torch import Tensor, nn
from transformers import HfArgumentParser, PrinterCallback, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from recipes.common.markdown import table
from recipes.common.plots import COLOURS
from recipes.common.provenance import versions, write

VOCABULARY, LENGTH, HIDDEN, LABELS = 2048, 32, 64, 2
PAD = 0
DELTA = 1e-5
RATES = (0.01, 0.001)  # false positives
ATTACKS = {"loss": "loss threshold", "lira": "LiRA, offline"}
LEAST_SPREAD = 1e-3  # smallest standard deviation of the confidences of shadow models

Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]
Example = dict[str, Tensor]


@dataclass
class Settings:
    """The settings of training and attacks."""

    dataset_path: str | None = HfArg(
        default=None, help="Folder with train.jsonl. Default: made-up texts."
    )
    pool: int = 6000  # n
    models: int = 12  # M, for each way of training
    epsilons: list[float] = field(default_factory=lambda: [8.0, 2.0])
    epochs: int = 20  # of training without privacy
    steps: int = 60  # of private training
    batch: int = 1024  # expected, of private training
    seed: int = 0  # of the pool, the halves and the initial weights
    output_dir: str = str(Path(__file__).parent / "results")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, attack, write the three files, and return what is in the JSON."""
    (settings,) = HfArgumentParser(Settings).parse_args_into_dataclasses(argv)
    results = run(settings)
    path = Path(settings.output_dir) / "membership.json"
    write(path, results)
    path.with_suffix(".md").write_text(as_markdown(results), encoding="utf-8")
    draw(results).savefig(path.with_suffix(".png"), dpi=130)
    sys.stdout.write(as_markdown(results))
    return results


def run(settings: Settings) -> dict[str, Any]:
    """Return the results of each attack against each way of training."""
    if settings.models < 3:
        raise ValueError(f"models={settings.models}: an attack needs at least two shadow models.")
    examples, source = load(settings)
    generator = np.random.default_rng(settings.seed)
    ways: dict[str, Any] = {}
    for epsilon in (math.inf, *settings.epsilons):
        member = generator.random((settings.models, len(examples))) < 0.5  # (M, n)
        start, spent, confidences = time.process_time(), 0.0, []
        for number, half in enumerate(member):
            chosen = [example for example, inside in zip(examples, half, strict=True) if inside]
            model, spent = train(settings, chosen, epsilon, settings.seed + number)
            confidences.append(confidence_of(model, examples))
        found = np.stack(confidences)
        scores = lira(found, member)
        title = "Adam, no privacy" if math.isinf(epsilon) else f"DP-GRAPE, ε = {epsilon:g}"
        ways[title] = {
            "epsilon": None if math.isinf(epsilon) else epsilon,
            "epsilon_spent": None if math.isinf(epsilon) else spent,
            "accuracy_of_members": float((found[member] > 0).mean()),
            "accuracy_of_others": float((found[~member] > 0).mean()),
            "seconds": round(time.process_time() - start, 1),
            "attacks": {
                "loss": measure(found[member], found[~member]),
                "lira": measure(scores[member], scores[~member]),
            },
        }
    described = asdict(settings)
    del described["dataset_path"], described["output_dir"]  # local paths
    made = {"settings": described, "versions": versions()}
    return {"data": source, "delta": DELTA, "ways": ways, **made}


# ---- Data ----


def load(settings: Settings) -> tuple[list[Example], str]:
    """Return the pool of texts, and its name."""
    if settings.dataset_path is None:
        texts = made_up(settings.pool, settings.seed)
        source = "made-up sentences"
    else:
        path = Path(settings.dataset_path) / "train.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        texts = [(row.get("sentence") or row["text"], int(row["label"])) for row in rows]
        order = np.random.default_rng(settings.seed).permutation(len(texts))
        texts = [texts[i] for i in order[: settings.pool]]
        source = Path(settings.dataset_path).name
    if len(texts) < settings.pool:
        raise ValueError(f"pool={settings.pool}, but there are only {len(texts)} texts.")
    return [encode(text, label) for text, label in texts], source


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


# ---- Training ----


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


def train(
    settings: Settings, examples: list[Example], epsilon: float, seed: int
) -> tuple[nn.Module, float]:
    """Return a model trained on the examples, and the epsilon spent."""
    set_seed(seed)
    model = BagForSequenceClassification()
    way: dict[str, Any] = {
        "method": "dp_grape",
        "target_epsilon": epsilon,
        "target_delta": DELTA,
        "expected_batch_size": min(settings.batch, settings.pool // 2),
        "max_steps": settings.steps,
        "learning_rate": 3e-2,
        "projection": "gaussian",  # the package has no synthetic inputs for this model
        "projection_update_steps": settings.steps,
    }
    if math.isinf(epsilon):
        way = {
            "method": "dp_adam",
            "noise_multiplier": 0.0,
            "max_grad_norm": math.inf,
            "num_train_epochs": settings.epochs,
            "expected_batch_size": min(32, settings.pool // 2),
            "learning_rate": 3e-3,
        }
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPGrapeTrainer(
            model,
            DPGrapeTrainingArguments(
                output_dir=folder,
                num_samples=settings.pool // 2,  # public: the expected number
                per_device_train_batch_size=512,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
                seed=seed,
                **way,
            ),
            train_dataset=examples,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return model, trainer.privacy_spent().epsilon


@torch.no_grad()
def confidence_of(model: nn.Module, examples: list[Example]) -> Scores:
    """Return log(p / (1 - p)) for the probability p of the true label of each example, (n,).

    It decreases with the loss, -log p, and its distribution is closer to normal (Carlini et al.
    2022).
    """
    model.eval()
    found = []
    for first in range(0, len(examples), 256):
        some = examples[first : first + 256]
        batch = {name: torch.stack([example[name] for example in some]) for name in some[0]}
        labels = batch.pop("labels")[:, None]
        logits = model(**batch)["logits"].double()
        rest = logits.scatter(1, labels, -math.inf).logsumexp(1)
        found.append(logits.gather(1, labels)[:, 0] - rest)
    return torch.cat(found).numpy()


# ---- Attacks ----


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


def measure(members: Scores, others: Scores) -> dict[str, Any]:
    """Return AUC, TPR at low FPR, and the ROC curve of the scores of members and others.

    The curve has a logarithmic spacing, from one false positive to all.
    """
    labels = np.repeat([1, 0], [len(members), len(others)])
    fpr, tpr, _ = roc_curve(labels, np.concatenate([members, others]), drop_intermediate=False)

    def last(rate: float) -> int:
        return int(np.searchsorted(fpr, rate * (1 + 1e-12), side="right")) - 1

    points = [
        {
            "fpr": rate,
            "tpr": float(tpr[last(rate)]),
            "true_positives": round(tpr[last(rate)] * len(members)),
            "members": len(members),
            "false_positives": round(fpr[last(rate)] * len(others)),
            "others": len(others),
        }
        for rate in RATES
    ]
    spaced = map(last, np.geomspace(1 / len(others), 1, 60))
    curve = sorted({(float(fpr[i]), float(tpr[i])) for i in spaced})
    return {"auc": float(auc(fpr, tpr)), "at": points, "roc": curve}


def bound(fpr: float, epsilon: float | None, delta: float) -> float:
    """Return the largest TPR at a FPR that (epsilon, delta)-privacy allows."""
    if epsilon is None:
        return 1.0
    other = 1 - math.exp(-epsilon) * (1 - delta - fpr)  # 1 - FPR <= e^eps (1 - TPR) + delta
    return min(1.0, math.exp(epsilon) * fpr + delta, other)


# ---- Rendering ----


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the table."""
    head = [
        *("Trained by", "Attack", "AUC"),
        *(f"TPR at {rate:.1%} FPR (allowed)" for rate in RATES),
        "Accuracy: members, others",
    ]
    rows = []
    for title, way in results["ways"].items():
        for name, attack in way["attacks"].items():
            cells = [title, ATTACKS[name], f"{attack['auc']:.3f}"]
            for point in attack["at"]:
                most = bound(point["fpr"], way["epsilon_spent"], results["delta"])
                cells.append(
                    f"{point['tpr']:.2%}, {point['true_positives']} of {point['members']} "
                    f"({most:.1%})"
                )
            cells.append(f"{way['accuracy_of_members']:.1%}, {way['accuracy_of_others']:.1%}")
            rows.append(cells)
    settings, ways = results["settings"], results["ways"].values()
    others = next(iter(ways))["attacks"]["loss"]["at"][0]["others"]
    return (
        f"{table(head, rows)}\n"
        f"Data: {results['data']}, a pool of {settings['pool']} texts. {settings['models']} models "
        f"for each way of training, each of them trained on a random half of the pool and attacked "
        f"with the others as shadow models; about {others} pairs of a model and a text that it has "
        f"not seen. In brackets: the most that (ε, δ) allows any attack, δ = {results['delta']:g}. "
        f"Rates at 0.1% are of {others // 1000} false positives at most. The learning rates were "
        "chosen by hand, on the same data, which no ε here covers. "
        f"{sum(way['seconds'] for way in ways):.0f} seconds of one processor.\n"
    )


def draw(results: Mapping[str, Any]) -> Figure:
    """Return the ROC curves on logarithmic axes, with a panel for each attack."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    rates = np.geomspace(1e-4, 1, 200)
    for panel, (name, title) in zip(figure.subplots(1, 2), ATTACKS.items(), strict=True):
        panel.plot(rates, rates, color="#888888", linewidth=1, label="chance")
        for colour, (way, found) in zip(COLOURS, results["ways"].items(), strict=False):
            attack = found["attacks"][name]
            label = f"{way} (AUC {attack['auc']:.2f})"
            panel.plot(*zip(*attack["roc"], strict=True), color=colour, label=label)
            if found["epsilon_spent"] is not None:
                most = [bound(x, found["epsilon_spent"], results["delta"]) for x in rates]
                allowed = f"the most that ε = {found['epsilon']:g} allows"
                panel.plot(rates, most, color=colour, linestyle=":", label=allowed)
        panel.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1), title=title)
        panel.set(xlabel="false positive rate", ylabel="true positive rate")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"Membership inference, {results['data']}")
    return figure


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
