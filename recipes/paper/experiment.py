"""The common parts of the paper's recipes: settings, a run, and its result.

A recipe (``roberta``, ``opt``, ``vit``) is a ``Family``: it loads a task and scores a model. The
method of training is an option like any other. All options have defaults in a YAML file, a
preset:

    arguments: {max_steps: 1000, ...}                 # of every run
    methods:
      dp_grape: {learning_rate: 1.0e-4, ...}          # of a method
    tasks:
      SST-2:
        arguments: {...}                              # of a task
        methods: {dp_grape: {max_grad_norm: 0.5}}     # of a method on a task
    models:
      roberta-base: {methods: {...}, tasks: {...}}    # all of these again, of a model of that name

The later wins, and the command line wins over all. A value ``unknown`` stands for a setting that
was not published: a run that needs it stops, and asks for it.

A result is a separate JSON file, which is never overwritten. The presets log what is private while
a run trains: epsilon and steps, and no loss. With ``--save_model``, the run saves checkpoints too,
and the model at its end. If it is stopped, the same command goes on from the last checkpoint.
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainerCallback, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.projections import synthetic_batches
from recipes.common.provenance import origin, recorded, set_defaults, spent_as_json, with_adapter
from recipes.common.runs import append_line, read_lines
from recipes.paper.methods import PaperArguments
from recipes.paper.metrics import metric

CONFIGS = Path(__file__).with_name("configs")
UNKNOWN = "unknown"
"""What a preset says of a setting that its source does not tell."""
KEPT: Mapping[str, Any] = {"save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 1}
"""Where ``--save_model`` is given, stands in place of what a preset says; steps are of all."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the new and the old name

Scores = dict[str, float]


@dataclass
class ExperimentArguments:
    """Task, model and settings of a run; a family adds further options."""

    task: str = HfArg(help="The name of the task.")
    model_name_or_path: str = HfArg(help="A model of the Hub, or a folder.")
    config: str = HfArg(
        default="reference_code", help="A preset by name, or a YAML file of settings."
    )
    dataset_path: str | None = HfArg(
        default=None,
        help="A folder with the task's data, or the name of a data set of the Hub, as in "
        "nyu-mll/glue:sst2. Default: the task's own of the Hub.",
    )
    result_dir: str = HfArg(
        default="runs/results", help="Where the result goes, as a file of its own."
    )
    save_model: bool = HfArg(
        default=False,
        help="Save the model in --output_dir, in a folder named after the result, with its "
        "ledger and card; and a checkpoint at every tenth of the run, of which one is kept.",
    )
    scored_splits: str = HfArg(
        default="dev+test",
        help="What is scored at the end: dev, for a search, or test, or dev+test.",
    )
    curve_steps: int = HfArg(
        default=0, help="Score the dev split every so many steps; 0: at the end only."
    )
    zero_shot: bool = HfArg(default=False, help="Score the model as it is, without training.")
    selection_runs: int = HfArg(
        default=0, help="From how many runs the settings were chosen; for the record."
    )
    frozen: str | None = HfArg(
        default=None, help="A regular expression; parameters with such names are not trained."
    )
    lora_rank: int = HfArg(default=16, help="The rank of the adapter, of methods that train one.")
    lora_init: Literal["random", "principal"] = HfArg(
        default="random",
        help="What the adapter's A starts with: random numbers, or principal: the principal "
        "directions of what the layers are given when the model reads synthetic inputs.",
    )

    def __post_init__(self) -> None:
        """Refuse to save what is not trained."""
        if self.save_model and self.zero_shot:
            raise ValueError("save_model=True, zero_shot=True: nothing is trained. Drop one.")


@dataclass
class Experiment:
    """A task, ready to train and to score."""

    model: nn.Module  # what is trained
    train: Any  # its training examples; their number is N
    collator: Callable[[list[Any]], Any]  # makes a batch of examples
    # (model, name of a split) -> metrics in percent, the first of which counts
    score: Callable[[nn.Module, str], Scores]
    splits: Mapping[str, int]  # how many examples each split that can be scored has
    # ``(outputs, labels) -> (B,)``; None for the model's own head
    loss: Callable[..., Tensor] | None = None
    tokenizer: Any = None  # of the model, or a processor; is saved with the model
    notes: Sequence[str] = ()  # what is to be known of its data, beside the settings


@dataclass(frozen=True)
class Family:
    """A family of experiments."""

    name: str  # of the recipe; its presets are ``configs/<name>_<preset>.yaml``
    script: type[ExperimentArguments]  # the class of its arguments
    tasks: tuple[str, ...]  # the names of its tasks
    # makes the experiment, the seed being set
    load: Callable[[Any, DPGrapeTrainingArguments], Experiment]


