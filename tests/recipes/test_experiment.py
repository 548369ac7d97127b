"""Presets, runs and results of the recipes, with a family of points in space."""

import json
from dataclasses import fields
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional
from transformers import default_data_collator

from recipes.paper import opt, roberta, vit
from recipes.paper.experiment import (
    CONFIGS,
    UNKNOWN,
    Experiment,
    ExperimentArguments,
    Family,
    freeze,
    main,
    parse,
    result_path,
    run,
)
from recipes.paper.methods import METHODS, PaperArguments
from tests.support.trainers import TinyForSequenceClassification, points

PRESET = {
    "arguments": {
        **{"model_name_or_path": "none", "target_delta": 1e-3, "target_epsilon": 8.0},
        **{"expected_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 2},
        **{"accountant": "rdp", "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
        **{"save_strategy": "no", "learning_rate": 1e-1, "max_grad_norm": 1.0},
    },
    "methods": {
        "dp_grape": {"learning_rate": 1e-2, "projection": "gaussian", "projection_rank": 2}
    },
    "tasks": {
        "points": {
            "arguments": {"max_grad_norm": 5.0},
            "methods": {"dp_grape": {"max_grad_norm": 0.5}, "dp_sgd": {"max_grad_norm": "unknown"}},
        }
    },
}


def load(script, args):
    examples = points()
    test = default_data_collator(examples.examples)

    @torch.no_grad()
    def score(model, split):
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
def preset(tmp_path):
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(PRESET))
    return path


def words(preset, *others):
    folder = str(preset.parent)
    return ["--config", str(preset), "--task", "points", "--output_dir", folder, *others]


def test_the_command_line_wins_over_task_over_method_over_all(preset):
    _, args = parse(FAMILY, words(preset))
    assert (args.learning_rate, args.max_grad_norm, args.projection_rank) == (1e-2, 0.5, 2)
    _, args = parse(FAMILY, words(preset, "--method", "dp_adam"))
    assert (args.learning_rate, args.max_grad_norm) == (1e-1, 5.0)
    _, args = parse(FAMILY, words(preset, "--max_grad_norm", "3", "--eps", "2"))
    assert (args.max_grad_norm, args.target_epsilon) == (3.0, 2.0)
    _, args = parse(FAMILY, [*words(preset), "--task", "others"])
    assert args.max_grad_norm == 1.0
    _, args = parse(FAMILY, words(preset, "--noise_multiplier", "1.5"))
    assert (args.noise_multiplier, args.target_epsilon) == (1.5, None)
    _, args = parse(FAMILY, words(preset, "--method", "adam"))
    assert args.target_epsilon is None  # which is not private


def test_what_a_preset_does_not_know_is_asked_for(preset):
    with pytest.raises(
        ValueError, match=r"does not know max_grad_norm of method='dp_sgd'.*Give --"
    ):
        parse(FAMILY, words(preset, "--method", "dp_sgd"))
    _, args = parse(FAMILY, words(preset, "--method", "dp_sgd", "--max_grad_norm", "2"))
    assert args.max_grad_norm == 2.0


def test_parameters_are_frozen_by_name():
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


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--task", "lines"], "task='lines' must be one of: points, others"),
        (["--config", "nobody"], "config='nobody' is no file, and no preset"),
        (["--config", "wrong.yaml"], r"sets \['learning_rat'\], which are no options"),
    ],
)
def test_a_wrong_name_is_refused(preset, others, message, monkeypatch):
    monkeypatch.chdir(preset.parent)
    Path("wrong.yaml").write_text(yaml.safe_dump({"arguments": {"learning_rat": 1.0}}))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse(FAMILY, [*words(preset), *others])


def test_a_result_states_its_settings_and_is_never_overwritten(preset, capsys):
    others = ["--result_dir", str(preset.parent / "results"), "--curve_steps", "1"]
    result = main(FAMILY, words(preset, *others))
    path = preset.parent / "results" / "toy-preset-none-points-dp_grape-eps8-seed42.json"
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


def test_a_model_is_scored_as_it_is(preset):
    others = ["--result_dir", str(preset.parent), "--zero_shot", "--method", "dp_sgd"]
    script, args = parse(FAMILY, words(preset, *others))  # the unknown clip is not needed
    result = run(FAMILY, script, args)
    expected = load(script, args).score(TinyForSequenceClassification(args.seed), "test")
    assert result["metrics"]["test"] == expected
    assert result["privacy"] is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("ours", "roberta-ours-some-SST-2-dp_grape-eps2-seed42.json"),
        (str(CONFIGS / "roberta_paper.yaml"), "roberta-paper-some-SST-2-dp_grape-eps2-seed42.json"),
    ],
)
def test_results_of_several_presets_fit_into_one_folder(config, expected):
    given = ["--task=SST-2", "--model_name_or_path=a/some", f"--config={config}", "--eps=2"]
    script, args = parse(roberta.FAMILY, [*given, "--use_cpu", "--result_dir=out"])
    assert result_path(roberta.FAMILY, script, args) == Path("out", expected)


def test_a_result_that_appears_meanwhile_is_not_overwritten(preset):
    path = preset.parent / "toy-preset-none-points-dp_grape-eps8-seed42.json"

    def overtaken(script, args):
        path.write_text("first")
        return load(script, args)

    family = Family("toy", ExperimentArguments, ("points",), overtaken)
    with pytest.raises(FileExistsError):
        main(family, words(preset, "--result_dir", str(preset.parent)))
    assert path.read_text() == "first"


FAMILIES = {family.name: family for family in (roberta.FAMILY, opt.FAMILY, vit.FAMILY)}
PRESETS = sorted(path for name in FAMILIES for path in CONFIGS.glob(f"{name}_*.yaml"))
PARTS = {"arguments", "methods", "tasks", "models"}


@pytest.mark.slow
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_sets_what_there_is(path):
    family = FAMILIES[path.stem.partition("_")[0]]
    known = {f.name for cls in (family.script, PaperArguments) for f in fields(cls)}
    preset = yaml.safe_load(path.read_text())
    models = preset.get("models", {})
    methods = set()
    for part in (preset, *models.values()):
        tasks = part.get("tasks", {})
        assert set(tasks) <= set(family.tasks)
        for layer in (part, *tasks.values()):
            assert layer.keys() <= PARTS
            of_methods = layer.get("methods", {})
            methods |= of_methods.keys()
            for options in (layer.get("arguments", {}), *of_methods.values()):
                assert options.keys() <= known
    assert methods <= METHODS.keys()
    of_methods_and_tasks = product(sorted(methods), family.tasks)
    for (method, task), model in zip(of_methods_and_tasks, cycle(models or [None])):
        given = [f"--config={path}", f"--method={method}", f"--task={task}", "--use_cpu=True"]
        given += ["--target_epsilon=2"] * METHODS[method].private
        given += [] if model is None else [f"--model_name_or_path={model}"]
        try:
            _, args = parse(family, given)
        except ValueError as error:
            if "does not know" not in str(error) or UNKNOWN not in path.read_text():
                raise
        else:
            assert args.method == method
