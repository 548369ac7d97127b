"""Two processes, started as a user starts them, against one; three are in ``test_sharding``.

What they do is in ``run``, beside this file; one launch does all of it, because each process takes
seconds to import what it needs.
"""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_grape_hf import PrivacyError
from dp_grape_hf.arguments import refuse_model
from dp_grape_hf.distributed import (
    OtherProcessFailed,
    failing_together,
    from_first,
    is_first,
    require_agreement,
)
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.projections import default_targets
from recipes.paper.methods import METHODS
from tests.support.trainers import (
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_trainer,
    weights_of,
)
from tests.trainer.distributed.processes import WAITING, assert_same_runs, launch, results, seen
from tests.trainer.distributed.run import (
    EQUAL,
    ROBERTA,
    SAVED,
    SCENARIOS,
    STOPPED_AT,
    equal,
    every_method,
    roberta,
    trained,
)

FLAG = 4  # bytes that say whether a process has failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def one(folder):
    """What one process does: runs to compare with, and checkpoints for two to resume from."""
    saved = trained(folder / "saved-1", watch=Watch(stop_at=STOPPED_AT), **SAVED)
    for purpose in ("saved-1-for-2", "damaged"):
        shutil.copytree(folder / "saved-1", folder / purpose)
    (folder / "damaged" / LEDGER_NAME).write_text("{}")
    torch.save(saved["noise"], folder / "noise.pt")
    return {
        "saved": saved,
        **{name: equal(name, folder) for name in EQUAL},
        "every_method": every_method(folder),
    }


@pytest.fixture(scope="module")
def two(folder, one):
    """What each of two processes saw; their checkpoint is there for one to resume."""
    launch(folder, 2, "tests.trainer.distributed.run", ["--multi_gpu"])
    shutil.copytree(folder / "saved-2", folder / "saved-2-for-1")
    return seen(folder, 2, SCENARIOS)


