"""Every family with every head, against transformers' own loss of one sample.

The oracle is autograd of the loss that the model itself returns for a batch of one with labels. It
shares nothing with this package: neither losses nor engines. To check another model, add a row to
``tests/models/families.yaml``.
"""

import pytest
import torch

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients import ENGINES, IGNORE_INDEX, make_engine, per_sample_gradients, replay
from recipes.common.runs import read_lines
from recipes.report.checks import model_matrix
from tests.models.matrix import (
    CONDITIONS,
    ENGINE_NAMES,
    cell,
    dense,
    main,
    own_gradients,
    projectors_for,
    whole_error,
    worst_error,
)
from tests.models.zoo import FAMILIES, WIDE, rows
from tests.support.marks import slow_but
from tests.support.models import ROWS, row
from tests.support.oracles import assert_gradients_equal, relative_error

B, RANK = 4, 4
TOLERANCE = 1e-4  # relative, float32; differences among choices lose a digit or two

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # vmap's loops
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding:UserWarning"),  # WavLM
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Switch
    pytest.mark.filterwarnings("ignore:.*gemm_4bit.*:UserWarning"),  # of bitsandbytes
]

each_engine = pytest.mark.parametrize("engine", list(ENGINES))

# One model for each way of using positions, masks and weights: conditions multiply.
SOME = (
    *("BERT, sequence classification", "RoBERTa, masked LM", "DeBERTa-v3, token classification"),
    *("GPT-2, causal LM", "Llama, causal LM", "T5, seq2seq LM", "ViT, image classification"),
)
FEW = tuple(name for name in SOME if name.startswith(("BERT", "GPT-2", "Llama", "ViT")))

# And one more of each layer, head and way of adapting that these lack.
QUICK = (
    *SOME,
    *("OPT, causal LM", "GPT-NeoX, token classification", "Qwen3, causal LM", "Gemma-2, causal LM"),
    *("BERT, question answering", "BERT, multiple choice", "BERT, regression"),
    *("BERT, multi-label classification", "ConvNeXt, image classification"),
    *("Swin, image classification", "CLIP vision, image classification", "BART, seq2seq LM"),
    *("Whisper, speech recognition", "Whisper, audio classification", "Mixtral, causal LM"),
    *("Mixtral, a loop over experts, causal LM", "BERT + LoRA, sequence classification"),
    *("Llama + IA3, causal LM", "T5 + prompt tuning, seq2seq LM"),
    # States that would be kept, tables that all samples share, a module told the batch size.
    *("Mamba, causal LM", "Mamba-2, causal LM", "FalconMamba, causal LM", "Jamba, causal LM"),
    *("RecurrentGemma, causal LM", "BEiT, shared bias, image classification"),
    *("Perceiver, sequence classification", "Nystromformer, sequence classification"),
    "Nystromformer, landmarks, classification of whole texts",
    # Losses of their own.
    *("BERT, token classification", "DistilBERT, question answering", "Phi, causal LM"),
    *("T5, question answering", "BART's decoder, causal LM"),
    *("BERT + prompt tuning, question answering", "Llama + prompt tuning, causal LM"),
    "Llama + prompt tuning, sequence classification",
    "Llama + prefix tuning, causal LM",  # which has no positions of its own
)


def matrix():
    """Every model, projected; some in the other engine, and a few unprojected as well."""
    found = []
    for entry in rows(FAMILIES + WIDE):
        for engine, quick in (("layerwise", QUICK), ("functorch", FEW)):
            if engine == "layerwise" or str(entry) in QUICK:
                marks = () if str(entry) in quick else pytest.mark.slow
                found.append(pytest.param(entry, engine, RANK, id=f"{entry}-{engine}", marks=marks))
        if str(entry) in FEW:
            found.append(pytest.param(entry, "layerwise", None, id=f"{entry}-unprojected"))
    return found


@pytest.mark.parametrize(("entry", "engine", "rank"), matrix())
def test_every_model_has_exact_gradients_or_a_reasoned_refusal(entry, engine, rank):
    model, inputs = entry.model(), entry.batch(B)
    if (words := entry.refused(engine)) is not None:
        with pytest.raises(UnsupportedModelError) as error:
            per_sample_gradients(model, inputs, engine=engine)
        assert words in str(error.value)
        return
    projectors = projectors_for(model, rank)
    expected_losses, expected = own_gradients(model, inputs, projectors)
    losses, gradients = per_sample_gradients(model, inputs, projections=projectors, engine=engine)
    torch.testing.assert_close(losses, expected_losses.float(), rtol=TOLERANCE, atol=TOLERANCE)
    assert_gradients_equal(gradients, expected, TOLERANCE)


