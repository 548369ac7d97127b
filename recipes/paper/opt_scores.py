"""Score the answers that a model generates by their F1, the metric ``squad`` of evaluate.

As Malladi et al. (2023): greedy decoding, and the F1 of SQuAD, for DROP as well. Their exception
for questions without an answer is left out, as neither data set has any.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from recipes.paper.metrics import metric
from recipes.paper.opt_tasks import Encoder, Question, left_padded


def mean_f1(
    model: Any, questions: Sequence[Question], encoder: Encoder, pad: int, size: int, most: int
) -> float:
    """Return the mean F1, in percent, of the answers that a model generates."""
    ordered = sorted(questions, key=lambda question: len(question.prompt))
    prompts = [encoder.prompt(question) for question in ordered]
    answers = generate(model, encoder.tokenizer, prompts, pad, size, most)
    found = metric("squad").compute(
        predictions=[{"id": f"{i}", "prediction_text": text} for i, text in enumerate(answers)],
        references=[
            {"id": f"{i}", "answers": {"text": q.golds, "answer_start": [0] * len(q.golds)}}
            for i, q in enumerate(ordered)
        ],
    )
    return float(found["f1"])


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], pad: int, size: int, most: int
) -> list[str]:
    """Return the text that a model continues each prompt (ids) with, to the end of the line."""
    model.eval()
    device = next(model.parameters()).device
    ends = [tokenizer("\n", add_special_tokens=False)["input_ids"][-1], tokenizer.eos_token_id]
    options = {"max_new_tokens": most, "do_sample": False, "num_beams": 1, "pad_token_id": pad}
    options["eos_token_id"] = [token for token in ends if token is not None]
    texts = []
    batches: Any = DataLoader(prompts, size, collate_fn=partial(left_padded, pad=pad))
    for batch in batches:
        ids, mask = (x.to(device) for x in batch)
        tokens = model.generate(input_ids=ids, attention_mask=mask, **options)
        new = tokens[:, ids.shape[1] :]
        texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return texts
