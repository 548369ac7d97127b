"""Sweeps choose on the dev split, go on where they stopped, and say what the choice cost."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import sweep

CONFIG: dict[str, Any] = {
    "recipe": "toy",
    "arguments": {"config": "ours", "max_steps": 3},
    "tasks": {"points": {"dataset_path": "data/points"}},
    "search": {"epsilon": 6, "seed": 100, "arguments": {"held_out": True}},
    "final": {"epsilons": [2, 6], "seeds": [13, 21]},
    "rows": {
        "DP-GRAPE": {"arguments": {"method": "dp_grape"}, "grid": {"learning_rate": [0.1, 0.3]}},
        "Adam": {"arguments": {"method": "adam", "learning_rate": 0.5}},
    },
}


class Runs:
    """Stands for the processes: a score is 10 times the rate plus a thousandth of the seed."""

    def __init__(self) -> None:
        self.commands: list[dict[str, str]] = []
        self.fail = ""

    def __call__(self, command: list[str], **kwargs: Any) -> Any:
        assert command[1:3] == ["-m", "recipes.toy"]
        words = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
        self.commands.append(words)
        if words["learning_rate"] == self.fail:
            return subprocess.CompletedProcess(command, 1)
        score = 10 * float(words["learning_rate"]) + int(words["seed"]) / 1000
        result = {"metrics": {"dev": {"accuracy": score}, "test": {"accuracy": score + 50}}}
        (Path(words["result_dir"]) / "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(subprocess, "run", runs)
    return runs


def run(folder: Path, config: dict[str, Any] = CONFIG) -> int:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return sweep.main(["--config", str(path), "--output_dir", str(folder / "out")])


def test_the_best_on_the_dev_split_is_run_at_every_budget(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    search, final = runs.commands[:2], runs.commands[2:]
    assert [c["learning_rate"] for c in search] == ["0.1", "0.3"]
    assert {(c["target_epsilon"], c["seed"]) for c in search} == {("6", "100")}
    assert ["held_out" in c for c in runs.commands] == [True] * 2 + [False] * 6
    assert {c["dataset_path"] for c in runs.commands} == {"data/points"}
    private = [c for c in final if c["method"] == "dp_grape"]
    assert {(c["target_epsilon"], c["seed"]) for c in private} == {
        *(("2", "13"), ("2", "21"), ("6", "13"), ("6", "21"))
    }
    assert {(c["learning_rate"], c["selection_runs"]) for c in private} == {("0.3", "2")}
    plain = [c for c in final if c["method"] == "adam"]
    assert [c["seed"] for c in plain] == ["13", "21"]
    assert not any("target_epsilon" in c for c in plain)
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    row = record["tasks"]["points"]["DP-GRAPE"]
    assert row["search_runs"] == 2
    assert row["scores"]["2"] == pytest.approx([53.017, 0.004, 2])  # 53.013 and 53.021
    text = capsys.readouterr().out
    assert "| DP-GRAPE | 2 | 53.0 ± 0.0 [2] |" in text
    assert "| Adam | ∞ | 55.0 ± 0.0 [2] |" in text
    assert "from 2 runs" in text


def test_what_has_a_result_is_not_run_again(tmp_path: Path, runs: Runs) -> None:
    run(tmp_path)
    found = sorted((tmp_path / "out").rglob("result.json"))
    assert len(found) == len(runs.commands) == 8
    found[0].unlink()
    runs.commands.clear()
    run(tmp_path)
    assert len(runs.commands) == 1
    other = CONFIG | {"arguments": CONFIG["arguments"] | {"max_steps": 4}}
    runs.commands.clear()
    run(tmp_path, other)
    assert len(runs.commands) == 8


def test_a_run_that_fails_is_named_and_tried_again(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.fail = "0.3"
    assert run(tmp_path) == 1
    assert "failed: see" in capsys.readouterr().err
    assert {c["learning_rate"] for c in runs.commands[2:] if c["method"] == "dp_grape"} == {"0.1"}
    runs.fail = ""
    assert run(tmp_path) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["points"], "task": 1}, "has the parts"),
        ({"tasks": ["points"]}, r"tasks=\['points'\] must map names"),
        ({"rows": {"A": {"arguments": {"method": "adamw"}}}}, "method='adamw' of row 'A'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, CONFIG | change)
