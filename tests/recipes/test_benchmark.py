"""Every method runs or says why not, ratios are right, and timers hit the part they are named for.

No time is compared with another here: where time matters, the clock is replaced by a counter.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import release
from dp_grape_hf.optimizers import ProjectedOptimizer
from dp_grape_hf.per_sample import PerSampleEngine, watching
from dp_grape_hf.per_sample import engine as per_sample
from dp_grape_hf.per_sample.layerwise import capture
from dp_grape_hf.phases import Observer
from recipes.benchmark import __main__ as benchmark
from recipes.benchmark import methods as benchmark_methods
from recipes.benchmark import profile as benchmark_profile
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
from recipes.benchmark.models import OPT, ROBERTA, TITLES, VIT, Setting
from recipes.benchmark.profile import OVERHEAD, Clock, profile, profile_table
from recipes.benchmark.timing import (
    SWEEPS,
    Sweep,
    measure,
    measuring_line,
    principal_table,
    ratio,
    sweep_table,
    table,
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
        return folder, benchmark.main(
            [*OPTIONS, f"--json={folder}/x.json", f"--output_dir={folder}"]
        )


# ---- All methods ----


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
    assert record["setting"] == vars(TINY)
    assert json.loads((folder / "x.json").read_text(encoding="utf-8")) == record


def test_the_table_has_a_line_per_method_and_is_kept(run: tuple[Path, dict[str, Any]]) -> None:
    folder, record = run
    text = table(record["results"], TINY)
    assert text.startswith("RoBERTa classifier, hidden 32, 1 layers, vocabulary 50, B=3, T=4, r=2")
    assert all(
        sum(line.startswith(METHODS[name].title) for line in text.splitlines()) for name in USUAL
    )
    kept = (folder / "tables.txt").read_text(encoding="utf-8")
    assert kept == f"{text}\n{measuring_line(record)}\n"


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


@pytest.mark.parametrize("model", [OPT, VIT])
def test_our_methods_run_on_every_model(model: str) -> None:
    ours = [name for name in USUAL if METHODS[name].opacus is None]
    results = measure(replace(TINY, model=model), ours, rounds=1, warmup=1, device=CPU)
    assert all(len(result["rounds"]) == 1 for result in results.values()), results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing the compiler
def test_plain_training_is_compiled_where_that_is_asked_for() -> None:
    from torch._dynamo.utils import counters  # not above: it takes seconds

    counters.clear()
    results = measure(TINY, ["adamw", "adamw_compiled"], rounds=1, warmup=1, device=CPU)
    assert counters["stats"]["unique_graphs"] > 0
    assert len(results[METHODS["adamw_compiled"].title]["seconds"]) == 1


def test_what_opacus_cannot_do_is_in_the_table_and_ends_nothing() -> None:
    setting = replace(TINY, model=OPT)
    results = measure(setting, ["adamw", "opacus_hooks"], rounds=1, warmup=1, device=CPU)
    hooks = METHODS["opacus_hooks"].title
    assert "'int' object has no attribute 'detach'" in results[hooks]["error"]
    text = table(results, setting)
    assert "does not run" in text
    assert results[hooks]["error"] in text
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
    assert "10.00x (10.00x)" in table(results, TINY)
    assert "a note" in table(results, TINY)


def test_a_ratio_is_of_rounds_that_both_took_part_in() -> None:
    slow = {"rounds": [0, 2], "seconds": [8.0, 20.0]}
    fast = {"rounds": [0, 1, 2], "seconds": [2.0, 100.0, 4.0]}
    assert ratio(slow, fast) == 4.5
    assert ratio(slow, {"rounds": [1], "seconds": [1.0]}) is None


# ---- Sweeps ----


def test_a_sweep_has_a_line_per_value_and_a_plot(tmp_path: Path) -> None:
    record = benchmark.main(
        [
            *(*OPTIONS, "--rounds=1", "--sweep=rank", "--values", "1", "3"),
            *("--methods", "adamw", "dp_grape", "--output_dir", str(tmp_path)),
        ]
    )
    runs = record["sweeps"]["rank"]
    assert [r["setting"]["rank"] for r in runs] == [1, 3]
    assert all(set(r["results"]) == {PLAIN, OURS} for r in runs)
    lines = sweep_table("rank", runs).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "3"]
    assert "B=3" in lines[0]
    assert "r=" not in lines[0]
    assert (tmp_path / "sweep_rank.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_says_what_does_not_run() -> None:
    error = {"error": "out of memory"}
    runs = [{"setting": vars(TINY), "results": {PLAIN: error}}]
    assert f"{PLAIN} does not run at rank=2: out of memory" in sweep_table("rank", runs)


@pytest.mark.parametrize("model", TITLES)
def test_every_swept_length_fits_every_model(model: str) -> None:
    assert all(replace(TINY, model=model, length=length) for length in SWEEPS["length"].values)


def test_images_need_a_square_number_of_patches() -> None:
    with pytest.raises(ValueError, match="length=50 is the number of patches"):
        replace(TINY, model=VIT, length=50)


def test_values_without_a_sweep_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--values", "3"])
    assert "--sweep" in capsys.readouterr().err


# ---- The profile ----


def test_a_phase_does_not_count_what_runs_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch, benchmark_profile)
    clock = Clock(CPU)
    with clock.phase("outer"):
        counter.time += 1
        with clock.phase("inner"):
            counter.time += 10
            with clock.phase("outer"):  # the same phase, deeper
                counter.time += 100
        counter.time += 1000
    seconds, cpu_seconds = clock.take()
    assert seconds == {"outer": 1101, "inner": 10}
    assert cpu_seconds == {"outer": 2202, "inner": 20}
    assert clock.take() == ({}, {})


@pytest.mark.parametrize(
    ("owner", "name", "phase"),
    [
        (per_sample, "split", benchmark_profile.FORWARD),
        (torch.autograd, "grad", benchmark_profile.BACKWARD),
        (capture, "_project", benchmark_profile.PROJECTION),
        (release, "add_clipped_sum_", benchmark_profile.CLIP),
        (release, "add_noise_", benchmark_profile.NOISE),
        (Ledger, "record", benchmark_profile.RECORD),
        (ProjectedOptimizer, "step", benchmark_profile.UPDATE),
        (release, "refusing_changed_weights", benchmark_profile.REST),
    ],
)
def test_the_time_of_a_part_goes_to_its_phase(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, phase: str
) -> None:
    monkeypatch.setattr(watching, "SHARE", 0)  # of a pass that is watched, half is no phase
    counter, original = Counter(monkeypatch, benchmark_profile), getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        others = owner is capture and args[1] is None  # a gradient that is not projected
        counter.time += 0.0 if others else 1.0
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    found = profile(TINY, rounds=1, warmup=1, device=CPU)["private"]
    assert found["percent"][phase] == pytest.approx(100.0)
    assert found["cpu_percent"][phase] == pytest.approx(100.0)
    assert found["overhead_percent"] == pytest.approx(100.0 if phase in OVERHEAD else 0.0)


def test_a_profile_accounts_for_the_whole_step_and_leaves_no_timer_behind() -> None:
    found = profile(TINY, rounds=2, warmup=1, device=CPU)
    assert type(PerSampleEngine.observer) is Observer
    for parts in found.values():
        assert sum(parts["percent"].values()) == pytest.approx(100.0)
        assert parts["untimed_step_seconds"] > 0
    private = found["private"]["seconds"]
    assert set(private) == set(benchmark_profile.PRIVATE_PHASES)
    assert all(seconds > 0 for seconds in private.values())
    text = profile_table(found, TINY)
    assert all(text.count(f"  {phase} ") for phase in (*private, *found["plain"]["seconds"]))
    assert f"{found['private']['overhead_percent']:.1f} % of the step" in text


# ---- The standard set ----


@pytest.mark.slow
def test_the_standard_set_covers_every_model_and_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = benchmark.STANDARD
    assert {setting.model for setting, _ in plan.settings} == set(TITLES)
    tiny = replace(
        plan,
        settings=((TINY, 1),),
        profiles=(TINY,),
        swept=TINY,
        swept_methods=("dp_grape",),
        swept_rounds=1,
        profile_rounds=1,
    )
    for quantity, sweep in SWEEPS.items():
        short = Sweep(sweep.field, sweep.label, sweep.values[:1])
        monkeypatch.setitem(SWEEPS, quantity, short)
    record = benchmark.run_all(tiny, ["adamw", "dp_grape"], 1, CPU, tmp_path)
    assert [set(r["results"]) for r in record["runs"]] == [{PLAIN, OURS}]
    assert len(record["profiles"]) == 1
    assert list(record["sweeps"]) == list(SWEEPS)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tables.txt",
        *(f"sweep_{quantity}.png" for quantity in SWEEPS),
    }
    json.dumps(record)


def test_adapters_are_measured_and_opake_where_it_is_installed() -> None:
    results = measure(TINY, ["adamw", *LORA, OPAKE], rounds=1, warmup=1, device=CPU)
    others = [METHODS[name].title for name in (OPAKE_LORA, OPAKE)]
    assert all("rounds" in result for title, result in results.items() if title not in others)
    installed = importlib.util.find_spec("opake") is not None
    for title in others:
        assert "rounds" in results[title] if installed else "'opake'" in results[title]["error"]
