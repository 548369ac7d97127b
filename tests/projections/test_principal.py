"""Principal directions against the eigenvectors of the second moment, formed as its definition."""

import pytest
import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import (
    PrincipalProjection,
    Side,
    default_targets,
    input_dimensions,
    principal,
    principal_directions,
    probes,
    synthetic_batches,
)
from dp_grape_hf.projections.probes import LENGTHS, first_texts, natural_noise
from tests.models.zoo import WIDE, rows
from tests.support.marks import slow_but
from tests.support.models import ROWS, row
from tests.support.oracles import Largest

RANK = 8
SPEECH = {str(row): row for row in rows(WIDE)}["Wav2Vec2, classification of waves"]
MODELS = {
    "bert": row("BERT, sequence classification"),
    "gpt2": row("GPT-2, causal LM"),
    "t5": row("T5, seq2seq LM"),
    "vit": row("ViT, image classification"),
    "wav2vec2": SPEECH,
    "whisper": row("Whisper, audio classification"),
}


def made(name):
    return MODELS[name].model().eval()


def moments(model, names):
    """Returns the mean of ``x x^T`` over all that the layers of these weights are given."""
    given = {name: [] for name in names}
    hooks = [
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].double().flatten(0, -2))
        )
        for name, seen in given.items()
    ]
    with torch.no_grad():
        for batch in synthetic_batches(model):
            model(**first_texts(batch, probes.TOKENS))
    for hook in hooks:
        hook.remove()
    rows = {name: torch.cat(seen) for name, seen in given.items()}
    return {name: x.T @ x / len(x) for name, x in rows.items()}


def measured(model, names, rank=RANK):
    return principal_directions(model, dict.fromkeys(names, rank), lambda: synthetic_batches(model))


@pytest.mark.parametrize("name", slow_but(set(MODELS) - {"wav2vec2"}, MODELS))
def test_directions_are_the_first_eigenvectors_of_the_second_moment(name, monkeypatch):
    for module in (principal, probes):  # energies of random weights fall slowly
        monkeypatch.setattr(module, "TOKENS", 256)
    model = made(name)
    targets = default_targets(model)
    assert targets
    found, exact = measured(model, targets), moments(model, targets)
    for target in targets:
        values, vectors = torch.linalg.eigh(exact[target])
        directions, energies, total = found[target]
        assert torch.allclose(directions.T @ directions, torch.eye(RANK), atol=1e-5)
        assert total == pytest.approx(float(values.sum()), rel=1e-4)
        assert torch.allclose(
            energies.double(), values.flip(0)[:RANK], rtol=1e-3, atol=1e-6 * total
        )
        held = (directions.double().T @ exact[target] @ directions.double()).trace()
        assert held >= 0.999 * values.flip(0)[:RANK].sum()
        overlap = (vectors.flip(1)[:, 0] @ directions[:, 0].double()).abs()
        if values[-1] > 1.5 * values[-2]:
            assert overlap > 0.999


def test_hundreds_of_slowly_falling_eigenvalues_are_found_nearly_as_well():
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(1, 301).float().rsqrt()
    x = torch.randn(4000, 300, generator=generator) * scales
    layer = nn.Linear(300, 2)
    found = principal_directions(layer, {"weight": 16}, lambda: [{"input": x}])["weight"]
    moment = x.double().T @ x.double() / len(x)
    best = torch.linalg.eigvalsh(moment).flip(0)[:16].sum()
    held = (found.directions.double().T @ moment @ found.directions.double()).trace()
    assert held > 0.99 * best


def test_no_matrix_of_the_width_squared_is_made():
    wide, inputs = nn.Linear(2000, 2), torch.randn(8, 2000)
    with Largest() as largest:
        principal_directions(wide, {"weight": 4}, lambda: [{"input": inputs}])
    assert largest.numbers < 2000 * 100


def test_few_inputs_of_a_layer_are_kept_at_a_time(monkeypatch):
    """A public data set may have hundreds of batches of any size."""
    add, kept = principal._Block.add, []

    def adding(block, features):
        add(block, features)
        kept.append(sum(map(len, block._kept or ())))

    monkeypatch.setattr(principal._Block, "add", adding)
    batches = [{"input": torch.randn(300, 2)} for _ in range(64)]
    principal_directions(nn.Linear(2, 2), {"weight": 1}, lambda: batches)
    assert len(kept) == 64
    assert max(kept) == 900


