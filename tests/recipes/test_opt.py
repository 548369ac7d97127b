"""Causal language models on questions: prompts, tokens, splits, scores, and what one example moves.

Shapes: B examples, O options of each, T tokens of the longest text, K of the longest answer.
"""

import json
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dp_grape_hf import per_sample_gradients
from dp_grape_hf.gradients import IGNORE_INDEX, make_engine
from dp_grape_hf.trainer.callbacks import PRIVATE_LOGS
from recipes.paper.experiment import accuracy, main
from recipes.paper.opt import ANSWER_GRID, FAMILY, answer_loss, choice_loss, score_answers
from recipes.paper.opt_scores import generate, mean_f1
from recipes.paper.opt_tasks import (
    TASKS,
    Collator,
    Encoder,
    Question,
    first_tokens,
    load_splits,
    permutation,
)
from tests.models.matrix import dense, projectors_for
from tests.support.experiments import resumed
from tests.support.mechanism import ROUNDING, joint_norm, make_private, released
from tests.support.models import FIRST_WORD, PAD, only
from tests.support.oracles import assert_gradients_equal, relative_error, single_sample_gradients
from tests.support.questions import ROWS, examples, save_model_and_questions, varied

SIZES = {"train": 5, "dev": 3, "test": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("opt")
    save_model_and_questions(path)
    return path


def tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(folder)


def encoder_of(folder, **changes):
    return replace(Encoder(tokenizer_of(folder), max_length=64, first=(0,)), **changes)


def scorer(name, **changes):
    return score_answers(only(name).model(**changes)).eval()


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("SST2", Question("a warm , funny film It was", (" terrible", " great"), 1)),
        ("BoolQ", Question("Ice is frozen water. Is ice water?\n", ("Yes", "No"), 0)),
        (
            "SQuAD",
            Question(
                "Title: Ice\nContext: Ice is frozen water.\nQuestion: What is ice?\nAnswer:",
                (" frozen water\n",),
                golds=("frozen water", "water"),
            ),
        ),
        (
            "DROP",
            Question(
                "Passage: They won 3 games and lost 2.\nQuestion: How many games were there?\n"
                "Answer:",
                (" 5\n",),
                golds=("5",),
            ),
        ),
    ],
)
def test_prompts_are_those_of_the_source(task, expected):
    assert TASKS[task].read(ROWS[task]) == expected


def test_a_question_that_ends_with_its_mark_gets_no_other():
    row = {"passage": "Ice.", "question": "Is it?", "answer": False}
    assert TASKS["BoolQ"].read(row) == Question("Ice. Is it?\n", ("Yes", "No"), 1)


def test_splits_begin_the_permutation_of_the_seed(folder):
    data = str(folder / "SST2")
    found = load_splits(TASKS["SST2"], data, 29, SIZES)
    state = np.random.get_state()
    np.random.seed(29)
    order = np.random.permutation(12)
    np.random.set_state(state)
    read = [TASKS["SST2"].read(varied(ROWS["SST2"], i)) for i in order]
    assert found == {"train": read[:5], "dev": read[5:8], "test": read[:4]}  # of other rows
    assert load_splits(TASKS["SST2"], data, 0, SIZES) != found
    assert permutation(5, 0) == [2, 0, 1, 3, 4]


def test_only_the_test_split_may_be_smaller_than_requested(folder):
    data = str(folder / "DROP")
    found = load_splits(TASKS["DROP"], data, 0, {**SIZES, "test": 1000})
    assert [len(found[name]) for name in ("train", "dev", "test")] == [5, 3, 12]
    with pytest.raises(ValueError, match=r"12 training rows.*num_train=10 and num_dev=3"):
        load_splits(TASKS["DROP"], data, 0, {**SIZES, "train": 10})


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_is_the_last_tokens_of_its_row(task, folder):
    encoder = encoder_of(folder, max_length=200)
    question = TASKS[task].read(ROWS[task])
    example = encoder.example(question)
    assert example["labels"] == question.label
    for option, (row, length) in zip(question.options, whole_rows(example), strict=True):
        assert row[0] == 0
        assert encoder.tokenizer.decode(row[1:-length]) == question.prompt
        assert encoder.tokenizer.decode(row[-length:]) == option
        assert encoder.prompt(question) == row[:-length]


def test_texts_are_stripped_of_spaces_and_keep_line_breaks(folder):
    encoder = encoder_of(folder)
    decode = encoder.tokenizer.decode
    question = Question("  Answer: ", (" 5\n ",))
    assert decode(encoder.prompt(question)[1:]) == "Answer:"
    [(row, _)] = whole_rows(encoder.example(Question("  Answer:", (" 5\n",))))
    assert decode(row[1:]) == "Answer: 5\n"


