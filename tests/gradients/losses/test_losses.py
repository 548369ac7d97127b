"""Per-sample losses against what the models themselves compute for one sample."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import PerSampleEngine, loss_for
from dp_grape_hf.gradients.losses.heads import HEADS, UNKNOWN_LOSSES
from dp_grape_hf.gradients.losses.losses import LabelledPositions, split
from tests.models.zoo import WIDE, rows
from tests.support.models import LABELS, ROWS, VOCABULARY, only, row

B = 4
classifier = only("roberta-classifier")

# Per problem type: the configuration, and labels for B samples.
CLASSES, NUMBERS = torch.tensor([0, 2, 1, 2]), torch.tensor([0.5, -1.0, 2.0, 0.0])
PROBLEMS = {
    "single_label_classification": ({}, CLASSES),
    "declared single label": ({"problem_type": "single_label_classification"}, CLASSES),
    "multi_label_classification": (
        {"problem_type": "multi_label_classification"},
        torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]]),
    ),
    "multi label by float labels": ({}, torch.eye(LABELS)[[0, 1, 2, 1]]),
    "regression": ({"num_labels": 1}, NUMBERS),
    "regression with column labels": ({"num_labels": 1}, NUMBERS[:, None]),
    "declared regression": (
        {"problem_type": "regression", "num_labels": LABELS},
        torch.tensor([[0.5, 1, -1], [2, 0, 0], [0, 0, 0.25], [1, 1, 1]]),
    ),
    "declared regression of one number": ({"problem_type": "regression", "num_labels": 1}, NUMBERS),
}


def per_sample(model, inputs, **settings):
    loss = loss_for(model, **settings)
    model_inputs, labels = split(loss, inputs)
    return loss(model(**model_inputs), labels)


def own(model, inputs):
    """The model's own loss of each sample in a batch of one."""
    return torch.stack([model(**sample).loss for sample in samples_of(inputs)])


def samples_of(inputs):
    size = len(next(iter(inputs.values())))
    return [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(size)]


@pytest.mark.parametrize("entry", {entry.task: entry for entry in reversed(ROWS)}.values(), ids=str)
def test_losses_are_float32_for_a_half_precision_model(entry):
    model = entry.model().to(torch.bfloat16)
    inputs = {
        k: v.bfloat16() if k in ("pixel_values", "input_features") else v
        for k, v in entry.batch(B).items()
    }
    assert per_sample(model, inputs).dtype is torch.float32


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_type_equals_the_models_own_loss(problem):
    settings, labels = PROBLEMS[problem]
    inputs = {**classifier.batch(B), "labels": labels}
    losses = per_sample(classifier.model(**settings), inputs)
    # A model without a declared problem type fixes it at its first loss: a fresh one.
    expected = own(classifier.model(**settings), inputs)
    assert losses.shape == (B,)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["GPT-2, causal LM", "T5, seq2seq LM"])
def test_the_mean_is_over_a_samples_targets_or_zero(name):
    model, inputs = row(name).model(), row(name).batch(B)
    loss = loss_for(model)
    model_inputs, labels = split(loss, inputs)
    assert labels is not None
    before = loss(model(**model_inputs), labels).detach()
    labels[2] = -100
    losses = loss(model(**model_inputs), labels)
    assert losses[2] == 0
    torch.testing.assert_close(losses[[0, 1, 3]], before[[0, 1, 3]])
    (gradient,) = torch.autograd.grad(losses[2], model.get_input_embeddings().weight)
    assert torch.equal(gradient, torch.zeros_like(gradient))


