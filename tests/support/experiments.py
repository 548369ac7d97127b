"""Results of experiments as ``recipes.paper.experiment`` writes them, and runs that are killed."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {"train": 1024, "dev": 1024, "test": 872}
SCRIPT = {
    **{"task": "SST-2", "model_name_or_path": "FacebookAI/roberta-large", "dataset_path": None},
    **{"result_dir": "runs", "curve_steps": 0, "zero_shot": False, "selection_runs": 0},
    **{"config": "paper", "frozen": None, "lora_rank": 16, "head": "prompt", "k": 512},
}
SETTINGS = {
    **{
        "method": "dp_grape",
        "update_rule": "adam",
        "projection": "gaussian",
        "projection_rank": 16,
    },
    **{"projection_update_steps": 100, "projection_seed": 0},
    **{"target_epsilon": 6.0, "target_delta": 1e-5, "accountant": "rdp", "max_grad_norm": 0.5},
    **{"clipping": "flat", "expected_batch_size": 64, "sampling": "poisson", "max_steps": 1000},
    **{"adjacency": "add_or_remove_one", "engine": "layerwise", "learning_rate": 1e-4, "seed": 13},
    **{"lr_scheduler_type": "constant", "weight_decay": 0.0, "per_device_train_batch_size": 64},
    **{"num_train_epochs": 3.0, "gradient_checkpointing": False, "bf16": False},
}
PROJECTED = ("dp_grape", "dp_galore", "galore", "flora", "d2p2")


def made_up(score: float, family: str = "roberta", **changes: Any) -> dict[str, Any]:
    """A result with a test score; ``changes`` are of its script, settings or anything else."""
    script, settings = SCRIPT | {}, SETTINGS | {}
    result: dict[str, Any] = {
        "family": family,
        "metrics": {"dev": {"accuracy": score - 1}, "test": {"accuracy": score}},
        "curve": [],
        "privacy": {"epsilon": 5.99},
        "splits": SIZES,
        "peak_memory": {"max_resident": 10**9},
        "device": "cpu",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "git_commit": "0123456789ab",
        "notes": [],
    }
    if changes.get("method", "dp_grape") not in PROJECTED:
        settings["projection"] = "identity"
    if changes.get("method") in ("adam", "lora", "galore", "mezo"):
        settings["target_epsilon"] = None
    for name, value in changes.items():
        for part in (script, settings, result):
            if name in part:
                part[name] = value
                break
        else:
            script[name] = value
    return result | {"script": script, "settings": settings}


def rows(text: str, start: str) -> list[list[str]]:
    """The cells of the lines that start like this."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def killed(family: str, words: Sequence[str], folder: Path) -> int:
    """Kill the command of a run (SIGKILL) while it saves its second checkpoint, or right after.

    Args:
        family: of the recipe.
        words: its command line.
        folder: its ``--output_dir``, in which it is the only run.

    Returns:
        The step of the earliest checkpoint that is there.
    """
    command = [sys.executable, "-m", f"recipes.paper.{family}", *words]
    steps: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        while len(steps) < 2:
            assert run.poll() is None, run.stdout.read().decode()  # type: ignore[union-attr]
            time.sleep(0.01)
            steps |= checkpoints(folder)
        run.kill()
    return min(checkpoints(folder))


def checkpoints(folder: Path) -> set[int]:
    """The steps of a run's checkpoints, whole or not."""
    found = folder.glob("*/checkpoint-*/trainer_state.json")
    return {int(path.parent.name.rpartition("-")[2]) for path in found}