def test_a_long_text_loses_its_beginning_except_the_first_token(folder):
    whole, cut = encoder_of(folder, max_length=500), encoder_of(folder, max_length=12)
    question = TASKS["SQuAD"].read(ROWS["SQuAD"])
    long, short = whole.example(question), cut.example(question)
    assert short["input_ids"][0] == [0, *long["input_ids"][0][-10:]]  # the last one is predicted
    assert short["answers"] == long["answers"]
    assert cut.prompt(question) == [0, *whole.prompt(question)[-11:]]


@pytest.mark.parametrize(
    ("option", "taken"), [("", r"0 of the \d+"), (" water" * 20, r"\d+ of the 12")]
)
def test_an_answer_without_tokens_or_prompt_is_refused(option, taken, folder):
    with pytest.raises(ValueError, match=f"The answer .* takes {taken} tokens of its row"):
        encoder_of(folder, max_length=12).example(Question("Answer:", (option,)))


def test_rows_begin_with_what_the_tokenizer_puts_there_unless_told(folder):
    tokenizer = tokenizer_of(folder)
    assert first_tokens(tokenizer, None) == (2,)
    assert first_tokens(tokenizer, 0) == (0,)


def test_options_of_one_token_share_their_text(folder):
    encoder, question = encoder_of(folder), Question("Ice is", ("!", "?"), 1)
    example = encoder.example(question)
    assert example["input_ids"] == [encoder.prompt(question)]
    assert [len(answer) for answer in example["answers"]] == [1, 1]


def test_a_batch_is_padded_on_the_left():
    batch = Collator(pad=1, multiple=2)(
        [
            {"input_ids": [[5, 6, 7], [5, 6]], "answers": [[7, 8], [9]], "labels": 0},
            {"input_ids": [[5], [6]], "answers": [[6], [7]], "labels": 1},
        ]
    )
    assert batch["input_ids"].tolist() == [
        [[1, 5, 6, 7], [1, 1, 5, 6]],
        [[1, 1, 1, 5], [1, 1, 1, 6]],
    ]
    assert torch.equal(batch["attention_mask"].bool(), batch["input_ids"] != 1)
    none = IGNORE_INDEX
    assert batch["answers"].tolist() == [[[7, 8], [none, 9]], [[none, 6], [none, 7]]]
    assert batch["labels"].tolist() == [0, 1]


def test_answers_of_all_usual_lengths_have_one_shape():
    """So that their examples share a physical batch if their texts are about as long."""
    some = examples([9] * 3 * ANSWER_GRID, options=1, longest=ANSWER_GRID)
    rows = [Collator(PAD, answers=ANSWER_GRID)([example]) for example in some]
    assert {len(example["answers"][0]) for example in some} == set(range(1, ANSWER_GRID + 1))
    assert {row["answers"].shape for row in rows} == {(1, 1, ANSWER_GRID)}
    assert {row["input_ids"].shape[2] for row in rows} == {24, 32}  # never fewer than answers


def whole_rows(example):
    """Yields all tokens of each option, and how many of them are the answer."""
    answers = example["answers"]
    for text, answer in zip(cycle(example["input_ids"]), answers, strict=False):
        yield text + answer[-1:], len(answer)


def by_hand(model, example):
    scores = []
    for row, length in whole_rows(example):
        ids = torch.tensor([row])
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0]
        chosen = functional.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        scores.append(chosen[-length:].mean())
    return torch.stack(scores)


@pytest.mark.parametrize(("name", "longest"), [("opt", 3), ("opt", 1), ("gpt2", 3), ("llama", 3)])
@torch.no_grad()
def test_scores_are_mean_log_probabilities_of_the_answers(name, longest):
    model, some = scorer(name), examples([4, 9, 6], options=2, longest=longest)
    batch = Collator(PAD)(some)
    labels = batch.pop("labels")
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    outputs = model(**batch)
    assert seen == [longest]  # K: the vocabulary's head sees no other position
    expected = torch.stack([by_hand(model, example) for example in some])
    torch.testing.assert_close(outputs["scores"], expected)
    torch.testing.assert_close(
        choice_loss(outputs, labels), -expected.log_softmax(1)[torch.arange(3), labels]
    )
    one = Collator(PAD)(examples([5, 3], options=1))
    labels = one.pop("labels")
    outputs = model(**one)
    torch.testing.assert_close(answer_loss(outputs, labels), -outputs["scores"][:, 0])