def refusals(ranks, scenario):
    for outcome in (rank[scenario] for rank in ranks):
        assert "error" in outcome, outcome
        assert outcome["seconds"] < WAITING
    return [rank[scenario]["error"] for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("run", [name for name in EQUAL if name != "uneven"])
def test_two_processes_train_as_one(run, one, two):
    assert_same_runs(results(two, run), one[run])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_by_any_method_as_one(method, one, two):
    alone = one["every_method"][method]
    for run in (rank[method] for rank in results(two, "every_method")):
        assert (run["spent"], run["steps"]) == (alone["spent"], alone["steps"])
        for actual, expected in zip(run["weights"], alone["weights"], strict=True):
            assert_same_weights(actual, expected, atol=2e-4, rtol=1e-3)
    first, last = alone["weights"][0], alone["weights"][-1]
    assert any((last[name] - first[name]).abs().max() > 1e-3 for name in first)


@pytest.mark.slow
def test_uneven_and_empty_shares_change_nothing(one, two):
    """One example is a physical batch here, so the sizes below are their numbers."""
    ranks = results(two, "uneven")
    draws = zip(*(run["draws"] for run in ranks), strict=True)
    sizes = [tuple(len(share) for share in draw) for draw in draws]
    assert (0, 0) in sizes  # an empty draw
    assert any(0 < min(step) < max(step) for step in sizes)
    assert sizes[0] == (1, 0)  # the second process has never run the model when the first one has
    assert_same_runs(ranks, one["uneven"])


@pytest.mark.slow
def test_training_starts_from_the_weights_of_the_first_process(two):
    expected = weights_of(TinyForSequenceClassification(seed=0))
    for weights, table in results(two, "initial"):
        assert_same_weights(weights[0], expected)
        assert table.tolist() == [0.0, 0.0]
    assert_same_weights(*(weights[1] for weights, _ in results(two, "initial")))


def _coordinates(rank):
    """Returns the numbers of all weights, of projected weights and of their coordinates."""
    model = roberta()["model"]
    targets = [
        w for name in default_targets(model) if min((w := model.get_parameter(name)).shape) > rank
    ]
    total = sum(w.numel() for w in model.parameters())
    return total, sum(w.numel() for w in targets), sum(rank * max(w.shape) for w in targets)


@pytest.mark.slow
def test_only_the_clipped_sum_crosses_the_network(two):
    """Exactly its coordinates in float32 and a flag, in two messages."""
    total, projected, coordinates = _coordinates(ROBERTA["projection_rank"])
    step = [("c10d::allreduce_", FLAG), ("c10d::allreduce_", 4 * (total - projected + coordinates))]
    for epochs in results(two, "private_bytes"):
        assert [message for epoch in epochs for message in epoch] == 4 * step
    assert coordinates < 0.3 * projected


@pytest.mark.slow
def test_one_process_resumes_what_two_have_saved(folder, one, two):
    stopped = results(two, "save")
    assert [run["steps"] for run in stopped] == [STOPPED_AT, STOPPED_AT]
    alone = trained(
        folder / "saved-2-for-1", resume=True, stream=torch.load(folder / "noise.pt"), **SAVED
    )
    _assert_resumed([alone], one, folder / "saved-2-for-1")
    assert alone["run_id"] == stopped[0]["run_id"] == stopped[1]["run_id"]


@pytest.mark.slow
def test_two_processes_resume_what_one_has_saved(folder, one, two):
    _assert_resumed(results(two, "resume"), one, folder / "saved-1-for-2")


def _assert_resumed(ranks, one, output):
    """As if never stopped: weights, optimizer, budget, steps, and what the files say."""
    whole = one["equal"]
    assert_same_runs(ranks, whole | {"weights": whole["weights"][STOPPED_AT:]})
    ledger, alone = Ledger.load(output / LEDGER_NAME), one["saved"]
    assert (ledger.steps, ledger.updates) == (whole["steps"], whole["steps"])
    assert {run["run_id"] for run in ranks} == {ledger.run_id}
    assert alone["steps"] == STOPPED_AT
    copy = Ledger.load(output / f"checkpoint-{2 * STOPPED_AT}" / LEDGER_NAME)
    assert (copy.steps, copy.updates, copy.mechanism) == (6, 6, ledger.mechanism)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "failed", "reason"),
    [
        ("broken_data", 1, "the disk of the second machine is gone"),
        ("refused_model", 1, "batch"),
        ("unwritable_ledger", 0, "no space left on device"),
    ],
)
def test_no_process_waits_for_one_that_failed(scenario, failed, reason, two):
    errors = refusals(two, scenario)
    assert reason in errors[failed]
    assert "1 of 2 processes failed in this step" in errors[1 - failed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("damaged_ledger", "no valid privacy ledger"),
        ("other_data", "the length of train_dataset is not the same in process 1"),
        ("other_users", "whose the examples are is not the same in process 1"),
        ("other_arguments", "max_grad_norm is 2.0 in process 1 and 1.0 in process 0"),
    ],
)
def test_what_one_process_refuses_all_refuse(scenario, reason, two):
    for rank, error in zip(two, refusals(two, scenario), strict=True):
        assert reason in error
        assert rank[scenario]["private"]


def test_alone_there_is_nobody_to_agree_with():
    assert is_first()
    assert from_first(lambda: "made here") == "made here"
    require_agreement({"anything": 1})
    with pytest.raises(ValueError, match="as it is"):
        from_first(_fail)


def test_an_error_is_passed_on_once():
    told = []
    with pytest.raises(KeyError), failing_together(lambda: told.append("ours")):
        raise KeyError
    with pytest.raises(OtherProcessFailed), failing_together(lambda: told.append("theirs")):
        raise OtherProcessFailed("they know")
    with failing_together(lambda: told.append("none")):
        pass
    assert told == ["ours"]


def _fail():
    raise ValueError("as it is")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_do_not_know_each_other_are_refused(name, tmp_path, monkeypatch):
    """Launchers start two on a machine without GPU, and each would train by itself."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(PrivacyError, match=f"{name}=2, but this process trains alone"):
        make_trainer(tmp_path, use_cpu=False)
    monkeypatch.setenv(name, "1")
    assert make_trainer(tmp_path, use_cpu=False).args.world_size == 1


def test_a_process_group_created_after_the_trainer_is_refused(tmp_path):
    """Each process would draw by itself, and the two draws be added up with the noise of one."""
    trainer = make_trainer(tmp_path)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(PrivacyError, match="group's size=2"):
            trainer.train()
    finally:
        dist.destroy_process_group()


def test_weights_that_are_spread_are_refused(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = TinyForSequenceClassification()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(PrivacyError, match=r"body\.weight is sharded over processes"):
            make_trainer(tmp_path, model=model)
    finally:
        dist.destroy_process_group()
    model = TinyForSequenceClassification()
    model.head.to("meta")
    with pytest.raises(PrivacyError, match=r"body\.weight on cpu, head\.weight on meta"):
        refuse_model("dp_grape", model)
