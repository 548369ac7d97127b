"""A run is the paper's experiment, or says what it is: in its label, or in a table of its own."""

import importlib
from dataclasses import asdict, fields
from typing import Any

import pytest

from dp_grape_hf.arguments import DPGrapeArguments
from recipes.common.provenance import recorded
from recipes.paper.experiment import parse
from recipes.paper.methods import METHODS, ZEROTH_ORDER
from recipes.report.findings import ZERO_SHOT, Findings, RunResult
from recipes.report.paper_match import read_paper, unlike, variant
from recipes.report.tables import render
from tests.support.experiments import made_up, rows

PAPER = read_paper()
DELTA = {"vit-full": 1.666e-5, "vit-finetuning": 1.999e-5}
"""What is just below 1/n where all is trained on, as the sweeps have it."""


def preset_run(name: str, method: str, config: str = "paper") -> RunResult:
    """What a preset would record, of a table's first task, with what it lacks given."""
    spec = PAPER["tables"][name]
    family = importlib.import_module(f"recipes.paper.{spec['family']}").FAMILY
    column = next(iter(spec["columns"].values()))
    model = column.get("same", {}).get("model_name_or_path", spec["same"].get("model_name_or_path"))
    words = [f"--task={column['task']}", f"--method={method}", "--learning_rate=0.1"]
    if isinstance(model, str):
        words.append(f"--model_name_or_path=x/{model}")
    if METHODS[method].private:
        words += ["--target_epsilon=2", "--max_grad_norm=1.0"]
    if METHODS[method].adapter:
        words.append("--lora_rank=8")
    if method in ZEROTH_ORDER:
        words.append("--perturbation=0.001")
    if spec["family"] != "vit" and method not in ("dp_grape", "dp_adam", "dpzero"):
        words.append("--max_steps=7")
    if name in DELTA:
        words += ["--held_out=False", f"--target_delta={DELTA[name]}"]
    words += [f"--config={config}", "--use_cpu", "--output_dir=x"]
    script, args = parse(family, words)
    found = made_up(1.0, spec["family"], splits=column["sizes"])
    return RunResult(found | {"script": asdict(script), "settings": recorded(args)})


ROWS = [
    (name, method)
    for name, spec in PAPER["tables"].items()
    for method in dict.fromkeys(line["method"] for line in spec["rows"])
    if method != ZERO_SHOT
]


@pytest.mark.parametrize("config", ["paper", "reference_code"])
@pytest.mark.parametrize(("name", "method"), ROWS)
def test_both_presets_are_the_papers_experiment(name: str, method: str, config: str) -> None:
    """So what keeps a run out of the paper's columns is never a name that no recipe has."""
    run, spec = preset_run(name, method, config), PAPER["tables"][name]
    wanted = [spec["usual"]["all"], spec["usual"].get(method, {}), spec["same"]]
    for column in spec["columns"].values():
        wanted += [column.get("same", {}), column.get("usual", {}).get("all", {})]
    assert {k for part in wanted for k in part} <= {*run.result["script"], *run.result["settings"]}
    assert unlike(run, spec) == {}
    untold = {"max_steps": 7} if run.result["settings"]["max_steps"] == 7 else {}
    assert variant(run, spec) == untold


SIZES = {
    *("projection_rank", "projection_update_steps", "expected_batch_size", "max_steps"),
    "num_train_epochs",
}


@pytest.mark.parametrize("config", ["paper", "reference_code"])
@pytest.mark.parametrize("name", PAPER["tables"])
def test_presets_have_the_settings_of_the_paper(name: str, config: str) -> None:
    spec = PAPER["tables"][name]
    family = importlib.import_module(f"recipes.paper.{spec['family']}").FAMILY
    wanted: dict[tuple[str, int], dict[str, float]] = {}
    for line in PAPER["settings"][name]["rows"]:
        for at, value in enumerate(line["values"]):
            if value is not None:
                wanted.setdefault((line["method"], at), {})[line["setting"]] = value
    for (method, at), settings in wanted.items():
        column = [*spec["columns"].values()][at]
        words = [f"--config={config}", f"--task={column['task']}", f"--method={method}"]
        if model := column.get("same", {}).get("model_name_or_path"):
            words.append(f"--model_name_or_path=facebook/{model}")
        _, args = parse(family, [*words, "--target_epsilon=2", "--use_cpu"])
        if (spec["family"], config) == ("roberta", "reference_code"):  # its scripts have another
            settings = settings | {"learning_rate": 5e-4}
        for part in (spec["same"], spec["usual"], column.get("usual", {})):
            for setting, value in {**part, **part.get(method, {})}.items():
                if setting in SIZES:
                    settings = settings | {setting: value}
        assert {setting: getattr(args, setting) for setting in settings} == settings
        assert args.num_samples is None  # N is the length of the data


