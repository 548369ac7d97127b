"""What every test starts from: no network, no results of earlier runs, one seed, few threads."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import of transformers
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, as below of this one
os.environ["HF_HOME"] = tempfile.mkdtemp()  # of this process and those that it starts

import pytest
import torch

# Temporary folders in memory: each of the many releases waits for what its ledger is written to.
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.hookimpl(wrapper=True)  # when fixtures are gone, whose garbage would be left for good
def pytest_runtest_protocol(item, nextitem):
    """Leaves what was imported to no later collection of garbage: each run of a Trainer has one."""
    ran = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return ran


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in this hook, too
def pytest_collection_modifyitems(items):
    """Keeps tests that share a fixture in one process, under ``--dist loadgroup``.

    Files with slow ones of these begin, each as a whole, so that a fixture is made once: what takes
    minutes in one process leaves the others idle at the end.
    """
    first = set()
    for item in items:
        made = item._fixtureinfo.name2fixturedefs.values()
        if any(fixture.scope == "module" for fixtures in made for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            if item.get_closest_marker("slow"):
                first.add(item.path)
    items.sort(key=lambda item: item.path not in first)
    gc.freeze()  # what the tests imported


@pytest.fixture(autouse=True)
def _seeded():
    """Seeds the global generator, and leaves it to the next test as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def _nothing_remembered():
    """Forgets what earlier tests measured: a test may count measurements, or break them."""
    shutil.rmtree(Path(os.environ["HF_HOME"]) / "dp_grape_hf", ignore_errors=True)


@pytest.fixture
def releases(monkeypatch):
    """Returns the list that every release of a trainer in this test is copied to."""
    from tests.support.trainers import spy_releases  # which some tests need not wait for

    return spy_releases(monkeypatch)