@pytest.mark.parametrize(
    ("name", "options", "longest", "loss"),
    [
        ("opt", 3, 3, choice_loss),
        ("opt", 2, 1, choice_loss),
        ("opt", 1, 3, answer_loss),
        ("llama", 3, 3, choice_loss),
    ],
)
def test_gradients_are_those_of_each_example_alone(name, options, longest, loss):
    model, batch = scorer(name), Collator(PAD)(examples([4, 9, 6], options, longest=longest))
    projectors = projectors_for(model, 3)
    assert projectors
    assert not any("embed" in weight or "lm_head" in weight for weight in projectors)
    losses, gradients = per_sample_gradients(model, batch, projections=projectors, loss=loss)
    expected = single_sample_gradients(model, batch, projectors, loss)
    torch.testing.assert_close(losses, expected[0])
    assert_gradients_equal(gradients, expected[1])


@pytest.mark.parametrize("options", [1, 2, 5])
def test_one_example_counts_once_whatever_its_options(options):
    """Clipped row by row, five options would contribute up to five times C."""
    loss = answer_loss if options == 1 else choice_loss
    model, bound = scorer("opt"), 1e-2
    one = Collator(PAD)(examples([6], options))
    private = make_private(make_engine("layerwise", model, loss), max_grad_norm=bound)
    norm = joint_norm(released(private, [one]))
    assert norm <= bound * (1 + ROUNDING)
    assert norm == pytest.approx(bound, rel=1e-3)  # the gradient is longer than that: it is clipped
    assert joint_norm(single_sample_gradients(model, one, loss=loss)[1]) > 10 * bound


@pytest.mark.parametrize(("options", "loss"), [(2, choice_loss), (1, answer_loss)])
def test_an_examples_gradient_does_not_depend_on_its_batch(options, loss):
    """Neighbours that are longer, whose answers are, and more padding of both change nothing."""
    first, *others = examples([5, 21, 3, 30], options, longest=7)
    engine = make_engine("layerwise", scorer("opt"), loss)

    def gradient(some, multiple):
        found = engine(Collator(PAD, multiple, answers=multiple)(some), {})[1]
        return {name: g[:1] for name, g in dense(found, len(some)).items()}

    expected = gradient([first], 1)
    for some, multiple in (([first], 16), ([first, *others], 1), ([first, *others], 16)):
        assert relative_error(gradient(some, multiple), expected) < 1e-5


def test_models_without_position_ids_or_logit_selection_are_scored_equally():
    """As ALiBi models, which count from the mask, and those that give all logits."""

    class Plain(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask, **options):
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
            return super().forward(input_ids, attention_mask, position_ids=positions)

    model = scorer("llama")
    batch = Collator(PAD)(examples([4, 9], options=2))
    batch.pop("labels")
    plain = Plain(model.config).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(score_answers(plain)(**batch), model(**batch))


class Numbers:
    """A tokenizer whose text is the numbers of the tokens; one of them is the line break."""

    def __init__(self, line_break, eos_token_id=None):
        self._line_break, self.eos_token_id = line_break, eos_token_id

    def __call__(self, text, add_special_tokens):
        assert (text, add_special_tokens) == ("\n", False)
        return {"input_ids": [FIRST_WORD, self._line_break]}

    def batch_decode(self, rows, skip_special_tokens):
        special = (PAD,) if skip_special_tokens else ()
        return [
            " ".join("\n" * (i == self._line_break) or str(i) for i in row if i not in special)
            for row in rows.tolist()
        ]


@torch.no_grad()
def continued(model, prompt, most):
    """Returns the likeliest tokens one after the other, with no cache and no padding."""
    ids = list(prompt)
    for _ in range(most):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_answers_are_greedy_and_end_with_the_line(name):
    model = scorer(name, initializer_range=1.0)  # so that it does not repeat one token
    prompts = [row for e in examples([4, 11, 7, 6], options=1, seed=3) for row in e["input_ids"]]
    free = [continued(model, prompt, 8) for prompt in prompts]
    line_break = free[0][3]
    assert line_break not in free[0][:3]
    expected = [" ".join(map(str, until(line_break, tokens))) for tokens in free]
    assert len(set(map(len, expected))) > 1  # not all end at once
    for batch_size in (1, 3):
        found = generate(model, Numbers(line_break), prompts, PAD, batch_size, 8)
        assert found == expected
    ended = generate(model, Numbers(-1, line_break), prompts, PAD, 4, 8)
    assert ended[0] == f"{expected[0]} {line_break}"  # which is no special token here


def until(stop, tokens):
    """Returns the tokens before one of them, less padding, which is no text wherever it stands."""
    before = tokens[: tokens.index(stop)] if stop in tokens else tokens
    return [token for token in before if token != PAD]