@pytest.mark.parametrize("entry", slow_but(FEW, ROWS))
def test_one_engine_serves_any_batch_size_length_padding_and_projection(entry):
    if entry.refused("layerwise"):
        return
    model = entry.model()
    engine = make_engine("layerwise", model)
    for samples, positions, padded, rank in (
        *((3, 9, False, RANK), (4, 7, True, None), (1, 12, True, RANK - 1), (2, 9, True, RANK)),
    ):
        # Images and sounds have one size.
        lengths = {"positions": positions} if "input_ids" in entry.batch(1) else {}
        batch = entry.batch(samples, seed=samples, **lengths)
        if not padded and "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        projectors = projectors_for(model, rank, seed=samples)
        _, gradients = engine(batch, projectors)
        _, expected = own_gradients(model, batch, projectors)
        assert relative_error(dense(gradients, samples), expected) < 5 * TOLERANCE


def test_at_least_sixty_families_without_special_support_are_tried():
    made_for, tried = ({family.config for family in table} for table in (FAMILIES, WIDE))
    assert len(tried - made_for) >= 60
    names = [str(entry) for entry in rows(FAMILIES + WIDE)]
    assert len(set(names)) == len(names)
    assert {*QUICK} <= {*names}


DROPOUT = {
    "BERT, sequence classification": {"hidden_dropout_prob": 0.2},
    "Llama, causal LM": {"attention_dropout": 0.2, "attn_implementation": "eager"},
    "BART, seq2seq LM": {"dropout": 0.2},
}  # but none with a module under vmap, which draws other masks than the plain pass


@pytest.mark.parametrize("name", DROPOUT)
def test_gradients_under_dropout_sum_to_autograds_with_equal_masks(name):
    model, inputs = row(name).model(**DROPOUT[name]), row(name).batch(B)
    engine = make_engine("layerwise", model)
    engine(inputs, {})  # the probe draws random numbers of its own
    torch.manual_seed(7)
    losses, gradients = engine(inputs, {})
    torch.manual_seed(7)
    expected_losses = engine.losses(inputs)
    torch.testing.assert_close(losses, expected_losses.detach(), rtol=1e-5, atol=1e-5)
    names = list(engine.trainable)
    total = torch.autograd.grad(expected_losses.sum(), list(engine.trainable.values()))
    found = {n: g.weighted_sum(torch.ones(B))[None] for n, g in gradients.items()}
    expected = {n: g[None] for n, g in zip(names, total, strict=True)}
    assert relative_error(found, expected) < TOLERANCE
    torch.manual_seed(8)
    assert not torch.allclose(engine(inputs, {})[0], losses, rtol=1e-4)  # dropout was on


def test_the_setting_of_the_kv_cache_returns_after_a_pass():
    model, inputs = row("Llama, causal LM").model(use_cache=True), row("Llama, causal LM").batch(B)
    kept = []
    model.model.register_forward_hook(lambda *call: kept.append(call[-1].past_key_values))
    engine = make_engine("layerwise", model)
    engine(inputs, {})
    kept.clear()
    engine(inputs, {})
    assert kept == [None]
    with pytest.raises(IndexError):
        engine({**inputs, "input_ids": inputs["input_ids"] + 1000}, {})
    assert model.config.use_cache is True


@pytest.mark.slow
@each_engine
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # of importing the compiler
def test_a_compiled_model_is_refused(engine):
    model = row("BERT, sequence classification").model()
    with pytest.raises(UnsupportedModelError, match="compile"):
        make_engine(engine, torch.compile(model))
    model.compile()
    with pytest.raises(UnsupportedModelError, match="compile"):
        make_engine(engine, model)


WHOLE = (
    *("prompt tuning", "P-tuning", "VB-LoRA"),  # the whole model runs under vmap
    "RandLoRA",  # whose gradients of few labels nearly cancel
)
VOCABULARY_ROWS = [
    entry
    for entry in ROWS
    if entry.task in ("masked LM", "causal LM", "seq2seq LM", "speech recognition")
    and entry.refused("layerwise") is None
    and entry.family.adapter not in WHOLE
]


