"""OPT, or any causal language model, on SST2, BoolQ, SQuAD and DROP, from 1,000 examples each.

    accelerate launch -m recipes.paper.opt --task SQuAD --method dp_grape --target_epsilon 6 \\
        --model_name_or_path facebook/opt-1.3b --seed 0 --scored_splits test --save_model \\
        --output_dir runs/opt

runs one cell of the paper's Tables tab:opt-classification-results and tab:opt-generation-results.
The seed draws the examples. A search of settings gives ``--scored_splits dev``, and never looks at
``test``. The questions that are scored count as public: no epsilon covers them.

The authors' code shuffles and cuts batches, and clips each option of a question separately. Here
batches are Poisson draws, and all options are clipped as one gradient.

Shapes: B examples, O options of each, T tokens of the longest text, K of the longest answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.hf_argparser import HfArg

from dp_grape_hf import DPGrapeTrainingArguments
from dp_grape_hf.gradients import IGNORE_INDEX, cross_entropy
from recipes.paper.experiment import (
    Experiment,
    ExperimentArguments,
    Family,
    Scores,
    accuracy,
    in_adapter,
    main,
)
from recipes.paper.opt_scores import mean_f1
from recipes.paper.opt_tasks import TASKS, Collator, Encoder, first_tokens, load_splits

ANSWER_GRID = 24  # tokens; answers of 1,000 questions of SQuAD take 1 to 37, 99 % of them up to 24


@dataclass
class OPTArguments(ExperimentArguments):
    """The trained parameters, the examples, and the length of texts."""

    num_train: int = HfArg(default=1000, help="How many examples are trained on: N.")
    num_dev: int = HfArg(default=500, help="How many other training examples are scored.")
    num_eval: int = HfArg(default=1000, help="How many examples of other data are scored, at most.")
    test_split: str = HfArg(default="validation", help="The split of the data that these are from.")
    max_length: int = HfArg(
        default=2048, help="The most tokens of a text and its answer; cut off on the left."
    )
    max_new_tokens: int = HfArg(default=50, help="The most tokens of an answer that is generated.")
    bos_token_id: int | None = HfArg(
        default=None, help="The token that texts begin with. Default: what the tokenizer puts."
    )
    dtype: str = HfArg(default="float32", help="Of the weights: float32 or bfloat16.")


def score_answers(model: Any) -> Any:
    """Make a causal language model of transformers score the answers of a batch that has some.

    Only its forward changes, and only for a batch with ``answers``: it generates, saves and loads
    as the model it is.
    """
    plain = type(model).forward

    @wraps(plain)
    def forward(self: Any, *args: Any, answers: Tensor | None = None, **inputs: Any) -> Any:
        own = partial(plain, self)
        return own(*args, **inputs) if answers is None else _scores(own, answers, **inputs)

    model.forward = MethodType(forward, model)
    return model


def _scores(
    forward: Callable[..., Any], answers: Tensor, input_ids: Tensor, attention_mask: Tensor
) -> dict[str, Tensor]:
    """Return ``scores`` (B, O), the mean log-probabilities of the answers' tokens, float32.

    All options of an example are in its row of the batch, so that their gradients are one gradient
    before it is clipped. Options of one token are all predicted from one text. The vocabulary head
    runs only where an answer's tokens are predicted.

    Args:
        forward: of the language model.
        answers: (B, O, K) ids, the last of which comes behind ``input_ids``; before shorter
            answers, ``IGNORE_INDEX``.
        input_ids: (B, O, T) of each option, or (B, 1, T) of all: padded on the left, without the
            last token of the answer.
        attention_mask: of the same shape, 0 for padding.
    """
    ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
    last = answers.shape[-1]
    more = {}
    if "position_ids" in signature(forward).parameters:
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = forward(
        input_ids=ids, attention_mask=mask, logits_to_keep=last, use_cache=False, **more
    )
    logits = outputs.logits[:, -last:].unflatten(0, input_ids.shape[:2])
    logits = logits.expand(-1, answers.shape[1], -1, -1)  # (B, O, K, vocabulary)
    losses = cross_entropy(logits.flatten(0, 2), answers.flatten()).view_as(answers)
    return {"scores": -losses.sum(-1) / (answers != IGNORE_INDEX).sum(-1)}


def choice_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Returns the cross-entropy (B,) of the right options, over the options of each example."""
    return functional.cross_entropy(outputs["scores"], labels, reduction="none")


def answer_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy (B,) of the tokens of each example's own answer."""
    return -outputs["scores"].squeeze(1)


# ---- The experiment ----


def load(script: OPTArguments, args: DPGrapeTrainingArguments) -> Experiment:
    """Loads the model and the examples of a task; ``args.seed`` draws the examples."""
    task = TASKS[script.task]
    args.remove_unused_columns = False  # the model takes what the collator makes of the columns
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    pad = next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), None)
    if pad is None:  # which one it is does not matter, but it must be a special token
        raise ValueError(f"{type(tokenizer).__name__} has neither a pad_token nor an eos_token.")
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype=script.dtype)
    model = in_adapter(score_answers(model), script, args, tokenizer=tokenizer).to(args.device)
    limit = getattr(model.config, "max_position_embeddings", None) or script.max_length
    room = script.max_new_tokens if task.generates else 0
    encoder = Encoder(
        tokenizer,
        min(script.max_length, limit) - room,
        first_tokens(tokenizer, script.bos_token_id),
    )
    collator = Collator(pad, answers=ANSWER_GRID if task.generates else 1)
    sizes = {"train": script.num_train, "dev": script.num_dev, "test": script.num_eval}
    questions = load_splits(task, script.dataset_path, args.seed, sizes, script.test_split)

    def score(trained: nn.Module, split: str) -> Scores:
        size = args.per_device_eval_batch_size
        if task.generates:
            most, asked = script.max_new_tokens, questions[split]
            return {"f1": mean_f1(trained, asked, encoder, pad, size, most)}
        options = sorted(
            map(encoder.example, questions[split]), key=lambda example: len(example["input_ids"][0])
        )
        return {"accuracy": accuracy(trained, options, collator, size)}

    return Experiment(
        model=model,
        train=[encoder.example(question) for question in questions["train"]],
        collator=collator,
        score=score,
        splits={name: len(questions[name]) for name in ("dev", "test")},
        tokenizer=tokenizer,
        loss=answer_loss if task.generates else choice_loss,
    )


FAMILY = Family(name="opt", script=OPTArguments, tasks=tuple(TASKS), load=load)

if __name__ == "__main__":
    main(FAMILY)
