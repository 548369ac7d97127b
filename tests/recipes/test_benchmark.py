"""Every method runs or says why not, ratios are right, and timers hit the part they are named for.

No time is compared with another here: where time matters, the clock is replaced by a counter.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.benchmark import __main__ as benchmark
from recipes.benchmark import kernels
from recipes.benchmark import methods as benchmark_methods
from recipes.benchmark import timing as benchmark_timing
from recipes.benchmark.methods import (
    LORA,
    METHODS,
    OPAKE,
    OPAKE_LORA,
    USUAL,
    DoesNotRun,
    Prepared,
    opacus_error,
    prepare,
)
from recipes.benchmark.models import OPT, ROBERTA, VIT, Setting
from recipes.benchmark.timing import (
    as_markdown,
    measure,
    measuring_line,
    principal_table,
    ratio,
    remarks,
)

CPU = torch.device("cpu")
TINY = Setting(hidden_size=32, layers=1, vocab_size=50, batch_size=3, length=4, rank=2, heads=2)
OPTIONS = [
    *("--hidden_size=32", "--layers=1", "--vocab_size=50", "--batch_size=3", "--length=4"),
    *("--rank=2", "--heads=2", "--rounds=3", "--warmup=1"),
]
PLAIN, OURS = METHODS["adamw"].title, METHODS["dp_grape"].title


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the record of one run with all methods."""
    folder = tmp_path_factory.mktemp("benchmark")
    with torch.random.fork_rng(devices=[]):
        return folder, benchmark.main([*OPTIONS, f"--json={folder}/x.json"])


# ---- All methods ----


