"""Results of experiments as ``recipes.paper.experiment`` writes them, and runs that resume."""

import subprocess
import sys
import time

from dp_grape_hf.publishing import MISMATCH, verify
from recipes.paper.experiment import main

SETTINGS = {"seed": 13, "max_grad_norm": 0.5, "learning_rate": 1e-4}


def made_up(score, curve=(), **settings):
    return {
        "metrics": {"dev": {"accuracy": score - 1}, "test": {"accuracy": score}},
        **{"curve": curve, "settings": SETTINGS | settings, "device": "cpu", "notes": []},
        **{"versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "git_commit": "0123456789ab"},
    }


def rows(text, start):
    """The cells of the lines that start like this."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def resumed(family, words, folder):
    """Run a command of 60 steps again that was killed (SIGKILL) near its second checkpoint.

    Args:
        family: of the recipe.
        words: its command line.
        folder: its ``--output_dir``, in which it is the only run.

    Returns:
        The step of its earliest checkpoint, its result, and the folder of what it saved.
    """

    def checkpoints():
        found = folder.glob("*/checkpoint-*/trainer_state.json")
        return {int(path.parent.name.rpartition("-")[2]) for path in found}

    command = [sys.executable, "-m", f"recipes.paper.{family.name}", *words]
    steps = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        while len(steps) < 2:
            assert run.poll() is None, run.stdout.read().decode()
            time.sleep(0.01)
            steps |= checkpoints()
        run.kill()
    step = min(checkpoints())
    assert 0 < step < 60
    result = main(family, words)
    assert 60 - 6 < result["privacy"]["steps"] <= 60  # those after the checkpoint stay spent
    (saved,) = folder.iterdir()
    assert MISMATCH not in {check.status for check in verify(saved)}
    return step, result, saved
