"""Presets, runs and results of the recipes, with a family of points in space."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional
from transformers import default_data_collator

from dp_grape_hf import METHODS
from recipes.experiment import (
    CONFIGS,
    Experiment,
    ExperimentArguments,
    Family,
    freeze,
    main,
    parse,
    preset_for,
    run,
)
from tests.trainers import TinyForSequenceClassification, points

PRESET: dict[str, Any] = {
    "arguments": {
        **{"model_name_or_path": "none", "target_delta": 1e-3, "target_epsilon": 8.0},
        **{"expected_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 2},
        **{"accountant": "rdp", "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
        **{"save_strategy": "no", "learning_rate": 1e-1, "max_grad_norm": 1.0},
    },
    "methods": {"dp_grape": {"learning_rate": 1e-2, "projection_rank": 2}},
    "tasks": {
        "points": {
            "arguments": {"max_grad_norm": 5.0},
            "methods": {
                "dp_grape": {"max_grad_norm": 0.5},
                "dp_sgd": {"max_grad_norm": "unknown"},
            },
        }
    },
}


def load(script: ExperimentArguments, args: Any) -> Experiment:
    examples = points()
    test = default_data_collator(examples.examples)

    @torch.no_grad()
    def score(model: nn.Module, split: str) -> dict[str, float]:
        found = model.eval()(test["x"])["logits"].argmax(-1)
        return {"accuracy": 100 * (found == test["labels"]).float().mean().item()}

    return Experiment(
        TinyForSequenceClassification(args.seed),
        examples,
        default_data_collator,
        score,
        {"dev": 24, "test": 24},
        loss=lambda outputs, labels: functional.cross_entropy(
            outputs["logits"], labels, reduction="none"
        ),
        notes=["made up"],
    )


FAMILY = Family("toy", ExperimentArguments, ("points", "others"), load)


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(PRESET))
    return path


def words(preset: Path, *others: str) -> list[str]:
    folder = str(preset.parent)
    return ["--config", str(preset), "--task", "points", "--output_dir", folder, *others]


def test_the_command_line_wins_over_task_over_method_over_all(preset: Path) -> None:
    _, args = parse(FAMILY, words(preset))
    assert (args.learning_rate, args.max_grad_norm, args.projection_rank) == (1e-2, 0.5, 2)
    _, args = parse(FAMILY, words(preset, "--method", "dp_adam"))
    assert (args.learning_rate, args.max_grad_norm) == (1e-1, 5.0)
    _, args = parse(FAMILY, words(preset, "--max_grad_norm", "3", "--eps", "2"))
    assert (args.max_grad_norm, args.target_epsilon) == (3.0, 2.0)
    _, args = parse(FAMILY, [*words(preset), "--task", "others"])
    assert args.max_grad_norm == 1.0


def test_what_a_preset_does_not_know_is_asked_for(preset: Path) -> None:
    with pytest.raises(
        ValueError, match=r"does not know max_grad_norm of method='dp_sgd'.*Give --"
    ):
        parse(FAMILY, words(preset, "--method", "dp_sgd"))
    _, args = parse(FAMILY, words(preset, "--method", "dp_sgd", "--max_grad_norm", "2"))
    assert args.max_grad_norm == 2.0


def test_noise_from_the_command_line_replaces_the_budget_of_the_preset(preset: Path) -> None:
    _, args = parse(FAMILY, words(preset, "--noise_multiplier", "1.5"))
    assert (args.noise_multiplier, args.target_epsilon) == (1.5, None)


def test_parameters_are_frozen_by_name() -> None:
    model = TinyForSequenceClassification()
    freeze(model, None)
    assert all(p.requires_grad for p in model.parameters())
    freeze(model, r"^body\.")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    with pytest.raises(ValueError, match="frozen='tail' occurs in no parameter's name"):
        freeze(model, "tail")


def test_a_method_without_privacy_has_no_budget(preset: Path) -> None:
    _, args = parse(FAMILY, words(preset, "--method", "adam"))
    assert args.target_epsilon is None


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--task", "lines"], "task='lines' must be one of: points, others"),
        (["--config", "nobody"], "config='nobody' is no file, and no preset"),
    ],
)
def test_a_wrong_name_is_refused(preset: Path, others: list[str], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse(FAMILY, [*words(preset), *others])


def test_an_unknown_option_of_a_preset_is_refused(preset: Path) -> None:
    preset.write_text(yaml.safe_dump(PRESET | {"arguments": {"learning_rat": 1.0}}))
    with pytest.raises(ValueError, match=r"sets \['learning_rat'\], which are no options"):
        parse(FAMILY, words(preset))


def test_a_result_says_what_it_depends_on_and_is_never_overwritten(
    preset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ["--result_dir", str(preset.parent / "results"), "--curve_steps", "1"]
    result = main(FAMILY, words(preset, *others))
    path = preset.parent / "results" / "toy-none-points-dp_grape-eps8-seed42.json"
    assert json.loads(path.read_text()) == result
    assert f"{path}\n" in capsys.readouterr().out
    assert result["metrics"].keys() == {"dev", "test"}
    assert [point["step"] for point in result["curve"]] == [1, 2]
    assert result["privacy"]["epsilon"] <= 8.0
    assert result["privacy"]["adjacency"] == "add_or_remove_one"
    assert result["settings"]["max_grad_norm"] == 0.5
    assert result["splits"] == {"train": 24, "dev": 24, "test": 24}
    assert result["peak_memory"]["max_resident"] > 2**20
    assert result["notes"] == ["made up"]
    assert result["script"]["config"] == str(preset)
    with pytest.raises(FileExistsError, match="results are not overwritten"):
        main(FAMILY, words(preset, *others))


def test_a_model_is_scored_as_it_is(preset: Path) -> None:
    others = ["--result_dir", str(preset.parent), "--zero_shot", "--method", "dp_sgd"]
    script, args = parse(FAMILY, words(preset, *others))  # the unknown clip is not needed
    result = run(FAMILY, script, args)
    expected = load(script, args).score(TinyForSequenceClassification(args.seed), "test")
    assert result["metrics"]["test"] == expected
    assert result["privacy"] is None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_*.yaml")), ids=lambda path: path.stem)
def test_a_preset_names_methods_that_exist(path: Path) -> None:
    preset = yaml.safe_load(path.read_text())
    if "rows" in preset:
        methods = {row["method"] for row in preset["rows"].values()}
    else:
        tasks = preset.get("tasks", {}).values()
        methods = set(preset.get("methods", {})).union(*(t.get("methods", {}) for t in tasks))
        assert all(preset_for(path, method, "") for method in methods)
    assert methods <= METHODS.keys()
