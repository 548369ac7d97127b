"""Separately stored updates: the model computes with ``W + lift(Z)``, and a merge loses nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import functions, make_engine
from dp_grape_hf.optimizers import LowRankUpdates, ProjectedAdam, projected as optimizer_module
from dp_grape_hf.projections import ProjectionSchedule
from recipes.benchmark.kernels import Kernels
from tests.models.matrix import projectors_for
from tests.support.models import only
from tests.support.optimizers import saved_and_loaded
from tests.support.oracles import Largest, assert_gradients_equal, single_sample_gradients

RANK = 4
SEEDS = 50


def projectors_of(model, seed=0, rank=RANK):
    """Returns projectors of every matrix that is large enough."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return ProjectionSchedule(shapes, rank=rank, update_steps=1, seed=seed).at(0)


def converted(model, dtype):
    """Converts the parameters, and leaves buffers such as rotary frequencies as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def small_model(dtype=torch.bfloat16):
    """Both layer types, each with weights that are projected on either side, with biases."""
    torch.manual_seed(5)
    layers = [nn.Linear(12, 20), Conv1D(12, 20), nn.Tanh(), Conv1D(20, 12), nn.Linear(20, 12)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():  # numbers that both types have
            parameter.copy_((torch.randn(parameter.shape) / 4).bfloat16())
    return model.to(dtype)


def adam(model, **settings):
    return ProjectedAdam(model.parameters(), **{"lr": 1e-3} | settings)


def step(model, optimizer, projectors, seed):
    """One update by random gradients, which depend on the seed alone."""
    generator, gradients, by_weight = torch.Generator().manual_seed(seed), {}, {}
    for name, weight in model.named_parameters():
        projector, shape = projectors.get(name), weight.shape
        if projector is not None:
            by_weight[weight] = projector
        shape = projector.coordinate_shape(shape) if projector else shape
        gradients[weight] = torch.randn(shape, generator=generator)
    optimizer.receive(gradients, by_weight)
    optimizer.step()


def updated(model, **settings):
    projectors, optimizer = projectors_of(model), adam(model, **settings)
    updates = LowRankUpdates(model, optimizer)
    updates.set_projectors(projectors)
    step(model, optimizer, projectors, 0)
    return projectors, optimizer, updates


def exact(model, optimizer, projectors):
    found = {}
    for name, weight in model.named_parameters():
        state, found[name] = optimizer.state[weight], weight.detach().float()
        if "update" in state:
            found[name] = state["decay"] * found[name] + projectors[name].lift(state["update"])
    return found


def spacing(value):
    """Returns the distance of bfloat16 neighbours around each number."""
    return 2.0 ** (torch.frexp(value)[1] - 8)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "engine", "checkpointed"),
    [("gpt2", "layerwise", False), ("llama", "functorch", False), ("gpt2", "layerwise", True)],
)
def test_both_engines_compute_with_the_weights_and_their_updates(name, engine, checkpointed, fused):
    """Losses and per-sample gradients are those of the model with merged weights, in float32.

    Checkpointed layers have their updates when they run again.
    """
    case = only(name)
    model, inputs = converted(case.model(), torch.bfloat16), case.batch(3)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.training
    projectors = projectors_for(model, 8)
    optimizer = adam(model, lr=0.02)
    updates = LowRankUpdates(model, optimizer)
    assert sum(name in updates for name in projectors) == len(projectors)
    for i in range(2):
        updates.set_projectors(projectors)
        step(model, optimizer, projectors, i)
    merged = case.model()
    with torch.no_grad():
        for parameter, value in exact(model, optimizer, projectors).items():
            merged.get_parameter(parameter).copy_(value)
    converted(model, torch.float32)  # the branches stay: what is left to differ is rounding
    updates.set_projectors(projectors)
    computing = make_engine(engine, model)
    if fused:
        computing.add_branches(updates.branches)
    losses, gradients = computing(inputs, projectors)
    expected_losses, expected = single_sample_gradients(merged, inputs, projectors)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(gradients, expected, tolerance=3e-5)
    model.eval(), merged.eval()
    values = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        logits = merged(**values).logits
        torch.testing.assert_close(model(**values).logits, logits, rtol=1e-4, atol=1e-5)
        merged.load_state_dict(model.state_dict())  # the weights alone
        assert not torch.allclose(merged(**values).logits, logits, rtol=1e-2, atol=1e-2)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def squared_outputs(outputs, labels):
    return outputs.float().square().mean((1, 2)) * labels


def test_a_layer_and_its_branch_share_what_both_need():
    """Of each layer: the input times P, and adding the two gradients of the input."""
    model = Model(small_model())
    inputs = {"x": torch.randn(3, 5, 12).bfloat16(), "labels": torch.ones(3)}
    projectors, _, updates = updated(model)
    updates.set_projectors(projectors)
    engine, found = make_engine("layerwise", model, squared_outputs), []
    for branches in ({}, updates.branches):
        engine.add_branches(branches)
        engine(inputs, projectors)
        with (kernels := Kernels()):
            engine(inputs, projectors)
        found.append(kernels.calls)
    apart, together = found
    assert apart["add"] - together["add"] >= 3
    assert apart.total() - together.total() >= 10


def test_a_pass_that_fails_leaves_no_branch_taken(monkeypatch):
    model = Model(small_model())
    inputs = {"x": torch.randn(3, 5, 12).bfloat16(), "labels": torch.ones(3)}
    projectors, _, updates = updated(model, lr=0.02)
    updates.set_projectors(projectors)
    engine = make_engine("layerwise", model, squared_outputs)
    engine.add_branches(updates.branches)
    engine(inputs, projectors)
    expected = model(inputs["x"])

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(functions.Linear, "apply", fail)
    with pytest.raises(MemoryError):
        engine(inputs, projectors)
    assert torch.equal(model(inputs["x"]), expected)


def test_a_branch_keeps_the_layers_dtype_and_input_shape():
    model = small_model()
    updated(model)
    for shape in [(12,), (1, 12), (5, 12), (2, 3, 12), (0, 12)]:
        output = model(torch.zeros(shape, dtype=torch.bfloat16))
        assert output.dtype is torch.bfloat16
        assert output.shape == shape
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.zeros(5, 12)).dtype is torch.bfloat16
    model.float()
    assert model(torch.zeros(5, 12)).dtype is torch.float32


def test_a_copy_of_the_model_keeps_its_updates():
    model, x = small_model(), torch.randn(5, 12).bfloat16()
    projectors, optimizer, _ = updated(model, lr=0.1)
    duplicate, before = copy.deepcopy(model), model(x)
    step(model, optimizer, projectors, 1)
    assert torch.equal(duplicate(x), before)
    assert not torch.equal(model(x), before)


def test_a_merge_rounds_to_a_neighbour_and_is_unbiased():
    """A mean over 50 seeds is off by less than 0.43 spacings. By Hoeffding's inequality fresh coins
    fail below 4e-8 for each of 960 numbers; these are seeded."""
    projectors, means, goal = projectors_of(small_model()), {}, {}
    for seed in range(SEEDS):
        model = small_model()
        optimizer = adam(model, lr=1e-4, rounding_seed=seed)
        updates = LowRankUpdates(model, optimizer)
        updates.set_projectors(projectors)
        step(model, optimizer, projectors, 0)
        goal = exact(model, optimizer, projectors)
        updates.merge_()
        for name in projectors:
            value = model.get_parameter(name).detach().float()
            assert ((value - goal[name]).abs() < spacing(goal[name])).all(), name
            means[name] = means.get(name, 0) + value / SEEDS
    for name in projectors:
        bound = 3 * spacing(goal[name]) / SEEDS**0.5
        assert ((means[name] - goal[name]).abs() <= bound + 1e-7).all(), name
        # Most of these updates are below half a spacing: rounding to nearest would lose them.
        before = small_model().get_parameter(name).detach().float()
        assert (goal[name].bfloat16().float() == before).float().mean() > 0.5


def test_a_redraw_merges_with_the_old_projection_and_restarts():
    model = small_model()
    old, new = projectors_of(model, 0), projectors_of(model, 1)
    optimizer = adam(model, lr=0.05, weight_decay=0.1)
    updates = LowRankUpdates(model, optimizer)
    for i in range(3):
        updates.set_projectors(old)
        step(model, optimizer, old, i)
    goal = exact(model, optimizer, old)
    updates.set_projectors(new)
    for name in old:
        weight = model.get_parameter(name)
        state = optimizer.state[weight]
        assert ((weight.float() - goal[name]).abs() < spacing(goal[name])).all()
        assert not state["update"].any()
        assert (state["decay"], state["step"]) == (1.0, 3)
    optimizer.param_groups[0]["weight_decay"] = 0.0  # else the decay of W waits for the merge
    step(model, optimizer, new, 3)
    merged, x = small_model(torch.float32), torch.randn(5, 12)
    merged.load_state_dict(exact(model, optimizer, new))
    torch.testing.assert_close(converted(model, torch.float32)(x), merged(x))


def test_no_two_roundings_share_their_coins():
    """Two equal weights, equally updated, are rounded differently, and so at every step."""
    weights = [nn.Parameter(torch.ones(400).bfloat16()) for _ in range(2)]
    optimizer = ProjectedAdam(weights, lr=2**-9, betas=(0.0, 0.0))
    ups = []
    for _ in range(2):
        for weight in weights:
            weight.data.fill_(1)
        optimizer.receive({weight: -torch.ones(400) for weight in weights})
        optimizer.step()
        ups += [weight.detach() > 1 for weight in weights]
    for i, some in enumerate(ups):
        assert 40 < some.sum() < 160  # a quarter of 400; fresh coins fail below 1e-9
        assert all((some != other).sum() > 50 for other in ups[:i])


@pytest.mark.parametrize("projected", [True, False])
def test_no_float32_copy_of_a_whole_weight_is_made(projected, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 300)).bfloat16()
    monkeypatch.setattr(optimizer_module, "_BLOCK", 2000)
    projectors, optimizer = projectors_of(model, rank=2) if projected else {}, adam(model, lr=0.1)
    updates = LowRankUpdates(model, optimizer)
    updates.set_projectors(projectors)
    step(model, optimizer, projectors, 0)  # makes the state
    generator = torch.Generator().manual_seed(1)
    shapes = [p.coordinate_shape(torch.Size([300, 64])) for p in projectors.values()]
    weight = model[0].weight
    gradient = torch.randn(shapes[0] if shapes else (300, 64), generator=generator)
    goal = exact(model, optimizer, projectors)["0.weight"]
    with Largest(torch.float32, torch.int32) as largest:
        if projected:
            updates.merge_()
        else:
            optimizer.receive({weight: gradient})
            optimizer.step()
    assert largest.numbers <= 2000
    if projected:
        assert ((weight.float() - goal).abs() < spacing(goal)).all()


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.once, self.scaled, self.frozen = nn.Linear(12, 12), Scaled(12, 12), nn.Linear(12, 12)
        self.table, self.tied = nn.Embedding(16, 12), nn.Linear(12, 16)
        self.tied.weight = self.table.weight
        self.twice = self.again = nn.Linear(12, 12)
        self.directly = nn.Linear(12, 12, bias=False)
        self.long = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.again(self.twice(self.once(self.table(ids))))
        x = functional.linear(self.frozen(self.scaled(x)), self.directly.weight)
        return self.tied(x)


def test_only_the_weight_of_one_nn_linear_has_a_branch():
    model = Uses().bfloat16()
    model.long.float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ProjectedAdam(trained, lr=0.1)
    updates = LowRankUpdates(model, optimizer)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name in names if name in updates] == ["once.weight", "directly.weight"]
    projectors = projectors_of(model)
    updates.set_projectors(projectors)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_of = {p: torch.ones(projectors[n].coordinate_shape(p.shape)) for n, p in _trained(model)}
    optimizer.receive(step_of, {p: projectors[n] for n, p in _trained(model)})
    optimizer.step()
    for name, parameter in _trained(model):
        assert torch.equal(parameter, before[name]) == (name in updates), name


def _trained(model):
    return ((n, p) for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2)


def test_weights_used_without_their_module_are_rounded_at_every_step():
    """If its updates were stored separately, nothing would add them."""
    model = Uses().bfloat16()
    projectors, optimizer = projectors_of(model), adam(model, lr=0.1)
    updates = LowRankUpdates(model, optimizer)
    model(torch.zeros(2, dtype=torch.long))
    updates.leave_uncalled()
    assert "directly.weight" not in updates
    assert "once.weight" in updates
    before = model.directly.weight.detach().clone()
    updates.set_projectors(projectors)
    step(model, optimizer, projectors, 0)
    assert not torch.equal(model.directly.weight, before)
    assert not model.directly._forward_hooks


def test_removing_leaves_merged_weights_and_no_hooks():
    model, x = small_model(), torch.randn(5, 12).bfloat16()
    projectors, optimizer, updates = updated(model, lr=0.05)
    goal = exact(model, optimizer, projectors)
    updates.remove()
    assert not any(module._forward_hooks for module in model.modules())
    fresh = small_model(torch.float32)
    fresh.load_state_dict(goal)
    torch.testing.assert_close(model(x).float(), fresh(x.float()), rtol=0.05, atol=0.05)
    assert "0.weight" not in updates


def test_new_coordinates_without_use_are_refused():
    """Else updates in two coordinate systems would add up in one."""
    model = small_model()
    optimizer = adam(model)
    updates = LowRankUpdates(model, optimizer)
    updates.set_projectors(projectors_of(model, 0))
    coordinates = sum(RANK * max(p.shape) for p in model.parameters() if p.dim() == 2)
    assert optimizer.state_bytes() == 4 * coordinates
    with pytest.raises(PrivacyError, match=r"LowRankUpdates.set_projectors\(\)"):
        step(model, optimizer, projectors_of(model, 1), 0)
    with pytest.raises(PrivacyError, match=r"projection_rank"):
        updates.set_projectors(projectors_of(model, 0, rank=3))


@pytest.mark.parametrize("merge", [True, False])
def test_a_saved_run_continues_bit_by_bit(merge):
    """Merged before it was saved, as the trainer does, or in the middle of a period."""
    shapes = {name: tuple(p.shape) for name, p in small_model().named_parameters()}

    def start():
        model = small_model()
        optimizer = adam(model, lr=1e-3, weight_decay=0.1)
        schedule = ProjectionSchedule(shapes, rank=RANK, update_steps=3, seed=1)
        return model, optimizer, LowRankUpdates(model, optimizer), schedule

    model, optimizer, updates, schedule = start()
    for i in range(5):
        updates.set_projectors(schedule.at(i))
        step(model, optimizer, schedule.at(i), i)
    if merge:
        updates.merge_()
    resumed, loaded, continued, again = start()
    continued.set_projectors(again.at(0))  # what is loaded does not belong to this projection
    resumed.load_state_dict(saved_and_loaded(model.state_dict()))
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    pending = [state["update"] for state in loaded.state.values() if "update" in state]
    assert len(pending) == 4
    assert all(update.dtype is torch.float32 and update.any() == (not merge) for update in pending)
    for i in range(5, 9):
        for m, o, u, s in (
            (model, optimizer, updates, schedule),
            (resumed, loaded, continued, again),
        ):
            u.set_projectors(s.at(i))
            step(m, o, s.at(i), i)
    for u in (updates, continued):
        u.merge_()
    for (name, a), (_, b) in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_updates_that_were_not_merged_are_not_dropped_silently():
    model = small_model()
    _, optimizer, updates = updated(model)
    plain = ProjectedAdam(small_model(torch.float32).parameters())
    with pytest.raises(ValueError, match=r"float32 now. Resume with weights"):
        plain.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    updates.merge_()
    plain = ProjectedAdam(small_model(torch.float32).parameters())
    plain.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert not any("update" in state or "decay" in state for state in plain.state.values())
