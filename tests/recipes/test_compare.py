"""The comparison of methods, with two steps instead of a hundred."""

import json
from dataclasses import fields

import pytest
import yaml

from recipes.digits import compare
from recipes.paper.methods import METHODS, PaperArguments

CONFIG = compare.CONFIG


def small(path):
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["arguments"] |= {"max_steps": 2, "expected_batch_size": 32, "accountant": "rdp"}
    config["final"] = {"epsilons": [8.0], "seeds": [1, 2]}
    grids = {"dp_grape": [1e-3, 1e-2], "adam": [1e-3]}
    config["rows"] = {
        name: {"arguments": {"method": method}, "grid": {"learning_rate": grids[method]}}
        for name, method in (("DP-GRAPE", "dp_grape"), ("Adam (not private)", "adam"))
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_comparison_is_rendered(tmp_path, capsys):
    words = ["--config", str(small(tmp_path / "small.yaml")), "--output_dir", str(tmp_path / "out")]
    compare.main(words)
    first = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert record["runs"] == {"search": 2 + 1, "final": 2 + 2}
    assert set(record["rows"]["DP-GRAPE"]["accuracy"]) == {"8"}
    assert set(record["rows"]["Adam (not private)"]["accuracy"]) == {"inf"}
    assert "The search cost 3 runs" in first
    assert first.count("±") == 2
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 7
    found = [json.loads(line)["result"] for line in lines]
    assert all(r["epsilon"] is None or r["epsilon"] <= 8.0 for r in found)


def test_the_configuration_compares_every_method_by_options_that_there_are():
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    rows = [row["arguments"] for row in config["rows"].values()]
    known = {f.name for f in fields(PaperArguments)}
    assert {row["method"] for row in rows} == set(METHODS), f"{CONFIG.name}: a row for each method"
    assert config["arguments"].keys() <= known
    assert all(row.keys() <= known for row in rows)
