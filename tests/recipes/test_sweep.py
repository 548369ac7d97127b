"""Sweeps choose on the dev split, go on where they stopped, and say what the choice cost."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from recipes.common.provenance import recorded
from recipes.paper import opt, roberta, sweep, vit
from recipes.paper.experiment import CONFIGS, ExperimentArguments, Family, main, parse
from recipes.paper.sweep import Experiments
from tests.support.images import SMALL, both_splits, write_mnist

CONFIG = {
    "recipe": "toy",
    "arguments": {"max_steps": 3},
    "tasks": {"points": {"dataset_path": "data/points"}},
    "search": {"epsilon": 6, "seed": 100, "arguments": {"curve_steps": 5}},
    "final": {"epsilons": [2, 6], "seeds": [13, 21]},
    "rows": {
        "DP-GRAPE": {"arguments": {"method": "dp_grape"}, "grid": {"learning_rate": [0.1, 0.3]}},
        "Adam": {"arguments": {"method": "adam", "learning_rate": 0.5}},
    },
}
OFFSETS = {"dev": 0, "test": 50}
PRESET = {"model_name_or_path": "none", "target_delta": 1e-3, "max_grad_norm": 1.0}


class Runs:
    """Stands for the processes: a score is 10 times the rate plus a thousandth of the seed."""

    def __init__(self):
        self.family = Family("toy", ExperimentArguments, ("points",), load=None)
        self.commands = []
        self.fail = ""

    def __call__(self, command, **kwargs):
        assert command[1:3] == ["-m", "recipes.paper.toy"]
        words = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
        self.commands.append(words)
        if words["learning_rate"] == self.fail:
            return subprocess.CompletedProcess(command, 1)
        script, args = parse(self.family, [*command[3:], "--use_cpu=True"])
        score = 10 * args.learning_rate + args.seed / 1000
        result = {
            "script": {k: v for k, v in asdict(script).items() if k != "result_dir"},
            "settings": recorded(args),
            "metrics": {
                words["scored_splits"]: {"accuracy": score + OFFSETS[words["scored_splits"]]}
            },
        }
        Path(words["result_dir"], "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def runs(monkeypatch):
    runs = Runs()
    monkeypatch.setattr(subprocess, "run", runs)
    monkeypatch.setitem(sys.modules, "recipes.paper.toy", SimpleNamespace(FAMILY=runs.family))
    return runs


def run(folder, config=CONFIG, **preset):
    """Runs a sweep, whose preset may be another than that of the time before."""
    path, of_runs = folder / "sweep.yaml", folder / "preset.yaml"
    of_runs.write_text(yaml.safe_dump({"arguments": PRESET | preset}))
    config = config | {"arguments": config["arguments"] | {"config": str(of_runs)}}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return sweep.main(["--config", str(path), "--output_dir", str(folder / "out")])


def strict(path):
    def refuse(word):
        raise AssertionError(f"{word} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_best_dev_setting_is_run_with_every_budget(tmp_path, runs, capsys):
    assert run(tmp_path) == 0
    search, final = runs.commands[:2], runs.commands[2:]
    assert [c["learning_rate"] for c in search] == ["0.1", "0.3"]
    assert {(c["target_epsilon"], c["seed"]) for c in search} == {("6", "100")}
    assert ["curve_steps" in c for c in runs.commands] == [True] * 2 + [False] * 6
    assert {c["dataset_path"] for c in runs.commands} == {"data/points"}
    assert [c["scored_splits"] for c in runs.commands] == ["dev"] * 2 + ["test"] * 6
    private = [c for c in final if c["method"] == "dp_grape"]
    assert {(c["target_epsilon"], c["seed"]) for c in private} == {
        *(("2", "13"), ("2", "21"), ("6", "13"), ("6", "21"))
    }
    assert {(c["learning_rate"], c["selection_runs"]) for c in private} == {("0.3", "2")}
    plain = [c for c in final if c["method"] == "adam"]
    assert [c["seed"] for c in plain] == ["13", "21"]
    assert not any("target_epsilon" in c for c in plain)
    record = strict(tmp_path / "out" / "sweep.json")
    row = record["tasks"]["points"]["DP-GRAPE"]
    assert row["search_runs"] == 2
    assert row["scores"]["2"] == pytest.approx([53.017, 0.004, 2])  # 53.013 and 53.021
    text = capsys.readouterr().out
    assert "| Method | ε = 2 | ε = 6 | ε = ∞ | search, dev, at ε = 6 |" in text
    assert "| DP-GRAPE | 53.0 ± 0.0 [2] |" in text
    assert "| Adam |  |  | 55.0 ± 0.0 [2] |" in text
    assert "from 2 runs" in text


def test_the_search_is_shown_and_nothing_that_was_not_run(tmp_path, runs, capsys):
    runs.fail = "0.3"
    run(tmp_path, CONFIG | {"final": {"epsilons": [2], "seeds": []}})
    assert capsys.readouterr().out.splitlines() == [
        "| Method | Settings | points |",
        "|---|---|---|",
        "| DP-GRAPE | learning_rate = 0.1 | 1.1 |",
        "| DP-GRAPE | learning_rate = 0.3 | not run |",
        "",
        "The search: dev score at ε = 6 (if private), seed 100.",
    ]


def test_half_a_line_is_ignored_and_its_run_repeated(tmp_path, runs):
    run(tmp_path)
    path = tmp_path / "out" / "runs.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    (left,) = (tmp_path / "out").glob("points/adam/*-seed21-*")
    (left / "result.json").write_text("of the run that crashed")
    last = runs.commands[-1]
    runs.commands.clear()
    with pytest.warns(UserWarning, match=r"runs\.jsonl ends with an incomplete line"):
        assert run(tmp_path) == 0
    assert [command["seed"] for command in runs.commands] == [last["seed"]]
    assert path.read_text() == whole
    runs.commands.clear()
    run(tmp_path, CONFIG | {"arguments": CONFIG["arguments"] | {"max_steps": 4}})
    assert len(runs.commands) == 8, "with other settings, all are run"
    path.write_text(whole.replace("{", "", 1))
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1, is not JSON"):
        run(tmp_path)


def test_a_run_that_fails_is_named_and_tried_again(tmp_path, runs, capsys):
    runs.fail = "0.3"
    assert run(tmp_path) == 1
    assert "failed: see" in capsys.readouterr().err
    assert {c["learning_rate"] for c in runs.commands[2:] if c["method"] == "dp_grape"} == {"0.1"}
    runs.fail = ""
    assert run(tmp_path) == 0


def test_one_run_has_no_error_and_that_is_json(tmp_path, runs, capsys):
    run(tmp_path, CONFIG | {"final": {"epsilons": [2], "seeds": [13]}})
    row = strict(tmp_path / "out" / "sweep.json")["tasks"]["points"]["DP-GRAPE"]
    assert row["scores"]["2"] == [pytest.approx(53.013), None, 1]
    assert "| DP-GRAPE | 53.0 [1] |" in capsys.readouterr().out


def test_a_row_may_have_settings_of_search_and_task(tmp_path, runs, capsys):
    row, other = CONFIG["rows"]["DP-GRAPE"], CONFIG["rows"]["Adam"]
    row, other = row | {"search": {"max_steps": 2}}, other | {"tasks": {"points": {"max_steps": 1}}}
    run(tmp_path, CONFIG | {"rows": {"DP-GRAPE": row, "Adam": other}})
    steps = [(c["max_steps"], c["seed"]) for c in runs.commands]
    expected = [("2", "100")] * 2 + [("3", "13"), ("3", "21")] * 2 + [("1", "13"), ("1", "21")]
    assert steps == expected
    assert "seed 100. DP-GRAPE was searched with max_steps = 2.\n" in capsys.readouterr().out


def with_grid(*rates):
    rows = CONFIG["rows"] | {
        "DP-GRAPE": CONFIG["rows"]["DP-GRAPE"] | {"grid": {"learning_rate": [*rates]}}
    }
    return CONFIG | {"rows": rows}


def test_runs_of_a_changed_grid_count_as_seen(tmp_path, runs, capsys):
    run(tmp_path)
    runs.commands.clear()
    run(tmp_path, with_grid(0.3, 0.7))
    assert [c["learning_rate"] for c in runs.commands] == ["0.7"] * 5
    assert [c["selection_runs"] for c in runs.commands] == ["0"] + ["3"] * 4
    assert "from 3 runs" in capsys.readouterr().out
    record = strict(tmp_path / "out" / "sweep.json")
    assert record["tasks"]["points"]["DP-GRAPE"]["search_runs"] == 3
    assert record["tasks"]["points"]["Adam"]["search_runs"] == 0
    runs.commands.clear()
    assert run(tmp_path, with_grid(0.1, 0.3)) == 0  # what is there says what it cost then
    assert runs.commands == []


def test_results_of_a_changed_preset_are_not_mixed_in(tmp_path, runs):
    assert run(tmp_path) == 0
    files = sorted((tmp_path / "out").rglob("*.*"))
    runs.commands.clear()
    with pytest.raises(ValueError, match="made with different settings") as error:
        run(tmp_path, max_grad_norm=2.0)
    lines = str(error.value).splitlines()
    wrong = [line for line in lines if line.startswith("  ")]
    assert len(wrong) == 6  # a budget has a bound; without privacy there is none
    assert all(line.endswith(": max_grad_norm was 1.0 and is 2.0 now") for line in wrong)
    assert all("dp-grape" in line for line in wrong)
    assert "another --output_dir" in lines[-1]
    assert sorted((tmp_path / "out").rglob("*.*")) == files
    assert runs.commands == []
    path = tmp_path / "out" / "runs.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"row": "Adam"' in line]
    path.write_text("\n".join([*kept, ""]))
    assert run(tmp_path, max_grad_norm=2.0) == 0
    assert len(runs.commands) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["points"], "task": 1}, "has the parts"),
        ({"tasks": ["points"]}, r"tasks=\['points'\] must map names"),
        ({"rows": {"A": {"arguments": {"method": "adamw"}}}}, "method='adamw' of row 'A'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, CONFIG | change)


FAMILIES = {family.name: family for family in (roberta.FAMILY, opt.FAMILY, vit.FAMILY)}
FILES = sorted(CONFIGS.parents[1].glob("*/configs/sweeps/*.yaml"))
PUBLISHED = {
    "roberta": {"max_grad_norm": [0.1, 0.5, 1, 5, 10, 20]},
    "roberta_rank": {"max_grad_norm": [0.1, 0.5, 1, 5, 20]},
    "roberta_grid": {
        **{"learning_rate": [1e-4, 5e-4, 1e-3, 5e-3], "max_grad_norm": [0.1, 1, 10, 100]},
        **{"projection_rank": [4, 16, 64], "projection_update_steps": [10, 100, 1000]},
        "max_steps": [50, 200, 400, 700, 1000],
    },
    "opt": {"max_grad_norm": [0.1, 1, 5, 20]},
    "vit": {"max_grad_norm": [0.1, 1.0, 10.0], "learning_rate": [1e-4, 5e-4, 1e-3, 5e-3]},
    "vit_fine_tune": {"max_grad_norm": [0.1, 1.0, 10.0], "learning_rate": [1e-5, 5e-5, 1e-4, 5e-4]},
}
"""The authors' grids, by sweep."""
OF_IMAGES = {"epsilon": 2, "seed": 42, "arguments": {"held_out": True}}
BUDGETS = {
    "roberta": ({"epsilon": 6, "seed": 100}, {"epsilons": [2, 6], "seeds": [13, 21, 42]}),
    "roberta_grid": ({"epsilon": 6, "seed": 100}, {"epsilons": [6], "seeds": []}),
    "opt": ({"epsilon": 6, "seed": 0}, {"epsilons": [2, 6], "seeds": [0, 29, 83]}),
    "vit": (OF_IMAGES, {"epsilons": [1, 2, 4, 8], "seeds": [42]}),
}
"""Their budgets and seeds, of the search and of the final runs: by sweep, or else by recipe."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_paper_s_searches_are_as_published(name):
    config = sweep.read(CONFIGS / "sweeps" / f"{name}.yaml")
    private = [row for row in config["rows"].values() if row["arguments"]["method"] == "dp_grape"]
    assert private
    assert all(row["grid"] == PUBLISHED[name] for row in private)
    expected = BUDGETS.get(name, BUDGETS[config["recipe"]])
    assert (config["search"], config["final"]) == expected
    of_images = {"held_out": False} if config["recipe"] == "vit" else {}
    assert config["arguments"] == {"config": "reference_code"} | of_images


def test_ranks_and_sizes_are_those_of_the_paper():
    rows = sweep.read(CONFIGS / "sweeps" / "roberta_rank.yaml")["rows"]
    ranks = [row["arguments"]["projection_rank"] for row in rows.values()]
    assert ranks == [4, 8, 32, 64, 128, 256]  # 16 is in roberta.yaml
    assert [*rows] == [f"r = {rank}" for rank in ranks]
    rows = sweep.read(CONFIGS / "sweeps" / "opt.yaml")["rows"]
    for name, row in rows.items():
        size = name.rpartition(", ")[2].lower()
        assert row["arguments"]["model_name_or_path"] == f"facebook/opt-{size}"
    assert "DP-Adam, 6.7B" not in rows  # out of memory in the paper


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_of_a_file_has_settings_that_exist(path, tmp_path, monkeypatch):
    config = sweep.read(path)
    family = FAMILIES[config["recipe"]]
    assert {own.get("task", name) for name, own in config["tasks"].items()} <= set(family.tasks)
    assert config["search"].keys() <= {"epsilon", "seed", "arguments"}
    assert all(isinstance(seed, int) for seed in config["final"]["seeds"])
    config["final"] = {"epsilons": config["final"]["epsilons"][:1], "seeds": [13]}
    plan = Experiments(config, tmp_path)
    first = {name: next(plan.grid(name), {}) for name in config["rows"]}
    monkeypatch.setattr(plan, "chosen", lambda name, task: (first[name], 1))
    last = {(cell.row, cell.task): cell for cell in plan.search()}
    cells = [*last.values(), *plan.final()]
    assert {(cell.row, cell.task) for cell in cells} == {
        (row, task) for row in config["rows"] for task in config["tasks"]
    }
    for cell in cells:
        script, args = parse(family, [*plan.command(cell)[3:], "--use_cpu=True"])
        chosen = dict(cell.settings)
        assert script.task == chosen.get("task", cell.task)
        assert (args.seed, args.target_epsilon) == (cell.seed, cell.epsilon)
        assert args.method == config["rows"][cell.row]["arguments"]["method"]
        for option in config["rows"][cell.row].get("grid") or {}:
            assert getattr(args, option) == chosen[option]


def test_a_sweep_that_was_interrupted_goes_on_where_it_stopped(tmp_path, monkeypatch):
    write_mnist(tmp_path, both_splits((8, 8), counts=(40, 20)))
    of_the_row = ("noise_multiplier", "learning_rate")
    tiny = {option: value for option, value in SMALL.items() if option not in of_the_row}
    config = {
        "recipe": "vit",
        "arguments": {**tiny, "config": "paper", "max_steps": 1, "curve_steps": 0},
        "tasks": {"MNIST": {"dataset_path": str(tmp_path)}},
        "search": {"epsilon": 6, "seed": 100, "arguments": {"held_out": True}},
        "final": {"epsilons": [8], "seeds": [13]},
        "rows": {
            "DP-GRAPE": {"arguments": {"method": "dp_grape"}, "grid": {"learning_rate": [1e-2]}}
        },
    }
    path, out = tmp_path / "sweep.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    words = ["--config", str(path), "--output_dir", str(out)]
    start, started = subprocess.run, []

    def interrupted(command, **kwargs):
        if command[1:3] != ["-m", "recipes.paper.vit"]:  # but git, which is asked for the commit
            return start(command, **kwargs)
        started.append(command)
        if len(started) == 2:
            raise KeyboardInterrupt
        main(vit.FAMILY, command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(words)
    first = (out / "runs.jsonl").read_text()
    assert sweep.main(words) == 0
    assert (out / "runs.jsonl").read_text().startswith(first)
    assert started[1] == started[2]
    assert len(started) == 3
    lines = (out / "runs.jsonl").read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines]
    found = [(r["settings"]["seed"], r["script"]["selection_runs"]) for r in results]
    assert found == [(100, 0), (13, 1)]
    record = strict(out / "sweep.json")["tasks"]["MNIST"]["DP-GRAPE"]
    tested = results[1]["metrics"]["test"]["accuracy"]
    assert record["search_runs"] == 1
    assert record["scores"] == {"8": [pytest.approx(tested), None, 1]}
