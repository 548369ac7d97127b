"""What ``torch.compile`` makes of a pass is that pass."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_grape_hf.gradients import Compilation, flat
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.optimizers import LowRankUpdates, ProjectedAdam
from tests.gradients.functions import Function, mean_output
from tests.models.matrix import dense, projectors_for
from tests.support.models import only
from tests.support.oracles import assert_gradients_equal, relative_error, single_sample_gradients

ROWS = 4
TRACED = Compilation(ROWS, backend="aot_eager")  # traced and differentiated, and not made faster
SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # the tracer's


@pytest.fixture(autouse=True)
def _without_what_was_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("name", "most", "compilation"),
    [
        ("roberta-classifier", flat.MOST, TRACED),
        pytest.param("roberta-classifier", flat.MOST, Compilation(ROWS), marks=SLOW, id="inductor"),
        *(
            pytest.param(name, most, TRACED, marks=SLOW)
            for name in ("roberta-masked-lm", "gpt2", "opt", "llama", "vit")
            for most in (flat.MOST, 0)
        ),
    ],
)
def test_compiled_gradients_equal_those_of_single_samples(name, most, compilation, monkeypatch):
    """For any number of samples, and after P was redrawn, without being compiled again."""
    monkeypatch.setattr(flat, "MOST", most)
    case = only(name)
    model = case.model()
    engine = LayerwiseEngine(model, compilation=compilation)
    for seed, size in enumerate((ROWS, ROWS - 1, 1)):
        torch.manual_seed(seed)
        inputs = case.batch(size, case.positions)
        projectors = projectors_for(model, 4)
        for _ in range(2):  # the first pass of all runs without compilation
            losses, gradients = engine(inputs, projectors)
        expected, single = single_sample_gradients(model, inputs, projectors)
        torch.testing.assert_close(losses, expected)
        assert_gradients_equal(gradients, single)
    assert engine._compiled is not None
    assert not engine._compiled.refused
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta-classifier", pytest.param("opt", marks=SLOW)])
def test_gradients_are_exact_after_a_process_group_was_destroyed(name):
    """The tracer then does not see what takes the place of ``functional.embedding``."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    dist.destroy_process_group()
    case = only(name)
    model = case.model()
    inputs, projectors = case.batch(ROWS, case.positions), projectors_for(model, 4)
    engine = LayerwiseEngine(model, compilation=TRACED)
    gradients = engine(inputs, projectors)[1]
    assert_gradients_equal(gradients, single_sample_gradients(model, inputs, projectors)[1])
    assert engine._compiled is not None
    assert not engine._compiled.refused


@pytest.mark.slow
def test_rows_have_the_dropout_that_they_would_have_without():
    case = only("roberta-classifier")
    model = case.model().train()
    inputs, projectors = case.batch(ROWS, case.positions), projectors_for(model, 4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    found = []
    for compilation in (None, TRACED):
        engine = LayerwiseEngine(model, compilation=compilation)
        engine(inputs, projectors)  # which examines the model
        torch.manual_seed(5)
        found.append(engine(inputs, projectors))
    (losses, gradients), (compiled_losses, compiled) = found
    torch.testing.assert_close(compiled_losses, losses)
    assert relative_error(dense(compiled, ROWS), dense(gradients, ROWS)) < 1e-6
    assert graphs() == 1


@SLOW
def test_bfloat16_under_autocast_is_as_exact_as_without():
    case = only("roberta-classifier")
    model = case.model()
    inputs, projectors = case.batch(ROWS, case.positions), projectors_for(model, 4)
    engine = LayerwiseEngine(model, compilation=TRACED)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = engine(inputs, projectors)[1]
        plain = LayerwiseEngine(model)(inputs, projectors)[1]
    assert relative_error(dense(gradients, ROWS), dense(plain, ROWS)) < 1e-3
    assert graphs() == 1


@SLOW
def test_separately_stored_updates_of_16_bit_weights_are_compiled():
    """With P redrawn and updates that change, without being compiled again."""
    case = only("gpt2")
    model = case.model().bfloat16()
    optimizer = ProjectedAdam(model.parameters(), lr=0.02)
    updates = LowRankUpdates(model, optimizer)
    engines = [LayerwiseEngine(model, compilation=own) for own in (TRACED, None)]
    for engine in engines:
        engine.add_branches(updates.branches)
    inputs = case.batch(ROWS, case.positions)
    for seed in range(4):
        torch.manual_seed(seed // 2)
        projectors = projectors_for(model, 4)
        updates.set_projectors(projectors)
        (losses, found), (expected_losses, expected) = (e(inputs, projectors) for e in engines)
        torch.testing.assert_close(losses, expected_losses, rtol=0.02, atol=0.02)
        assert relative_error(dense(found, ROWS), dense(expected, ROWS)) < 0.02
        weights = dict(model.named_parameters())
        optimizer.receive(
            {weights[name]: gradient.dense().values.mean(0) for name, gradient in found.items()},
            {weights[name]: projector for name, projector in projectors.items()},
        )
        optimizer.step()
    assert graphs() == 1


def reads_values(m, x):
    hidden = m.table(x)
    return m.layer(hidden if hidden.sum() > 0 else -hidden)


@pytest.mark.parametrize(
    ("compute", "parts", "reason"),
    [
        (
            lambda m, x: m.own(m.table(x)),
            {"own": Function(lambda m, x: 2 * x * m.scale, scale=torch.ones(6))},
            "own (Function) has no rule",
        ),
        (
            lambda m, x: m.layer(m.table(x) + m.table(x)),
            {"layer": nn.Linear(6, 6)},
            "table (Embedding) runs more than once",
        ),
        (reads_values, {"layer": nn.Linear(6, 6)}, "Function cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_says_so_and_runs_as_exactly(compute, parts, reason, caplog):
    model = Function(compute, table=nn.Embedding(7, 6), **parts)
    inputs = {"x": torch.randint(0, 7, (3, 5))}
    engine = LayerwiseEngine(model, mean_output, compilation=TRACED)
    for _ in range(2):
        gradients = engine(inputs, {})[1]
        expected = single_sample_gradients(model, inputs, {}, loss=mean_output)[1]
        assert_gradients_equal(gradients, expected)
    with caplog.at_level(logging.WARNING):
        assert f"torch_compile=True: {reason}" in caplog.text.replace("the model", "Function")
