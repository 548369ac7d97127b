"""A tiny OPT and questions of each kind, as files and as tokens."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.models import FIRST_WORD, VOCABULARY, only

ROWS = {
    "SST2": {"sentence": "a warm , funny film ", "label": 1},
    "BoolQ": {"passage": "Ice is frozen water.", "question": "is ice water", "answer": True},
    "SQuAD": {
        "title": "Ice",
        "context": "Ice is frozen water.",
        "question": "What is ice? ",
        "answers": {"text": ["frozen water", "water"], "answer_start": [7, 14]},
    },
    "DROP": {
        "passage": "They won 3 games and lost 2.",
        "question": " How many games were there?",
        "answers_spans": {"spans": ["5"], "types": ["number"]},
    },
}
LONG = ("sentence", "passage", "context")


def varied(row, i):
    """Returns the row, with a text of another length that says which it is."""
    texts = {key: f"{value} {i}" + "!" * (i % 4) for key, value in row.items() if key in LONG}
    return {**row, **texts}


def byte_level(texts, vocab_size, special):
    """Returns a tokenizer of bytes, and of what is frequent in texts, as of RoBERTa and OPT."""
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bytewise.train_from_iterator(texts, trainer)
    return bytewise


def save_model_and_questions(path):
    """Saves a tiny OPT and a tokenizer of bytes, and beside them a folder for each task."""
    texts = [json.dumps(row) for row in ROWS.values()] + [" terrible great Yes No"] * 9
    bytewise = byte_level(texts, 300, ["<s>", "<pad>", "</s>"])
    bytewise.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(path)
    case = only("opt").model(
        vocab_size=len(tokenizer), max_position_embeddings=160, bos_token_id=2, eos_token_id=2
    )
    case.save_pretrained(path)
    for task, row in ROWS.items():
        (path / task).mkdir()
        for split in ("train", "validation"):
            lines = [json.dumps(varied(row, i)) for i in range(12)]
            (path / task / f"{split}.jsonl").write_text("\n".join(lines))


def examples(lengths, options, seed=0, longest=3):
    """Returns examples of random tokens with prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(size):
        return torch.randint(FIRST_WORD, VOCABULARY, (size,), generator=generator).tolist()

    found = []
    for i, length in enumerate(lengths):
        prompt, answers = text(length), [text(1 + (i + o) % longest) for o in range(options)]
        texts = [prompt + answer[:-1] for answer in answers]
        shared = longest == 1  # options of one token are all predicted from the prompt
        found.append(
            {"input_ids": texts[:1] if shared else texts, "answers": answers, "labels": i % options}
        )
    return found
