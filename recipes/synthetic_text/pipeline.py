"""Private texts with labels in, synthetic texts with labels out, as a data set with its ledger.

    accelerate launch -m recipes.synthetic_text --config recipes/synthetic_text/trec.yaml \\
        --model_name_or_path runs/public-lm --dataset_path data/trec --output_dir runs/synthetic

Only ``train`` reads the private texts to make the data set. All that follows is post-processing of
the private weights. ``evaluate`` reads real texts again, without privacy: what it finds enters the
card of the data set only from texts that are declared public (``eval_data_is_public``).

Writes to ``output_dir``: the model, its ledger and its card; ``results.json``, which is not private
without that declaration; and the folder ``dataset``, to be published.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.hf_argparser import HfArg

from dp_grape_hf import (
    DPGrapeSFTConfig,
    DPGrapeSFTTrainer,
    DPGrapeTrainingArguments,
    Ledger,
    PrivacySpent,
)
from dp_grape_hf.ledger import LEDGER_NAME
from dp_grape_hf.tables import table
from recipes.common.provenance import origin, parsed, recorded, spent_as_json, write
from recipes.paper.data import load_split
from recipes.synthetic_text.card import render
from recipes.synthetic_text.evaluation import (
    Texts,
    accuracy,
    agreeing,
    embed,
    frechet_distance,
    private_accuracy,
)

DATASET = "dataset"  # folder below output_dir


@dataclass
class SyntheticTextArguments:
    """Options of training, sampling, filters and evaluation."""

    model_name_or_path: str = HfArg(default="", help="A public causal LM.")
    dataset_path: str = HfArg(default="", help="Private texts: a folder or a name.")
    text_column: str = HfArg(default="text", help="Column with the texts.")
    label_column: str = HfArg(default="label", help="Column with their labels.")
    labels: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of the labels 0, 1, ..., which are public and not read off."},
    )
    control_codes: list[str] = field(
        default_factory=list,
        metadata={"help": "Public text before the texts of each label. Default: its name."},
    )
    train: bool = HfArg(
        default=True, help="False: sample from the model as it is, with its ledger if it has one."
    )
    train_split: str = HfArg(default="train", help="Split of the private texts.")
    test_split: str = HfArg(default="test", help="Split of held-out real texts.")
    lora_rank: int | None = HfArg(
        default=None, help="Train a LoRA adapter of this rank instead of the model."
    )
    texts_per_label: int = HfArg(default=500, help="Texts to generate for a label.")
    temperature: float = HfArg(default=1.0, help="Of sampling.")
    top_p: float = HfArg(default=0.95, help="Of sampling (nucleus).")
    vllm: bool = HfArg(default=False, help="Sample with vLLM, which must be installed.")
    min_words: int = HfArg(default=3, help="Shorter texts are dropped.")
    agreement: bool = HfArg(
        default=True, help="Drop texts to which a classifier of the other ones gives another label."
    )
    encoder: str | None = HfArg(
        default=None, help="Public text encoder for filter and evaluation. Default: word counts."
    )
    compare_direct: bool = HfArg(
        default=False, help="Train a private classifier of the real texts as well: it adds to ε."
    )


def main(script: SyntheticTextArguments, args: DPGrapeSFTConfig) -> dict[str, Any]:
    """Train, generate, filter, evaluate, write the data set, and return ``results.json``."""
    set_seed(args.seed)  # weights of an adapter, and sampling of texts; noise has no seed
    real_texts(script, script.test_split)  # its errors come before the training
    source = Path(script.model_name_or_path)
    if script.train:
        source, trainer = Path(args.output_dir), train(script, args)
        if not trainer.is_world_process_zero():
            return {}
        args = trainer.args  # with the options that the run chose
    ledger = source / LEDGER_NAME
    generated = (generate_by_vllm if script.vllm else generate)(script, args, source)
    kept, counts = filtered(generated, script)
    results = {
        "privacy": spent_of(Ledger.load(ledger)) if ledger.exists() else None,
        "filter": counts,
        "evaluation": evaluate(kept, script, args),
        "settings": {**asdict(script), **recorded(args)},
        **origin(),
    }
    for name in ("model_name_or_path", "dataset_path", "encoder"):  # paths of one machine
        results["settings"][name] = Path(results["settings"][name] or "").name
    write(Path(args.output_dir) / "results.json", results)
    if ledger.exists():
        save(kept, results, args, ledger)
    sys.stdout.write(report(results, kept, args.output_dir))
    return results


def spent_of(ledger: Ledger) -> dict[str, Any]:
    """Return what the training of a model spent, and by which mechanism."""
    spent = PrivacySpent(
        ledger.epsilon() if ledger.private else math.inf,
        ledger.mechanism.target_delta,
        ledger.steps,
        ledger.mechanism,
    )
    return spent_as_json(spent)


def codes_of(script: SyntheticTextArguments) -> dict[str, str]:
    """Return the control code of each label, with a newline, so that it ends where a token ends."""
    codes = script.control_codes or script.labels
    return {label: f"{code}\n" for label, code in zip(script.labels, codes, strict=True)}


# ---- Private training ----


def train(script: SyntheticTextArguments, args: DPGrapeSFTConfig) -> DPGrapeSFTTrainer:
    """Fine-tune the language model privately on control codes and texts, and save it."""
    rows = real_texts(script, script.train_split, args.privacy_unit_column)
    codes = [*map(codes_of(script).get, rows["label"])]
    examples = Dataset.from_dict({"prompt": codes, "completion": rows["text"]})
    if (unit := args.privacy_unit_column) is not None:
        examples = examples.add_column(unit, rows[unit])
    adapter = None
    if (r := script.lora_rank) is not None:
        kind = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        adapter = LoraConfig(r=r, lora_alpha=r, **kind)
    trainer = DPGrapeSFTTrainer(
        script.model_name_or_path, args, train_dataset=examples, peft_config=adapter
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


def real_texts(
    script: SyntheticTextArguments, split: str, unit_column: str | None = None
) -> dict[str, list[Any]]:
    """Return texts, the names of their labels, and whose they are if a column says so."""
    rows = load_split(split, script.dataset_path, script.dataset_path)
    labels = rows[script.label_column]
    if not all(label in range(len(script.labels)) for label in labels):
        raise ValueError(
            f"The column {script.label_column!r} holds other labels than 0 to "
            f"{len(script.labels) - 1}, and labels={script.labels!r} names those. Declare a name "
            "for each label: the names are public, so they are not read off the private data."
        )
    found = {
        "text": list(rows[script.text_column]),
        "label": [script.labels[label] for label in labels],
    }
    return found if unit_column is None else {unit_column: list(rows[unit_column]), **found}


# ---- Post-processing ----


@torch.no_grad()
def generate(
    script: SyntheticTextArguments, args: DPGrapeSFTConfig, source: Path
) -> list[dict[str, Any]]:
    """Return as many texts of each label, sampled from the model that is saved in ``source``.

    The proportions of the private labels are not used, because no ε covers them.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    if script.lora_rank is None:
        model = AutoModelForCausalLM.from_pretrained(source)
    else:
        base = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
        model = PeftModel.from_pretrained(base, source)
    model.eval().to(args.device)
    found: list[dict[str, Any]] = []
    for label, text in codes_of(script).items():
        code = tokenizer(text, return_tensors="pt")
        for first in range(0, script.texts_per_label, args.per_device_eval_batch_size):
            sampled = model.generate(
                **code.to(args.device),
                do_sample=True,
                temperature=script.temperature,
                top_p=script.top_p,
                top_k=0,
                num_return_sequences=min(
                    args.per_device_eval_batch_size, script.texts_per_label - first
                ),
                max_new_tokens=args.max_length,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )[:, code["input_ids"].shape[1] :]
            for ids in sampled.tolist():
                text = tokenizer.decode(ids, skip_special_tokens=True).strip()
                ended = tokenizer.eos_token_id in ids
                found.append({"text": text, "label": label, "ended": ended})
    return found