@pytest.mark.slow
def test_every_method_runs_and_is_compared_with_plain_adamw(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, record = run
    results = record["results"]
    assert list(results) == [METHODS[name].title for name in USUAL]
    for title, result in results.items():
        assert "error" not in result, (title, result)
        assert "note" not in result, (title, result)
        assert len(result["rounds"]) == len(result["seconds"]) == len(result["cpu_seconds"]) >= 1
        assert min(result["seconds"]) > 0
        assert result["speed_of_plain_adamw"] == ratio(results[PLAIN], result)
    assert results[PLAIN]["speed_of_plain_adamw"] == 1.0
    table = as_markdown(results).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {title}" for title in results]
    assert record["setting"] == vars(TINY)
    assert json.loads((folder / "x.json").read_text(encoding="utf-8")) == record


def test_measuring_principal_directions_is_a_share_of_a_thousand_steps() -> None:
    names = ("adamw", "dp_grape", "dp_grape_principal")
    steps = {
        METHODS[name].title: {
            **{"median_seconds": 0.5, "median_cpu_seconds": cpu},
            **{"rounds": [0], "cpu_seconds": [cpu]},
        }
        for name, cpu in zip(names, (3.0, 2.0, 1.0), strict=True)
    }
    measured = {"seconds": 10.0, "cpu_seconds": 12.0}
    record = {"setting": vars(TINY), "results": steps, "measuring": measured}
    assert "in 10.0 s (12.0 s), 2.0% (1.2%) of" in measuring_line(record)
    last = principal_table([record]).splitlines()[-1]
    assert last.endswith("| 3.00 s (1.00x) | 2.00 s (1.50x) | 1.00 s (3.00x) | 12.0 s | 1.2% |")


@pytest.mark.slow
def test_our_methods_run_on_images() -> None:
    ours = [name for name in USUAL if METHODS[name].opacus is None]
    results = measure(replace(TINY, model=VIT), ours, rounds=1, warmup=1, device=CPU)
    assert all(len(result["rounds"]) == 1 for result in results.values()), results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_compiled", "dp_grape_compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing the compiler
def test_training_is_compiled_where_that_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler that takes seconds."""
    from torch._dynamo.utils import counters  # not above: it takes seconds

    compiled = METHODS[name]
    quick = partial(compiled.make, torch_compile_backend="aot_eager")
    monkeypatch.setitem(benchmark_methods.METHODS, name, replace(compiled, make=quick))
    counters.clear()
    results = measure(TINY, ["adamw", name], rounds=1, warmup=1, device=CPU)
    assert counters["stats"]["unique_graphs"] > 0
    assert len(results[compiled.title]["seconds"]) == 1


def test_what_opacus_cannot_do_is_in_the_table_and_ends_nothing() -> None:
    setting = replace(TINY, model=OPT)
    results = measure(setting, ["adamw", "opacus_hooks"], rounds=1, warmup=1, device=CPU)
    hooks = METHODS["opacus_hooks"].title
    assert "'int' object has no attribute 'detach'" in results[hooks]["error"]
    assert f"{hooks} does not run: {results[hooks]['error']}" in remarks(results)
    assert hooks not in as_markdown(results)
    assert "rounds" in results[PLAIN]


# ---- Opacus is compared with the definition ----


@pytest.mark.parametrize("model", [ROBERTA, VIT])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_opacus_computes_the_clipped_sum_of_the_definition(model: str, mode: str) -> None:
    assert opacus_error(mode, replace(TINY, model=model)) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_result_of_opacus_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from opacus.grad_sample import GradSampleModule

    samplers = GradSampleModule.GRAD_SAMPLERS
    right = samplers[nn.Linear]

    def wrong(layer: Any, activations: Any, backprops: Tensor) -> Any:
        return {p: 1.5 * g for p, g in right(layer, activations, backprops).items()}

    monkeypatch.setitem(samplers, nn.Linear, wrong)
    ready = prepare("opacus_hooks", TINY.build(), TINY, TINY.inputs(), tmp_path)
    assert "not the definition's" in ready.note


def test_per_sample_gradients_that_do_not_fit_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark_methods, "opacus_error", lambda mode, setting: 0.0)
    memory = SimpleNamespace(available=2**10)
    monkeypatch.setattr(benchmark_methods.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(DoesNotRun, match="do not fit"):
        prepare("opacus_hooks", TINY.build(), TINY, TINY.inputs(), tmp_path)


# ---- Rounds and ratios ----


class Counter:
    """A clock that goes on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.time = 0.0
        monkeypatch.setattr(module, "now", lambda device: (self.time, 2 * self.time))

    def step(self, seconds: float) -> Callable[[], None]:
        def step() -> None:
            self.time += seconds

        return step


def test_a_slow_method_takes_part_in_fewer_rounds_and_ratios_are_of_common_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Counter(monkeypatch, benchmark_timing)
    steps = {"adamw": counter.step(1.0), "dp_grape": counter.step(0.5)}
    steps["opacus_ghost"] = counter.step(5.0)
    monkeypatch.setattr(
        benchmark_timing, "prepare", lambda name, *rest: Prepared(steps[name], "a note")
    )
    results = measure(TINY, list(steps), rounds=6, warmup=1, device=CPU)
    ghost = results[METHODS["opacus_ghost"].title]
    assert results[OURS]["rounds"] == [0, 1, 2, 3, 4, 5]
    assert ghost["rounds"] == [0, 2, 4]
    assert results[OURS]["speed_of_plain_adamw"] == pytest.approx(2.0)
    assert ghost["speed_of_plain_adamw"] == pytest.approx(0.2)
    assert ghost["median_cpu_seconds"] == pytest.approx(10.0)
    assert ratio(ghost, results[OURS]) == pytest.approx(10.0)
    assert "10.00x faster (10.00x)" in as_markdown(results)
    assert "a note" in remarks(results)


def test_images_need_a_square_number_of_patches() -> None:
    with pytest.raises(ValueError, match="length=50 is the number of patches"):
        replace(TINY, model=VIT, length=50)


@pytest.mark.slow
def test_adapters_are_measured_and_opake_where_it_is_installed() -> None:
    results = measure(TINY, ["adamw", *LORA, OPAKE], rounds=1, warmup=1, device=CPU)
    others = [METHODS[name].title for name in (OPAKE_LORA, OPAKE)]
    assert all("rounds" in result for title, result in results.items() if title not in others)
    installed = importlib.util.find_spec("opake") is not None
    for title in others:
        assert "rounds" in results[title] if installed else "'opake'" in results[title]["error"]


def test_kernels_are_counted_for_each_method(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