def test_scores_of_a_split_do_not_depend_on_its_batches(folder):
    encoder = encoder_of(folder, max_length=110)
    model = score_answers(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))
    for task, read in TASKS.items():
        questions = [read.read(varied(ROWS[task], i)) for i in range(5)]
        if read.generates:
            found = [mean_f1(model, questions, encoder, PAD, size, 4) for size in (1, 5)]
        else:
            asked = [encoder.example(q) for q in questions]
            scores = [by_hand(model.eval(), example).argmax() for example in asked]
            right = sum(int(s) == q.label for s, q in zip(scores, questions, strict=True))
            found = [accuracy(model, asked, Collator(PAD), n) for n in (1, 3)]
            assert found[0] == pytest.approx(100 * right / 5)
        assert found[0] == found[1]


def test_an_answer_that_is_right_scores_100(folder, monkeypatch):
    """Questions are sorted on the way, and each is held against its own answer."""
    encoder = encoder_of(folder)
    questions = [Question("x" * n, (f" {n}\n",), golds=(str(n),)) for n in (9, 2, 30, 4)]
    told = {tuple(encoder.prompt(question)): question.golds[0] for question in questions}
    monkeypatch.setattr(
        "recipes.paper.opt_scores.generate",
        lambda model, tokenizer, prompts, *others: [told[tuple(prompt)] for prompt in prompts],
    )
    assert mean_f1(None, questions, encoder, PAD, 2, 4) == 100.0
    told[tuple(encoder.prompt(questions[2]))] = "something else"
    assert mean_f1(None, questions, encoder, PAD, 2, 4) == 75.0


def words(folder, tmp_path, task, **options):
    given = {
        **{
            "config": "ours",
            "model_name_or_path": folder,
            "dataset_path": folder / task,
            "task": task,
        },
        **{"result_dir": tmp_path, "output_dir": tmp_path / "out", "accountant": "rdp"},
        **{"num_train": 6, "num_dev": 3, "num_eval": 3, "max_new_tokens": 4, "max_steps": 2},
        **{"expected_batch_size": 3, "use_cpu": True, "disable_tqdm": True},
        **options,
    }
    return [f"--{name}={value}" for name, value in given.items()]


ONE = {"noise_multiplier": 1}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("SST2", ONE),  # bfloat16 and checkpointing, as `ours` has it
        pytest.param("DROP", {**ONE, "method": "dp_lora"}, marks=pytest.mark.slow),
        pytest.param("BoolQ", {**ONE, "method": "dpzero"}, marks=pytest.mark.slow),
        pytest.param(
            "SQuAD",
            {"method": "adam", "dtype": "float32", "frozen": "embed"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_on_every_kind_of_task(task, options, folder, tmp_path):
    result = main(FAMILY, words(folder, tmp_path, task, **options))
    metric = "f1" if TASKS[task].generates else "accuracy"
    assert {split: list(scores) for split, scores in result["metrics"].items()} == {
        "dev": [metric],
        "test": [metric],
    }
    assert all(0 <= score[metric] <= 100 for score in result["metrics"].values())
    assert result["splits"] == {"train": 6, "dev": 3, "test": 3}
    assert result["privacy"]["steps"] == 2
    assert result["privacy"]["private"] == ("noise_multiplier" in options)


@pytest.mark.slow
def test_a_killed_run_resumes_and_leaves_a_plain_model(folder, tmp_path, capsys):
    options = {"config": "reference_code", "target_epsilon": 6}
    options |= {"learning_rate": 1e-3, "max_grad_norm": 0.1}
    options |= {"max_steps": 60, "projection_rank": 4, "save_model": True}
    command = words(folder, tmp_path, "SQuAD", scored_splits="test", **options)
    step, result, saved = resumed(FAMILY, command, tmp_path / "out")
    assert list(result["metrics"]) == ["test"]  # no answer to a question of dev was generated
    assert step <= int(result["notes"][-1].split()[-1].rstrip(".")) < 60
    assert result["privacy"]["epsilon"] <= 6
    assert saved.name == "opt-reference_code-opt0-SQuAD-dp_grape-eps6-seed0"
    (logs,) = saved.glob("checkpoint-*/trainer_state.json")
    for log in json.loads(logs.read_text())["log_history"]:
        assert {"step", "epsilon"} < log.keys() <= PRIVATE_LOGS
    before, model = map(AutoModelForCausalLM.from_pretrained, (folder, saved))
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    frozen = {name for name, _ in model.named_parameters()} - moved
    assert frozen == {"model.decoder.embed_positions.weight"}
    assert model.lm_head.weight is model.get_input_embeddings().weight
    asked = AutoTokenizer.from_pretrained(saved)("Answer:", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=2, do_sample=False).shape[1] > 2