UNSEEN = {
    *("task", "method", "target_epsilon", "learning_rate", "max_grad_norm"),  # rows, and settings
    *("seed", "projection_seed", "zero_shot", "config", "selection_runs", "result_dir"),
    *("curve_steps", "scored_splits", "save_model", "engine", "grad_sample_mode"),
    *("per_device_train_batch_size", "world_size", "gradient_checkpointing"),
    *("eval_data_is_public", "save_as"),
}
"""What needs no label: it places a run, or only a machine notices it."""


@pytest.mark.parametrize("name", PAPER["tables"])
def test_whatever_else_is_changed_a_run_says_so(name: str) -> None:
    """A new option is compared, or is in the list above: what it is for has been decided."""
    spec = PAPER["tables"][name]
    family = importlib.import_module(f"recipes.paper.{spec['family']}").FAMILY
    known: set[str] = {f.name for cls in (family.script, DPGrapeArguments) for f in fields(cls)}
    seen: set[str] = set()
    for method in ("dp_grape", "dp_lora", "dpzero"):  # projects, has an adapter, has directions
        run = preset_run(name, method)
        for part in ("script", "settings"):
            known |= run.result[part].keys()
            for option, value in run.result[part].items():
                if option in ("task", "method", "zero_shot"):
                    continue
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                other = value + 1 if number else not value if value in (True, False) else "other"
                changed = {**run.result, part: {**run.result[part], option: other}}
                if option in unlike(RunResult(changed), spec) or option in variant(
                    RunResult(changed), spec
                ):
                    seen.add(option)
    epochs = set() if spec["family"] == "vit" else {"num_train_epochs"}  # max_steps decides
    splits = {"split_seed", "freeze_embeddings"} if spec["family"] == "vit" else set()
    assert known - seen == UNSEEN | epochs | splits


@pytest.mark.parametrize(
    ("name", "method", "change"),
    [
        ("roberta-fewshot", "dp_grape", {"optim_target_modules": ".*query.*"}),
        ("roberta-fewshot", "dp_adam", {"max_steps": 100}),
        ("opt-generation", "dp_grape", {"bos_token_id": None}),
        ("vit-full", "dp_galore", {"adam_epsilon": 1e-8}),
    ],
)
def test_a_changed_option_is_in_the_label(name: str, method: str, change: dict[str, Any]) -> None:
    run = preset_run(name, method)
    ((option, value),) = change.items()
    part = "script" if option in run.result["script"] else "settings"
    run = RunResult({**run.result, part: run.result[part] | change})
    assert variant(run, PAPER["tables"][name]) == change
    text = render(Findings([run]), PAPER)
    title = METHODS[method].title
    (line,) = rows(text, f"| {title}, {option} = {str(value).replace('*', chr(92) + '*')} | 2")
    assert "1.0 [1]" in line


def test_other_data_change_the_label_and_other_heads_the_match() -> None:
    other = RunResult(made_up(90.0, dataset_path="data/other"))
    text = render(Findings([other]), PAPER)
    assert rows(text, "| DP-GRAPE, dataset_path = other | 6")[0][2:4] == ["", "90.0 [1]"]
    run = preset_run("vit-full", "dp_grape")
    run.result["script"]["num_attention_heads"] = 3
    assert unlike(run, PAPER["tables"]["vit-full"]) == {
        "num_attention_heads": "3; the paper: None or 12"
    }


def test_options_without_effect_on_the_score_are_in_no_label() -> None:
    nothing = {"noise_multiplier": 0.0, "max_grad_norm": float("inf"), "target_epsilon": None}
    result = made_up(93.0, method="adam")
    result["settings"] |= nothing
    assert variant(RunResult(result), PAPER["tables"]["roberta-fewshot"]) == {"max_steps": 1000}
    asked = made_up(79.0, zero_shot=True, max_steps=-1, lora_rank=4, max_length=48)
    assert variant(RunResult(asked), PAPER["tables"]["roberta-fewshot"]) == {"max_length": 48}