def generate_by_vllm(
    script: SyntheticTextArguments, args: DPGrapeSFTConfig, source: Path
) -> list[dict[str, Any]]:
    """Sample as ``generate`` does, with vLLM."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"model": str(source)}
    adapter = None
    if script.lora_rank is not None:
        rank = max(8, 2 ** math.ceil(math.log2(script.lora_rank)))  # vLLM reserves such ranks
        options = {"model": script.model_name_or_path, "enable_lora": True, "max_lora_rank": rank}
        adapter = LoRARequest("private", 1, str(source))
    sampling = SamplingParams(
        n=script.texts_per_label,
        temperature=script.temperature,
        top_p=script.top_p,
        max_tokens=args.max_length,
        seed=args.seed,
    )
    codes = codes_of(script)
    outputs = LLM(**options).generate([*codes.values()], sampling, lora_request=adapter)
    return [
        {"text": one.text.strip(), "label": label, "ended": one.finish_reason == "stop"}
        for label, output in zip(codes, outputs, strict=True)
        for one in output.outputs
    ]


def filtered(
    generated: Sequence[Mapping[str, Any]], script: SyntheticTextArguments
) -> tuple[Texts, dict[str, int]]:
    """Return the texts that pass the filters, and how many each filter leaves.

    The filters see synthetic texts only. A filter that compares them with private texts would be no
    post-processing.
    """
    counts = {"generated": len(generated)}
    kept = [row for row in generated if row["ended"]]
    counts["ended"] = len(kept)
    kept = [row for row in kept if len(row["text"].split()) >= script.min_words]
    counts["long enough"] = len(kept)
    kept = [*{" ".join(row["text"].casefold().split()): row for row in kept}.values()]
    counts["distinct"] = len(kept)
    texts, labels = ([row[name] for row in kept] for name in ("text", "label"))
    found = Texts(texts, labels, embed(texts, script.encoder))
    if script.agreement:
        found = found[agreeing(found)]
        counts["labels agree"] = len(found.texts)
    return found, counts


# ---- Evaluation on real texts: not private ----


def evaluate(
    synthetic: Texts, script: SyntheticTextArguments, args: DPGrapeSFTConfig
) -> dict[str, Any]:
    """Return accuracies on held-out real texts, and distances of embeddings to them."""
    real, test = (
        Texts(rows["text"], rows["label"], embed(rows["text"], script.encoder))
        for rows in (real_texts(script, split) for split in (script.train_split, script.test_split))
    )
    size = min(len(texts.texts) for texts in (synthetic, real, test))
    order = np.random.default_rng(args.seed)
    reference, *samples = (
        texts.vectors[order.permutation(len(texts.texts))[:size]]
        for texts in (test, real, synthetic)
    )
    distances = [frechet_distance(reference, sample) for sample in samples]
    found: dict[str, Any] = {
        "texts": {
            "real": len(real.texts),
            "synthetic": len(synthetic.texts),
            "test": len(test.texts),
            "in each sample of a distance": size,
        },
        "accuracy": {"real": accuracy(real, test), "synthetic": accuracy(synthetic, test)},
        "frechet_distance": dict(zip(("real", "synthetic"), distances, strict=True)),
    }
    if script.compare_direct:
        with tempfile.TemporaryDirectory() as folder:
            options = DPGrapeTrainingArguments(
                output_dir=folder,
                method="dp_adam",  # so few numbers need no projection
                target_epsilon=args.target_epsilon,
                target_delta=args.target_delta,
                num_train_epochs=20,
                per_device_train_batch_size=256,
                save_strategy="no",
                report_to="none",
                use_cpu=args.use_cpu,
            )
            found["accuracy"]["direct"], found["epsilon_of_direct"] = private_accuracy(
                real, test, script.labels, options
            )
    return found


# ---- The data set ----


def save(kept: Texts, results: Mapping[str, Any], args: DPGrapeSFTConfig, ledger: Path) -> None:
    """Write the data set, its ledger and its card."""
    folder = Path(args.output_dir) / DATASET
    folder.mkdir(parents=True, exist_ok=True)
    rows = zip(kept.texts, kept.labels, strict=True)
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    shutil.copy(ledger, folder)
    card = render(Ledger.load(ledger), results, public=args.eval_data_is_public)
    (folder / "README.md").write_text(card, encoding="utf-8")


def report(results: Mapping[str, Any], kept: Texts, folder: str) -> str:
    """Return the closing table, as text."""
    spent, found = results["privacy"] or {"private": False}, results["evaluation"]
    rows = {
        "epsilon spent": f"{spent['epsilon']:.4g}" if spent["private"] else "none",
        **{f"texts, {name}": f"{count}" for name, count in results["filter"].items()},
        **{f"accuracy, {name}": f"{value:.1%}" for name, value in found["accuracy"].items()},
        **{
            f"Fréchet distance, {name}": f"{value:.4f}"
            for name, value in found["frechet_distance"].items()
        },
    }
    return f"\n{table(rows.items())}\nThe data set is in {Path(folder) / DATASET}.\n"


# ---- The command line ----


def parse(argv: Sequence[str] | None = None) -> tuple[SyntheticTextArguments, DPGrapeSFTConfig]:
    """Return the arguments of ``main``: command line over ``--config`` over defaults."""
    script, args = parsed(argv, None, SyntheticTextArguments, DPGrapeSFTConfig)
    for name in ("model_name_or_path", "dataset_path", "labels"):
        if not getattr(script, name):
            raise ValueError(f"Pass --{name}, or set it in the file of --config.")
    return script, args