def in_adapter(
    model: Any,
    script: ExperimentArguments,
    args: DPGrapeTrainingArguments,
    head: Sequence[str] = (),
    tokenizer: Any = None,
) -> Any:
    """Returns the model in the adapter that the method trains, if it trains one."""
    inputs = None
    if script.lora_init == "principal":
        inputs = partial(synthetic_batches, model, tokenizer, args.projection_seed)
    return with_adapter(model, args.method, script.lora_rank, head, inputs)


@torch.no_grad()
def accuracy(
    model: nn.Module, examples: Any, collator: Callable[[list[Any]], Any], batch_size: int
) -> float:
    """Return the accuracy of evaluate in percent; the largest score of a model predicts a label."""
    device = next(model.parameters()).device
    model.eval()
    found = metric("accuracy")
    for batch in DataLoader(examples, batch_size, collate_fn=collator):
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        scores = next(iter(model(**inputs).values()))  # (B, labels)
        found.add_batch(predictions=scores.argmax(-1), references=labels)
    return 100 * float(found.compute()["accuracy"])


# ---- One run ----


def run(family: Family, script: Any, args: DPGrapeTrainingArguments) -> dict[str, Any]:
    """Trains, scores, and writes the result; returns it.

    A run that was stopped goes on from its last whole checkpoint.
    """
    path = result_path(family, script, args)
    if path.exists():
        raise FileExistsError(
            f"{path} exists, and results are not overwritten: move it, or give --result_dir."
        )
    args.output_dir = str(Path(str(args.output_dir)) / path.stem)  # each run has its own ledger
    made = origin()  # files may change meanwhile
    set_seed(args.seed)  # initial weights and splits; sampling and noise have no seed
    experiment = family.load(script, args)
    scored = [split for split in experiment.splits if split in script.scored_splits.split("+")]
    if not scored:
        raise ValueError(
            f"scored_splits={script.scored_splits!r} names none of: {', '.join(experiment.splits)}."
        )
    freeze(experiment.model, script.frozen)
    folder = Path(args.output_dir)
    curve = Curve(experiment, script.curve_steps, folder / "curve.jsonl")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    spent, chosen = None, {}
    model: nn.Module = experiment.model
    if not script.zero_shot:
        trainer = DPGrapeTrainer(
            model,
            args,
            data_collator=experiment.collator,
            train_dataset=experiment.train,
            compute_loss_func=experiment.loss,
            processing_class=experiment.tokenizer,
            callbacks=[curve],
        )
        stopped = any(folder.glob("checkpoint-*"))  # as it has no result, it did not end
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or stopped)
        spent, model = spent_as_json(trainer.privacy_spent()), trainer.model
        chosen = trainer.args.chosen_options
    seconds, peak = time.perf_counter() - start, peak_memory()  # of the training
    if script.save_model:
        trainer.save_model()
    # By all processes, as the weights may be spread over them.
    metrics = {split: experiment.score(model, split) for split in scored}
    if args.process_index > 0:
        return {}
    result = {
        "family": family.name,
        "script": {k: v for k, v in asdict(script).items() if k != "result_dir"},
        "settings": recorded(args),
        "chosen": chosen,  # options that the run chose, which are empty in the settings
        "metrics": metrics,
        "curve": curve.points,
        "privacy": spent,
        "parameters": sum(p.numel() for p in experiment.model.parameters()),
        "splits": {"train": len(experiment.train), **experiment.splits},
        "seconds": round(seconds, 2),
        "peak_memory": peak,
        **made,
        "notes": [*experiment.notes, *curve.notes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:  # not over one that was written meanwhile
        file.write(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(f"{report(result)}\n{path}\n")
    return result


def freeze(model: nn.Module, pattern: str | None) -> None:
    """Freezes the parameters whose names the pattern occurs in."""
    if pattern is None:
        return
    found = [p for name, p in model.named_parameters() if re.search(pattern, name)]
    if not found:
        raise ValueError(f"frozen={pattern!r} occurs in no parameter's name.")
    for parameter in found:
        parameter.requires_grad_(False)


class Curve(TrainerCallback):
    """Score the dev split while training goes on, every so many steps; nothing is decided by it.

    A run that goes on reads the file of the scores.
    """

    def __init__(self, experiment: Experiment, every: int, path: Path) -> None:
        self._experiment, self._every, self._path = experiment, every, path
        self.notes: list[str] = []

    @property
    def points(self) -> list[dict[str, Any]]:
        """The scores with their steps; of steps that were taken twice, the later ones."""
        return list({point["step"]: point for point in read_lines(self._path)}.values())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the run goes on, or forget the scores of another one."""
        if not state.global_step:
            self._path.unlink(missing_ok=True)
        else:
            self.notes.append(
                f"The run was stopped; seconds are those after step {state.global_step}."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scores, if it is time."""
        due = self._every and state.global_step % self._every == 0
        if due and state.is_world_process_zero:
            model = kwargs["model"]
            scores = self._experiment.score(model, "dev")
            model.train()
            append_line(self._path, {"step": state.global_step, **scores})


def result_path(
    family: Family, script: ExperimentArguments, args: DPGrapeTrainingArguments
) -> Path:
    """Return where the result of a run belongs."""
    what = "zero-shot" if script.zero_shot else args.method
    if not script.zero_shot and args.target_epsilon is not None:
        what += f"-eps{args.target_epsilon:g}"
    preset = Path(script.config).stem.removeprefix(f"{family.name}_")
    model = Path(script.model_name_or_path).name
    name = f"{family.name}-{preset}-{model}-{script.task}-{what}-seed{args.seed}.json"
    return Path(script.result_dir) / name


def peak_memory() -> dict[str, int]:
    """Returns peaks in bytes: of the CUDA allocator, or of the process."""
    if torch.cuda.is_available():
        return {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"max_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def report(result: Mapping[str, Any]) -> str:
    """Returns what a person wants to know of a result, in a few lines."""
    lines = [
        f"{split:<5} " + "  ".join(f"{name} {value:.2f}" for name, value in scores.items())
        for split, scores in result["metrics"].items()
    ]
    spent = result["privacy"]
    if spent is not None:
        promise = f"({spent['epsilon']:.4g}, {spent['delta']})" if spent["private"] else "none"
        lines.append(f"privacy {promise}, {spent['adjacency']}, {spent['steps']} steps")
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


# ---- Settings ----


def main(family: Family, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what the command line asks for."""
    script, args = parse(family, argv)
    if args.disable_tqdm:
        logging.set_verbosity_error()
    return run(family, script, args)


def parse(
    family: Family, argv: Sequence[str] | None = None
) -> tuple[Any, DPGrapeTrainingArguments]:
    """Returns the arguments of a run: the command line over the preset over defaults."""
    parser = HfArgumentParser((family.script, PaperArguments))
    words = list(sys.argv[1:] if argv is None else argv)
    first = parser.parse_known_args(["--model_name_or_path", UNKNOWN, *words])[0]
    if first.task not in family.tasks:
        raise ValueError(f"task={first.task!r} must be one of: {', '.join(family.tasks)}.")
    path = preset_path(family.name, first.config)
    preset = preset_for(path, first.method, first.task, Path(first.model_name_or_path).name)
    if first.save_model:
        preset |= KEPT
    known = {f.name for f in fields(PaperArguments)}
    if CHECKPOINTING[0] not in known and CHECKPOINTING[0] in preset:  # transformers before 5.20
        preset[CHECKPOINTING[1]] = preset.pop(CHECKPOINTING[0])
    if first.zero_shot:
        preset = {name: value for name, value in preset.items() if value != UNKNOWN}
    missing = object()
    asked_for = {k: missing if v == UNKNOWN else v for k, v in preset.items()}
    set_defaults(parser, asked_for, path, first)
    given = vars(parser.parse_known_args(words)[0])
    if asked := sorted(name for name, value in given.items() if value is missing):
        options = " ".join(f"--{name}" for name in asked)
        raise ValueError(
            f"{path} does not know {', '.join(asked)} of method={first.method!r} on "
            f"task={first.task!r}: its source does not say. Give {options}."
        )
    script, args = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    return script, args


# ---- Presets ----


def preset_path(family: str, name: str) -> Path:
    """Returns the file of a preset, by its name or its path."""
    for path in (CONFIGS / f"{family}_{name}.yaml", Path(name)):
        if path.is_file():
            return path
    known = sorted(p.stem.removeprefix(f"{family}_") for p in CONFIGS.glob(f"{family}_*.yaml"))
    raise FileNotFoundError(f"config={name!r} is no file, and no preset: {', '.join(known)}.")


def preset_for(path: Path, method: str, task: str, model: str = "") -> dict[str, Any]:
    """Returns the options that a preset has for a method on a task, of a model of that name."""
    preset = yaml.safe_load(path.read_text(encoding="utf-8"))
    size = preset.get("models", {}).get(model, {})
    layers = [
        layer
        for part in (preset, size)
        for here in (part, part.get("tasks", {}).get(task, {}))
        for layer in (here.get("arguments"), here.get("methods", {}).get(method))
    ]
    return {name: value for layer in layers for name, value in (layer or {}).items()}
