"""How the OPT recipe scores the answers that a model generates: by their F1.

As Malladi et al. (2023): greedy decoding, and the F1 of SQuAD, for DROP as well: ``f1`` is what the
metric ``squad`` of evaluate computes, but for questions whose first right answer says that there is
none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from recipes.paper.opt_tasks import Encoder, Question, left_padded

UNANSWERABLE = ("CANNOTANSWER", "no answer")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def mean_f1(
    model: Any,
    questions: Sequence[Question],
    encoder: Encoder,
    pad: int,
    batch_size: int,
    max_new_tokens: int,
) -> float:
    """Returns the mean F1, in percent, of the answers that a model generates."""
    ordered = sorted(questions, key=lambda question: len(question.prompt))
    answers = generate(
        model,
        encoder.tokenizer,
        [encoder.prompt(question) for question in ordered],
        pad,
        batch_size,
        max_new_tokens,
    )
    found = [f1(a, question.golds) for a, question in zip(answers, ordered, strict=True)]
    return 100 * sum(found) / len(found)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    pad: int,
    batch_size: int,
    max_new_tokens: int,
) -> list[str]:
    """Returns the text that a model continues each prompt with, to the end of the line.

    Prompts are ids, of any lengths; the padding is on the left.
    """
    model.eval()
    device = next(model.parameters()).device
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    ends = [line_break, tokenizer.eos_token_id]
    texts = []
    batches: Any = DataLoader(prompts, batch_size, collate_fn=partial(left_padded, pad=pad))
    for batch in batches:
        ids, mask = (x.to(device) for x in batch)
        tokens = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=[token for token in ends if token is not None],
            pad_token_id=pad,
        )
        new = tokens[:, ids.shape[1] :]
        texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return texts


def f1(answer: str, golds: Sequence[str]) -> float:
    """Returns the F1 of an answer's words, that with the right answer it fits best; from 0 to 1.

    Where the first right answer says that there is none, only the same words count.

    >>> f1("The 12 apples!", ["ten apples", "12 apples"])
    1.0
    """
    if golds[0] in UNANSWERABLE:
        return float(words(answer) == words(golds[0]))
    return max(_f1(words(answer), words(gold)) for gold in golds)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without articles and punctuation."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0