def test_transposed_weights_and_embeddings_have_directions_of_their_features():
    model = made("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    names = ["transformer.h.0.mlp.c_proj.weight", "transformer.wte.weight"]
    found = measured(model, names)
    assert found[names[0]].directions.shape == (128, RANK)
    assert found[names[1]].directions.shape == (32, RANK)
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    schedule = PrincipalProjection(
        shapes,
        rank=RANK,
        update_steps=None,
        measure=lambda ranks: {name: found[name].directions for name in ranks},
        input_dims=input_dimensions(model, of_features=True),
    )
    sides = {name: projector.side for name, projector in schedule.at(0).items()}
    assert sides == {names[0]: Side.LEFT, names[1]: Side.RIGHT}


def test_a_tied_table_has_the_directions_of_both_its_uses():
    model = made("gpt2")
    name = "transformer.wte.weight"
    seen = []
    model.transformer.wte.register_forward_hook(lambda _, args, out: seen.append(out))
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in synthetic_batches(model):
            model(**first_texts(batch, probes.TOKENS))
    x = torch.cat([s.detach().double().flatten(0, -2) for s in seen])
    best = torch.linalg.eigvalsh(x.T @ x / len(x)).flip(0)[:RANK]
    assert torch.allclose(measured(model, [name])[name].energies.double(), best, rtol=1e-3)


def test_positions_that_a_mask_leaves_out_do_not_count():
    model = made("bert")
    name = "bert.encoder.layer.0.attention.self.query.weight"
    ids = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    masked = [{"input_ids": ids, "attention_mask": mask}]
    short = [{"input_ids": ids[:, :5], "attention_mask": mask[:, :5]}]
    one, other = (principal_directions(model, {name: RANK}, lambda b=b: b) for b in (masked, short))
    assert torch.allclose(one[name].directions, other[name].directions, atol=1e-4)


def test_a_layer_that_nothing_reaches_has_random_orthonormal_directions():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.left = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    found = principal_directions(
        Halved(), {"used.weight": 2, "left.weight": 2}, lambda: [{"x": torch.ones(4, 8)}]
    )
    p = found["left.weight"].directions
    assert torch.allclose(p.T @ p, torch.eye(2), atol=1e-5)
    assert found["left.weight"].total == 0
    assert torch.allclose(found["used.weight"].directions[:, 0], torch.full((8,), 8**-0.5))


def test_directions_are_a_function_of_weights_inputs_and_seed():
    model = made("bert")
    names = default_targets(model)
    one = measured(model, names)
    torch.manual_seed(7)
    two = measured(model, names)
    assert all(torch.equal(one[n].directions, two[n].directions) for n in names)


class Words:
    """A tokenizer that puts two tokens around a sentence."""

    all_special_ids = (0, 1, 2)

    def __call__(self, text):
        return {"input_ids": [1, 9, 2]}

    def __len__(self):
        return 50


def test_tokens_are_random_words_in_the_frame_of_a_sentence():
    model = made("bert")
    batches = list(synthetic_batches(model, Words()))
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert lengths == [min(n, 38) for n in LENGTHS]  # 40 positions, which some models count from 2
    for batch in batches:
        ids = batch["input_ids"]
        assert (ids[:, 0] == 1).all()
        assert (ids[:, -1] == 2).all()
        assert ids[:, 1:-1].min() >= 3
        assert ids.max() < 50
    drawn = torch.cat([batch["input_ids"][:, 1:-1].flatten() for batch in batches])
    counts = drawn.bincount(minlength=50)[3:].float()
    assert counts.min() > 0.6 * counts.mean()


def test_a_processor_of_images_has_no_words():
    class Processor:
        image_mean = 0.5

    model = made("vit")
    one, other = ([*synthetic_batches(model, processor)] for processor in (None, Processor()))
    pairs = zip(one, other, strict=True)
    assert all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in pairs)


def test_without_a_tokenizer_a_sequence_ends_as_the_configuration_says():
    model = made("t5")
    for batch in synthetic_batches(model):
        ends = batch["input_ids"] == model.config.eos_token_id
        assert ends[:, -1].all()
        assert ends.sum() == len(ends)


@pytest.mark.slow
def test_every_model_of_the_zoo_is_measured_on_synthetic_inputs():
    for each in ROWS:
        model = each.model().eval()
        weights = [n for n in default_targets(model) if min(model.get_parameter(n).shape) > RANK]
        found = measured(model, weights)
        assert all(principal.total > 0 for principal in found.values()), each


def test_images_have_the_spectrum_of_natural_ones():
    noise = natural_noise((64, 3, 32, 32), 2, torch.Generator().manual_seed(0))
    assert noise.mean((-2, -1)).abs().max() < 1e-5
    assert torch.allclose(noise.std((-2, -1)), torch.ones(64, 3), atol=1e-4)
    power = torch.fft.rfft(noise, dim=-1).abs().square().mean((0, 1, 2))
    assert 4 < power[2] / power[8] < 64  # 1/f amplitudes along one of two dimensions


def test_a_model_of_unknown_inputs_is_refused_with_remedy():
    with pytest.raises(PrivacyError, match="public_dataset= to the trainer"):
        next(synthetic_batches(nn.Linear(2, 2)))


def schedule(update_steps, log):
    def measure(ranks):
        log.append(1)
        return {name: torch.eye(20)[:, :rank] * len(log) for name, rank in ranks.items()}

    shapes = {"a": (4, 20), "b": (4, 2)}
    return PrincipalProjection(shapes, rank=RANK, update_steps=update_steps, measure=measure)


def test_directions_are_measured_once_unless_steps_are_given():
    once = []
    fixed = schedule(None, once)
    assert fixed.at(0) is fixed.at(500)
    assert list(fixed.at(0)) == ["a"]  # b is no larger than the rank
    assert len(once) == 1
    every = []
    renewed = schedule(3, every)
    first, digest = renewed.at(0), renewed.digest()
    assert renewed.at(2) is first
    assert renewed.at(3) is not first
    assert renewed.digest() != digest
    assert len(every) == 2


@pytest.mark.parametrize("update_steps", [None, 10])
def test_a_resumed_schedule_continues_with_the_saved_p(update_steps):
    log = []
    saved = schedule(update_steps, log)
    saved.at(0)
    state = saved.state_dict()
    resumed = schedule(update_steps, log)
    with pytest.raises(PrivacyError, match="Load the state"):
        resumed.at(4)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.at(4)["a"].matrix, saved.at(4)["a"].matrix)
    assert resumed.digest() == saved.digest()
    assert len(log) == 1
    with pytest.raises(PrivacyError, match="was saved with another projection"):
        PrincipalProjection(
            {"a": (4, 8)}, rank=2, update_steps=None, measure=lambda ranks: {}
        ).load_state_dict(state)
