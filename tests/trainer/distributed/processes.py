"""Starting several processes, and comparing what they saw with each other and with one."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.support.trainers import assert_same_weights

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}  # sums of float32 in another order, through Adam
WAITING = 30.0  # seconds; a process that waits for one that failed does so for half an hour


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(folder, processes, module, flags):
    """Starts processes as the README says; the module is given the folder."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags),
        *("--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--main_process_port", str(free_port())),
        *("-m", module, str(folder)),
    ]
    settings = {"HF_HOME": str(folder / "no configuration of the user")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        try:
            said, _ = run.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            run.terminate()  # it ends its processes then; killed, it would leave them waiting
            said, _ = run.communicate()
    assert run.returncode == 0, said


def fork(processes, main, *args):
    """Starts processes from one that has imported everything, which costs a third of the time.

    Args:
        processes: how many.
        main: is called with rank, world size, port and ``args``.
        *args: of it.

    Returns:
        How each of them ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    port = free_port()
    ranks = [
        context.Process(target=main, args=(rank, processes, port, *args), daemon=True)
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 300
    for rank in ranks:
        rank.join(timeout=max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        if rank.is_alive():  # and waits for one that does not come
            rank.kill()
    return [rank.exitcode for rank in ranks]


def seen(folder, processes, scenarios):
    return [
        {
            scenario.__name__: torch.load(
                folder / f"{scenario.__name__}-{rank}-of-{processes}.pt", weights_only=False
            )
            for scenario in scenarios
        }
        for rank in range(processes)
    ]


def results(ranks, scenario):
    for outcome in (rank[scenario] for rank in ranks):
        assert "error" not in outcome, outcome["trace"]
    return [rank[scenario]["result"] for rank in ranks]


def assert_same_runs(ranks, alone):
    """Same bits in all processes after every step, and those of one process up to rounding."""
    steps = len(alone["weights"])
    for run in ranks:
        assert run["world_size"] == len(ranks)
        assert len(run["weights"]) == steps
        for step in range(steps):
            assert_same_weights(run["weights"][step], ranks[0]["weights"][step])
            assert_same_weights(run["weights"][step], alone["weights"][step], **TOLERANCE)
        assert run["spent"] == alone["spent"]
        assert (run["steps"], run["left"]) == (alone["steps"], alone["left"])
        assert run["run_id"] == ranks[0]["run_id"]
    moved = max((alone["weights"][-1][n] - w).abs().max() for n, w in alone["weights"][0].items())
    assert moved > 1e-2  # the tolerance would hide a run that did not train