SPOKEN = {
    "three words": [7, 8, 9],
    "a word twice": [7, 7, 9],
    "fewer words": [7, 8, -100],
    "padded with the blank": [7, 8, 1],
    "with a gap": [-100, 7, 8],
    "nothing": [-100, -100, -100],
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_loss_of_a_spoken_text_is_the_models_own(masked, reduction):
    entry = next(entry for entry in rows(WIDE) if str(entry) == "Wav2Vec2, CTC")
    model = entry.model(ctc_loss_reduction=reduction).eval()
    inputs = entry.batch(len(SPOKEN))
    inputs["labels"] = torch.tensor([*SPOKEN.values()])
    if not masked:
        del inputs["attention_mask"]
    torch.testing.assert_close(per_sample(model, inputs), own(model, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero", [True, False])
def test_a_text_too_long_for_ctc_has_the_models_loss(zero):
    entry = next(entry for entry in rows(WIDE) if str(entry) == "Wav2Vec2, CTC")
    model = entry.model(ctc_zero_infinity=zero).eval()
    inputs = entry.batch(2)
    inputs["labels"] = torch.tensor([[7] * 9, [*range(7, 10), *[-100] * 6]])
    losses = per_sample(model, inputs)
    assert losses[0] == (0.0 if zero else torch.inf)
    assert 0 < losses[1] < torch.inf
    torch.testing.assert_close(losses, own(model, inputs), rtol=1e-5, atol=1e-5)


def test_a_model_that_draws_masks_requires_them_as_inputs():
    entry = next(entry for entry in rows(WIDE) if entry.family.name == "MAE")
    model, inputs = entry.model(), entry.batch(B)
    torch.testing.assert_close(per_sample(model, inputs), own(model, inputs))
    del inputs["noise"]
    with pytest.raises(UnsupportedModelError, match=r"noise=torch\.rand\(B, patches\)"):
        per_sample(model, inputs)


@pytest.mark.parametrize(
    ("name", "shifts"), [("GPT-2, causal LM", True), ("BART's decoder, causal LM", False)]
)
def test_causal_loss_skips_the_first_token_if_it_shifts_labels(name, shifts):
    model, inputs = row(name).model(), row(name).batch(B)
    before = per_sample(model, inputs)
    inputs["labels"][:, 0] = 7
    after = per_sample(model, inputs)
    assert torch.equal(after, before) if shifts else not torch.allclose(after, before)


def test_an_answer_outside_the_text_counts_as_zero():
    entry = row("BERT, question answering")
    model, inputs = entry.model(), entry.batch(B)
    positions = inputs["input_ids"].shape[1]
    inputs["end_positions"][1] = positions + 5  # cut off: only the start counts
    inputs["start_positions"][2] = -3  # taken for position 0
    losses = per_sample(model, inputs)
    others = [0, 2, 3]  # alone, the model's own loss of sample 1 is 0 / 0
    expected = own(model, {key: value[others] for key, value in inputs.items()})
    torch.testing.assert_close(losses[others], expected, rtol=1e-5, atol=1e-6)
    start = model(**samples_of(inputs)[1]).start_logits
    half = nn.functional.cross_entropy(start, inputs["start_positions"][1:2]) / 2
    torch.testing.assert_close(losses[1], half, rtol=1e-5, atol=1e-6)
    columns = {k: v[:, None] if k.endswith("positions") else v for k, v in inputs.items()}
    assert torch.equal(per_sample(model, columns), losses)


@pytest.mark.parametrize("name", ["T5, seq2seq LM", "Whisper, speech recognition"])
def test_decoder_inputs_are_made_from_labels_unless_they_are_given(name):
    model, inputs = row(name).model(), row(name).batch(B)
    made = split(loss_for(model), inputs)[0]["decoder_input_ids"]
    assert (made[:, 0] == model.config.decoder_start_token_id).all()
    assert torch.equal(made[0, 1:], inputs["labels"][0, :-1])
    given = {**inputs, "decoder_input_ids": made.flip(1)}
    assert torch.equal(split(loss_for(model), given)[0]["decoder_input_ids"], made.flip(1))
    torch.testing.assert_close(per_sample(model, given), own(model, given), rtol=1e-5, atol=1e-5)


def test_a_generation_model_that_is_no_encoder_decoder_is_refused():
    model = type("ToyForConditionalGeneration", (nn.Module,), {})()
    with pytest.raises(
        UnsupportedModelError, match="ToyForConditionalGeneration is no encoder-dec"
    ):
        split(loss_for(model), {"labels": torch.zeros(B, 3, dtype=torch.long)})
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(UnsupportedModelError, match="add decoder_input_ids"):
        split(loss_for(model), {"labels": torch.zeros(B, 3, dtype=torch.long)})


@pytest.mark.parametrize("outputs", [tuple, dict])
def test_outputs_may_be_a_tuple_or_a_mapping(outputs):
    class ToyForImageClassification(nn.Module):
        pass

    logits, labels = torch.randn(B, 3), torch.tensor([0, 1, 2, 0])
    given = (logits, "more") if outputs is tuple else {"logits": logits}
    losses = loss_for(ToyForImageClassification())(given, labels)
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize(
    "name", ["BERT, masked LM", "BERT, multiple choice", "Llama, causal LM", "T5, seq2seq LM"]
)
def test_label_smoothing_equals_the_trainers_for_a_batch_of_one(name):
    model, inputs = row(name).model(), row(name).batch(B)
    smoother = LabelSmoother(epsilon=0.2)
    shift = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert shift is name.endswith("causal LM")
    model_inputs, labels = split(loss_for(model), inputs)
    expected = [
        smoother(model(**sample), labels[i : i + 1], shift_labels=shift)
        for i, sample in enumerate(samples_of(model_inputs))
    ]
    losses = per_sample(model, inputs, label_smoothing=0.2)
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(losses, per_sample(model, inputs), rtol=1e-3)


def test_label_smoothing_is_refused_where_it_means_nothing():
    with pytest.raises(PrivacyError, match=r"label_smoothing=0\.1 is not defined for BertFor"):
        loss_for(row("BERT, question answering").model(), label_smoothing=0.1)
    for name in ("regression", "multi-label classification"):
        entry = row(f"BERT, {name}")
        with pytest.raises(PrivacyError, match=f"label_smoothing=0.1 is not defined for {name}"):
            per_sample(entry.model(), entry.batch(B), label_smoothing=0.1)


def test_virtual_tokens_have_no_label():
    """PEFT itself fails on these labels, so the reference leaves the virtual positions out."""
    peft = pytest.importorskip("peft")
    entry = row("BERT, token classification")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="TOKEN_CLS")
    model, inputs = peft.get_peft_model(entry.model(), config), entry.batch(B)
    labels = inputs["labels"]
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    assert logits.shape[1] == labels.shape[1] + 3
    expected = loss_for(entry.model())({"logits": logits[:, 3:]}, labels)
    torch.testing.assert_close(per_sample(model, inputs), expected)


def test_a_prompt_whose_loss_is_weighed_is_refused():
    peft = pytest.importorskip("peft")
    parts = {"cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
    config = peft.CPTConfig(cpt_token_ids=[1, 2, 3], **parts, task_type="CAUSAL_LM")
    model = peft.get_peft_model(row("Llama, causal LM").model(), config)
    with pytest.raises(UnsupportedModelError, match="CPT"):
        loss_for(model)


@pytest.mark.parametrize("suffix", UNKNOWN_LOSSES)
def test_a_head_name_without_known_loss_is_refused_with_reason(suffix):
    with pytest.raises(UnsupportedModelError, match=re.escape(UNKNOWN_LOSSES[suffix])):
        loss_for(type(f"Toy{suffix}", (nn.Module,), {})())


def test_the_longest_fitting_suffix_decides():
    names = {"MBartForCausalLM": "BartForCausalLM", "OPTForCausalLM": "ForCausalLM"}
    for name, suffix in names.items():
        assert loss_for(type(name, (nn.Module,), {})()).head is HEADS[suffix]
    assert HEADS["BartForCausalLM"] is not HEADS["ForCausalLM"]


def test_outputs_without_the_logits_of_the_head_are_refused():
    model = row("BERT, question answering").model()
    with pytest.raises(UnsupportedModelError, match="returns no end_logits"):
        loss_for(model)({"start_logits": torch.zeros(B, 9)}, torch.zeros(B, 2, dtype=torch.long))


@pytest.mark.parametrize("shape", [(B, 7), (B,), (B, 9, 1)])
def test_labels_for_other_positions_than_the_models_are_refused(shape):
    model = row("BERT, masked LM").model()
    with pytest.raises(PrivacyError) as error:
        loss_for(model)({"logits": torch.zeros(B, 9, VOCABULARY)}, torch.zeros(shape).long())
    assert f"The {len(shape)}-dimensional labels are not one per position" in str(error.value)


def test_missing_labels_are_refused_by_their_names():
    model = classifier.model()
    with pytest.raises(PrivacyError, match="no 'labels'"):
        loss_for(model)({"logits": torch.zeros(B, LABELS)}, None)
    entry = row("BERT, question answering")
    inputs = entry.batch(B)
    del inputs["end_positions"]
    with pytest.raises(PrivacyError, match="no 'start_positions' and 'end_positions'"):
        per_sample(entry.model(), inputs)


USES = {
    "once": lambda out, hidden: 3 * torch.tanh(out(hidden) / 3),
    "in chunks": lambda out, hidden: torch.cat([out(x) for x in hidden.split(2, 1)], 1),
    "twice": lambda out, hidden: torch.cat([out(hidden), out(hidden)], 1)[:, :8],
    "flattened": lambda out, hidden: out(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]),
    "with more rows": lambda out, hidden: out(hidden.repeat(2, 1, 1))[: len(hidden)],
    "not at all": lambda out, hidden: hidden @ out.weight.T,
}


class ToyForCausalLM(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.table, self.out, self.use = nn.Embedding(9, 4), nn.Linear(4, 9), USES[use]
        self.rows = []
        self.out.register_forward_hook(lambda m, args, output: self.rows.append(output.shape[-2]))

    def get_output_embeddings(self):
        return self.out

    def forward(self, input_ids):
        return {"logits": self.use(self.out, self.table(input_ids))}


class Engine(PerSampleEngine):
    skips_unlabelled = True

    def __call__(self, inputs, projectors):
        return self.losses(inputs), {}


@pytest.mark.parametrize(
    ("use", "rows", "again"),
    [
        ("once", [2], [2]),
        ("in chunks", [2, 2, 2, 2], [2, 2, 2, 2]),
        ("twice", [2, 2, 8, 8], [8, 8]),  # found out from the logits, and not tried again
        ("flattened", [32], [32]),
        ("with more rows", [8], [8]),
        ("not at all", [], []),
    ],
)
def test_logits_are_left_out_only_with_one_row_per_position(use, rows, again):
    model = ToyForCausalLM(use)
    ids = torch.randint(0, 9, (B, 8))
    labels = torch.full((B, 8), -100)
    for i, places in enumerate(([3], [1, 7], [0], [])):  # position 0 is never predicted
        labels[i, places] = ids[i, places]
    inputs = {"input_ids": ids, "labels": labels}
    expected = loss_for(model)(model(ids), labels)
    model.rows.clear()
    engine = Engine(model)
    losses, _ = engine(inputs, {})
    assert model.rows == rows
    torch.testing.assert_close(losses, expected)
    assert (losses[2:] == 0).all()
    assert (losses[:2] > 0).all()
    model.rows.clear()
    torch.testing.assert_close(engine(inputs, {})[0], expected)
    assert model.rows == again
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()), allow_unused=True)
    reference = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    for gradient, other in zip(gradients, reference, strict=True):
        torch.testing.assert_close(gradient, other)


def test_nothing_is_gathered_where_most_positions_have_a_label():
    model, ids = ToyForCausalLM("once"), torch.randint(0, 9, (B, 8))
    Engine(model)({"input_ids": ids, "labels": ids}, {})
    assert model.rows == [8]


def test_the_hook_is_removed_even_after_a_failed_pass():
    model = ToyForCausalLM("once")
    labels = torch.full((B, 8), -100)
    with pytest.raises(ZeroDivisionError), LabelledPositions(loss_for(model), labels):
        raise ZeroDivisionError
    model(torch.zeros(B, 8, dtype=torch.long))
    assert model.rows == [8]
