"""Every method runs or says why not, ratios are right, and timers hit the part they are named for.

No time is compared with another here: where time matters, the clock is replaced by a counter.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from recipes.benchmark import (
    __main__ as benchmark,
    kernels,
    methods as benchmark_methods,
    timing as benchmark_timing,
)
from recipes.benchmark.methods import METHODS, OPACUS, USUAL, OpacusTraining
from recipes.benchmark.models import OPT, ROBERTA, VIT, Setting
from recipes.benchmark.timing import as_markdown, measure, ratio, remarks
from tests.models.matrix import own_gradients

CPU = torch.device("cpu")
TINY = Setting(hidden_size=32, layers=1, vocab_size=50, batch_size=3, length=4, rank=2, heads=2)
OPTIONS = [
    *("--hidden_size=32", "--layers=1", "--vocab_size=50", "--batch_size=3", "--length=4"),
    *("--rank=2", "--heads=2", "--rounds=3", "--warmup=1"),
]
PLAIN, OURS = METHODS["adamw"].title, METHODS["dp_grape"].title


@pytest.mark.slow
def test_every_method_runs_and_is_compared_with_plain_adamw(tmp_path):
    record = benchmark.main([*OPTIONS, f"--json={tmp_path}/x.json"])
    results = record["results"]
    assert list(results) == [METHODS[name].title for name in USUAL]
    for title, result in results.items():
        assert "error" not in result, (title, result)
        assert len(result["rounds"]) == len(result["seconds"]) == len(result["cpu_seconds"]) >= 1
        assert min(result["seconds"]) > 0
        assert result["speed_of_plain_adamw"] == ratio(results[PLAIN], result)
    assert results[PLAIN]["speed_of_plain_adamw"] == 1.0
    table = as_markdown([record]).splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == list(results)
    assert record["setting"] == vars(TINY)
    assert json.loads((tmp_path / "x.json").read_text()) == record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "methods"),
    [
        (VIT, [name for name in USUAL if name not in OPACUS]),
        (ROBERTA, ["adamw", "adamw_lora", "dp_lora", "dp_grape_correlated"]),
    ],
)
def test_our_methods_run_on_images_adapters_and_correlated_noise(model, methods):
    results = measure(replace(TINY, model=model), methods, rounds=1, warmup=1, device=CPU)
    assert all(len(result["rounds"]) == 1 for result in results.values()), results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_compiled", "dp_grape_compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing the compiler
def test_training_is_compiled_where_that_is_asked_for(name, monkeypatch):
    from torch._dynamo.utils import counters  # not above: it takes seconds

    compiled = METHODS[name]
    quick = partial(compiled.make, torch_compile_backend="aot_eager")
    monkeypatch.setitem(benchmark_methods.METHODS, name, replace(compiled, make=quick))
    counters.clear()
    results = measure(TINY, ["adamw", name], rounds=1, warmup=1, device=CPU)
    assert counters["stats"]["unique_graphs"] > 0
    assert len(results[compiled.title]["seconds"]) == 1


def test_a_failure_of_opacus_is_reported_and_ends_nothing():
    setting = replace(TINY, model=OPT)
    results = measure(setting, ["adamw", "opacus_hooks"], rounds=1, warmup=1, device=CPU)
    hooks = METHODS["opacus_hooks"].title
    assert "'int' object has no attribute 'detach'" in results[hooks]["error"]
    assert f"{hooks} does not run: {results[hooks]['error']}" in remarks(results)
    assert hooks not in as_markdown([{"setting": vars(setting), "results": results}])
    assert "rounds" in results[PLAIN]


@pytest.mark.parametrize("model", [ROBERTA, VIT])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_opacus_computes_the_clipped_sum_of_the_definition(model, mode):
    """Clipped to half of the smallest norm, so that a wrong norm shows."""
    setting = replace(TINY, model=model)
    built, batch = setting.build(), setting.inputs()
    _, gradients = own_gradients(built, batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)  # (B,)
    bound = norms.min().item() / 2
    expected = torch.cat([(bound / norms) @ g.flatten(1) for g in gradients.values()])
    training = OpacusTraining(mode, built, setting, batch, None, 0.0, bound)
    found = []

    def look(optimizer, *args):
        found.extend(p.grad.flatten() for group in optimizer.param_groups for p in group["params"])

    training.adamw.register_step_pre_hook(look)
    training.step()
    torch.testing.assert_close(
        setting.batch_size * torch.cat(found), expected, rtol=1e-4, atol=1e-6
    )


class Counter:
    def __init__(self, monkeypatch, module):
        self.time = 0.0
        monkeypatch.setattr(module, "now", lambda device: (self.time, 2 * self.time))

    def step(self, seconds):
        def step():
            self.time += seconds

        return step


def test_every_method_runs_every_round_and_ratios_use_common_rounds(monkeypatch):
    counter = Counter(monkeypatch, benchmark_timing)
    steps = {"adamw": counter.step(1.0), "dp_grape": counter.step(0.5)}
    steps["opacus_ghost"] = counter.step(5.0)
    monkeypatch.setattr(benchmark_timing, "prepare", lambda name, *rest: steps[name])
    results = measure(TINY, list(steps), rounds=6, warmup=1, device=CPU)
    ghost = results[METHODS["opacus_ghost"].title]
    assert results[OURS]["rounds"] == [0, 1, 2, 3, 4, 5]
    assert ghost["rounds"] == [0, 1, 2, 3, 4, 5]
    assert results[OURS]["speed_of_plain_adamw"] == pytest.approx(2.0)
    assert ghost["speed_of_plain_adamw"] == pytest.approx(0.2)
    assert ghost["median_cpu_seconds"] == pytest.approx(10.0)
    assert ratio(ghost, results[OURS]) == pytest.approx(10.0)
    some = {"rounds": [1, 3], "seconds": [2.0, 4.0]}  # as committed results of slow methods have
    assert ratio(some, results[OURS]) == pytest.approx(6.0)
    lines = as_markdown([{"setting": vars(TINY), "results": results}]).splitlines()
    assert lines[2].endswith("| 1.00x (1.00x) | 2.00 times as fast (2.00) |")
    assert lines[4].endswith("| 0.20x (0.20x) | 10.00 times as fast (10.00) |")


def test_images_need_a_square_number_of_patches():
    with pytest.raises(ValueError, match="length=50 is the number of patches"):
        replace(TINY, model=VIT, length=50)


@pytest.mark.slow
def test_kernels_are_counted_for_each_method(monkeypatch, tmp_path, capsys):
    """A layer more has kernels more, and its examples do not change their number."""
    tiny = Setting(hidden_size=32, layers=1, batch_size=4, length=8, vocab_size=50, rank=2)
    models = {
        "tiny": (tiny, False),
        "more examples": (replace(tiny, batch_size=8), False),
        "deeper": (replace(tiny, layers=2), False),
        "16 bits": (replace(tiny, dtype="bfloat16"), False),
        "autocast": (tiny, True),
    }
    monkeypatch.setattr(kernels, "MODELS", models)
    found = kernels.main(["--json", str(tmp_path / "kernels.json")])
    assert json.loads((tmp_path / "kernels.json").read_text()) == found
    for method in ("adamw", "dp_grape"):
        assert found["more examples"][method] == found["tiny"][method]
        assert found["deeper"][method] > found["tiny"][method]
    assert found["16 bits"]["adamw"] == found["tiny"]["adamw"] < found["autocast"]["adamw"]
    ratio_of = {name: own["dp_grape"] / own["adamw"] for name, own in found.items()}
    assert ratio_of["autocast"] < ratio_of["tiny"] < ratio_of["16 bits"]
    assert f"| {ratio_of['tiny']:.2f} |" in capsys.readouterr().out