def with_few_labels(batch):
    labels = batch["labels"].clone()
    order = (labels != IGNORE_INDEX).long().cumsum(1)
    for i in range(len(labels)):
        labels[i, ~torch.isin(order[i], torch.tensor([1, 3 + i % 2]))] = IGNORE_INDEX
    return {**batch, "labels": labels}


@pytest.mark.parametrize("entry", slow_but(SOME, VOCABULARY_ROWS))
def test_logits_are_computed_at_labelled_positions_only_and_nothing_changes(entry, monkeypatch):
    model, inputs = entry.model(), with_few_labels(entry.batch(B))
    positions = inputs["labels"].shape[1]
    engine, everywhere = make_engine("layerwise", model), make_engine("layerwise", model)
    engine.skips_unlabelled, everywhere.skips_unlabelled = True, False
    seen = []
    losses, gradients = engine(inputs, {})
    expected_losses, expected = everywhere(inputs, {})
    inner = engine.loss.model
    hook = inner.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape[-2])
    )
    monkeypatch.setattr(replay, "examine", lambda *_: True)
    engine(inputs, {})
    hook.remove()
    assert max(seen) < positions / 2
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert relative_error(dense(gradients, B), dense(expected, B)) < TOLERANCE
    own_losses, own = own_gradients(model, inputs)
    torch.testing.assert_close(losses, own_losses, rtol=1e-4, atol=1e-5)
    assert relative_error(dense(gradients, B), own) < TOLERANCE


@pytest.mark.slow
def test_the_matrix_shows_errors_and_refusals_with_their_reasons(capsys, tmp_path):
    path = tmp_path / "matrix.jsonl"
    only = ["--only", "ViT, image|a loop over", "--conditions", "full", "left padding"]
    main([*only, "--output", str(path)])
    table, progress = capsys.readouterr()
    assert model_matrix(read_lines(path)) == table
    assert "8/8" in progress
    titles, _, vit, mixture = (
        [value.strip() for value in line.split("|")[1:-1]] for line in table.splitlines()[:4]
    )
    assert titles[2:] == [f"{c}, {e}" for c in ("full", "left padding") for e in ENGINE_NAMES]
    assert vit[:2] == ["ViT", "image classification"]
    assert all(float(value) < TOLERANCE for value in vit[2:4])
    assert vit[4:] == ["", ""]  # images are not padded
    by_engine = dict(zip(titles[2:], mixture[2:], strict=True))
    assert float(by_engine["full, layerwise"]) < TOLERANCE
    assert by_engine["full, functorch"] == "refused (1)"
    assert "1. the model (MixtralForCausalLM)" in table


def test_the_matrix_counts_nan_as_wrong():
    found = {"weight": torch.tensor([[1.0, torch.nan], [1.0, 1.0]])}
    expected = {"weight": torch.ones(2, 2)}
    assert worst_error(found, expected) == torch.inf
    assert worst_error(expected, expected) == 0
    assert worst_error({"weight": 1.5 * expected["weight"]}, expected) == pytest.approx(0.5)
    assert whole_error(found, expected) == torch.inf
    assert whole_error({"weight": 1.5 * expected["weight"]}, expected) == pytest.approx(0.5)


def test_the_matrix_forgives_only_rounding_of_a_zero_gradient():
    expected = {"weight": torch.ones(1, 4), "bias": torch.zeros(1, 1)}
    rounded = {**expected, "bias": torch.full((1, 1), torch.finfo(torch.float32).eps)}
    wrong = {**expected, "bias": torch.full((1, 1), 1e-4)}
    assert worst_error(rounded, expected) < 1e-5
    assert worst_error(wrong, expected) > 1e-3


@pytest.mark.parametrize("name", slow_but(SOME[:1], [*SOME, "Mixtral, causal LM"]))
@pytest.mark.parametrize("condition", CONDITIONS)
def test_gradients_are_exact_under_every_condition_of_the_matrix(name, condition):
    if name.startswith("ViT") and condition == "left padding":
        pytest.skip("images are not padded")
    error = cell(row(name), CONDITIONS[condition], "layerwise")
    assert isinstance(error, float)
    assert 0 < error < (0.2 if "bf16" in condition else TOLERANCE)
