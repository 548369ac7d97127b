"""Fast to start: what need not be imported is not, and every public name is there when asked for.

What is loaded is read in a process of its own, since the tests themselves have imported it all.
"""

import ast
import json
import subprocess
import sys
from importlib import import_module

import pytest

import dp_grape_hf
from dp_grape_hf.cli.main import COMMANDS, main

HEAVY = {"torch", "transformers", "huggingface_hub", "datasets", "peft", "trl", "pandas"}
OF_A_TRAINER = {"dp_grape_hf", "prv_accountant", "scipy", "tqdm"}
CALIBRATE = "calibrate --num_samples 1000 --expected_batch_size 100 --max_steps 50 --delta 1e-5"


def modules_after(code):
    report = "import json, sys; sys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))"
    program = f"{code}\n{report}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1]))


def of_commands(*commands):
    return f"""
from dp_grape_hf.cli.main import main
for words in {[command.split() for command in commands]!r}:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 0
"""


def packages(modules):
    return {name.partition(".")[0] for name in modules}


def test_nothing_heavy_is_imported_until_it_is_needed():
    names = "dir(dp_grape_hf), dp_grape_hf.__version__, dp_grape_hf.PrivacyError"
    helps = of_commands("--help", *(f"{command} --help" for command in COMMANDS))
    loaded = packages(modules_after(f"import dp_grape_hf\n{names}\n{helps}"))
    assert "dp_grape_hf" in loaded
    assert not loaded & (HEAVY | {"numpy", "scipy", "prv_accountant", "dp_accounting"})


@pytest.mark.slow
def test_calibrate_needs_the_accountants_only():
    code = of_commands(f"{CALIBRATE} --eps 2", f"{CALIBRATE} --noise_multiplier 1")
    loaded = packages(modules_after(code))
    assert "scipy" in loaded
    assert not loaded & HEAVY


@pytest.mark.slow
def test_a_trainer_adds_nothing_slow_to_that_of_transformers():
    theirs = modules_after("from transformers import Trainer")
    ours = modules_after("from dp_grape_hf import DPGrapeTrainer") - theirs
    assert "dp_grape_hf.gradients.layerwise" in ours
    new = packages(ours) - packages(theirs) - sys.stdlib_module_names
    assert {name for name in new if not name.startswith("_")} <= OF_A_TRAINER
    assert not {name for name in ours if name.startswith(("torch._dynamo", "torch._inductor"))}


def test_every_name_that_is_typed_is_there_and_listed():
    with open(dp_grape_hf.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dp_grape_hf.")
        for alias in node.names
    }
    lazy = {name: f"dp_grape_hf.{module}" for name, module in dp_grape_hf._SUBPACKAGE_OF.items()}
    assert typed == lazy
    assert set(dp_grape_hf.__all__) <= lazy.keys() <= set(dir(dp_grape_hf))
    for name in dp_grape_hf.__all__:
        assert getattr(dp_grape_hf, name) is getattr(sys.modules[lazy[name]], name)


def test_a_star_import_brings_exactly_the_public_names():
    names = {}
    exec("from dp_grape_hf import *", names)
    assert names.keys() - {"__builtins__"} == set(dp_grape_hf.__all__)
    with pytest.raises(AttributeError, match=r"'dp_grape_hf' has no attribute 'DPGrapeNothing'"):
        _ = dp_grape_hf.DPGrapeNothing


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gets_its_own_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith(f"usage: dp-grape {command} ")
    assert callable(import_module(f"dp_grape_hf.cli.{command}").run)
    example = f"$ dp-grape {command} "
    assert example in text, f"show in the epilog an example, {example!r} and an argument"
