import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from dp_grape_hf import ledger as ledger_module
from dp_grape_hf.accounting import PRV
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, SCHEMA_VERSION, Ledger
from dp_grape_hf.mechanism import ADDED_IN_VERSION, MAY_CHANGE_ON_RESUME, Mechanism, Release
from dp_grape_hf.plan import PrivacyPlan
from tests.trainers import make_args

MECHANISM = Mechanism(
    noise_multiplier=1.5,
    sample_rate=0.0625,
    max_grad_norm=0.5,
    expected_batch_size=64,
    num_samples=1024,
    target_epsilon=6.0,
    target_delta=1e-5,
    accountant="prv",
    engine="layerwise",
    projection="gaussian",
    projection_rank=16,
    projection_update_steps=100,
    projection_seed=0,
)


def _unplaced(ledger: Ledger) -> Ledger:
    return replace(ledger, path=None)


# ---- Round trip ----


@pytest.mark.parametrize(
    "mechanism",
    [
        MECHANISM,
        replace(MECHANISM, max_grad_norm=math.inf),
        replace(MECHANISM, noise_multiplier=0.0, target_epsilon=None, target_delta=None),
        replace(MECHANISM, projection_rank=None, projection_update_steps=None),
        replace(MECHANISM, engine="Infinity", sample_rate=1 / 3, projection_seed=2**62),
    ],
    ids=["plain", "no clip", "no budget", "no projection", "odd values"],
)
def test_a_ledger_survives_saving_and_loading(mechanism: Mechanism, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / LEDGER_NAME
    ledger = Ledger.start(mechanism, path)
    assert Ledger.load(path) == _unplaced(ledger)
    ledger.record()
    ledger.record(41)
    ledger.mark_not_private("a test")
    ledger.snapshot(40).save(path)
    loaded = Ledger.load(path)
    assert loaded == _unplaced(ledger)
    assert (loaded.steps, loaded.updates, loaded.mechanism) == (42, 40, mechanism)


def test_the_file_is_strict_json_whatever_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    Ledger.start(replace(MECHANISM, max_grad_norm=math.inf), path).record()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads(path.read_text(encoding="ascii"), parse_constant=refuse)
    assert content["mechanism"]["max_grad_norm"] == "Infinity"


def test_the_file_holds_public_facts_only(tmp_path: Path) -> None:
    """Every key is listed here, so that a new one is looked at before it is published."""
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path).record(3)
    content = json.loads(path.read_text())
    assert set(content) == {
        *("schema_version", "mechanism", "run_id", "started_at", "versions"),
        *("releases", "updates", "not_private_reasons"),
    }
    assert set(content["mechanism"]) == {f.name for f in fields(Mechanism)}
    assert {name for name in content["mechanism"] if "seed" in name} == {"projection_seed"}
    assert set(content["versions"]) == {"dp_grape_hf", "torch", "transformers", "prv-accountant"}
    assert content["releases"] == [asdict(Release(1.5, 0.0625, 3))]


def test_runs_have_ids_of_their_own() -> None:
    assert Ledger.start(MECHANISM).run_id != Ledger.start(MECHANISM).run_id


# ---- Recording ----


def test_releases_are_run_length_coded_and_appended(tmp_path: Path) -> None:
    ledger = Ledger.start(MECHANISM, tmp_path / LEDGER_NAME)
    assert (ledger.steps, ledger.releases) == (0, ())
    for done in range(1, 6):
        ledger.record()
        assert ledger.steps == Ledger.load(tmp_path / LEDGER_NAME).steps == done
    ledger.record(95)
    assert ledger.releases == (Release(1.5, 0.0625, 100),)


@pytest.mark.parametrize("steps", [0, -1, True, 1.0, None])
def test_only_whole_positive_numbers_of_releases_are_recorded(steps: Any) -> None:
    ledger = Ledger.start(MECHANISM)
    with pytest.raises(PrivacyError, match="steps="):
        ledger.record(steps)
    assert ledger.steps == 0


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger.start(MECHANISM)
    ledger.record(2)
    ledger.mark_not_private("a test")
    assert ledger.steps == 2
    assert list(tmp_path.iterdir()) == []


def test_recording_in_a_loaded_ledger_never_changes_its_file(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path)
    before = path.read_bytes()
    Ledger.load(path).record()
    assert path.read_bytes() == before


def test_a_new_run_keeps_the_ledger_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    first = Ledger.start(MECHANISM, path)
    first.record(7)
    second = Ledger.start(MECHANISM, path)
    assert Ledger.load(path) == _unplaced(second)
    kept = tmp_path / f"privacy_ledger.before-{second.run_id}.json"
    assert Ledger.load(kept) == _unplaced(first)


def test_a_snapshot_cannot_hold_more_updates_than_releases() -> None:
    ledger = Ledger.start(MECHANISM)
    ledger.record(3)
    assert ledger.snapshot(3).updates == 3
    for updates in (4, -1):
        with pytest.raises(PrivacyError, match=f"updates={updates} "):
            ledger.snapshot(updates)
    assert ledger.updates == 3


# ---- Crashes ----


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_stops_the_release(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(MECHANISM, path)
    ledger.record()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="disk full"):
            ledger.record()
    assert Ledger.load(path).steps == 1
    assert ledger.steps == 2, "what may have been written stays counted"
    assert [file.name for file in tmp_path.iterdir()] == [LEDGER_NAME]


_RECORD_FOREVER = """
import sys
from dp_grape_hf.ledger import Ledger, Mechanism
ledger = Ledger.start(Mechanism(**eval(sys.argv[2])), sys.argv[1])
while True:
    ledger.record()
    sys.stdout.write(f"{ledger.steps}\\n")
    sys.stdout.flush()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_a_ledger_that_holds_every_release(tmp_path: Path) -> None:
    for acknowledged in (1, 100):
        path = tmp_path / str(acknowledged) / LEDGER_NAME
        command = [sys.executable, "-c", _RECORD_FOREVER, str(path), repr(asdict(MECHANISM))]
        root = Path(ledger_module.__file__).parents[1]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(acknowledged)]
            process.send_signal(signal.SIGKILL)
            lines += [line for line in process.stdout if line.endswith("\n")]
        # At most one more was recorded than acknowledged.
        assert Ledger.load(path).steps in (int(lines[-1]), int(lines[-1]) + 1)
        left = {file.name for file in path.parent.iterdir()}
        assert left <= {LEDGER_NAME, f".{LEDGER_NAME}.tmp"}
        Ledger.load(path).save(path)
        assert [file.name for file in path.parent.iterdir()] == [LEDGER_NAME]


# ---- Epsilon ----


def test_epsilon_is_derived_by_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compose(releases: Any, *, delta: float, accountant: str) -> float:
        calls.append((list(releases), delta, accountant))
        return 3.25

    monkeypatch.setattr(ledger_module, "compose_epsilon", compose)
    ledger = Ledger.start(MECHANISM)
    ledger.record(10)
    assert ledger.epsilon() == 3.25
    assert ledger.epsilon(delta=1e-6) == 3.25
    variant = {"max_batch_size": None, "num_samples": 1024, "norm_directions": None}
    whole = [(1.5, 0.0625, 10, variant | {"adjacency": "add_or_remove_one"})]
    assert calls == [(whole, delta, "prv") for delta in (1e-5, 1e-6)]


def test_a_capped_batch_is_accounted_for() -> None:
    capped = replace(MECHANISM, sampling="truncated_poisson", max_batch_size=66)
    assert capped.reasons_not_private() == []
    epsilons = []
    for mechanism in (MECHANISM, capped):
        ledger = Ledger.start(mechanism)
        ledger.record(100)
        epsilons.append(ledger.epsilon())
    assert epsilons[1] > 1.1 * epsilons[0]


def test_estimated_norms_and_replaced_examples_are_accounted_for() -> None:
    epsilons = []
    for change in ({}, {"norm_directions": 16}, {"adjacency": "replace_one"}):
        ledger = Ledger.start(replace(MECHANISM, **change))  # type: ignore[arg-type]
        assert ledger.private
        ledger.record(100)
        epsilons.append(ledger.epsilon())
    assert epsilons[1] > 1.05 * epsilons[0]
    assert epsilons[2] > 1.5 * epsilons[0]


def test_estimated_norms_by_layer_are_refused() -> None:
    with pytest.raises(PrivacyError, match="norm_directions=16 estimates the norm over all layers"):
        replace(MECHANISM, norm_directions=16, clipping="per_layer")


@pytest.mark.parametrize(
    "changes", [{"max_batch_size": 128}, {"sampling": "truncated_poisson"}], ids=str
)
def test_a_cap_belongs_to_truncated_sampling(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match="contradicts max_batch_size"):
        replace(MECHANISM, **changes)


def test_epsilon_grows_with_the_releases_and_shrinks_with_delta() -> None:
    ledger = Ledger.start(MECHANISM)
    assert ledger.epsilon() == 0.0
    ledger.record(100)
    early = ledger.epsilon()
    ledger.record(900)
    assert 0 < early < ledger.epsilon() < 10
    assert ledger.epsilon(delta=1e-4) < ledger.epsilon()


def test_epsilon_needs_a_delta() -> None:
    ledger = Ledger.start(replace(MECHANISM, target_delta=None))
    with pytest.raises(PrivacyError, match="target_delta=None"):
        ledger.epsilon()
    assert ledger.epsilon(delta=1e-5) == 0.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm is inf"),
        ({"sampling": "shuffle"}, "sampling is 'shuffle'"),
        ({"adjacency": "substitute"}, "adjacency is 'substitute'"),
    ],
    ids=str,
)
def test_a_mechanism_without_a_guarantee_is_never_private(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(replace(MECHANISM, **change), path)
    assert not ledger.private
    assert ledger.epsilon() == math.inf
    assert reason in ledger.not_private_reasons[0]
    _edit(path, lambda content: content.update(not_private_reasons=[]))
    assert Ledger.load(path).epsilon() == math.inf


def test_not_private_is_for_good(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(MECHANISM, path)
    ledger.record()
    assert ledger.private
    ledger.mark_not_private("test generators were passed")
    ledger.mark_not_private("another")
    ledger.mark_not_private("another")
    for one in (ledger, Ledger.load(path)):
        assert not one.private
        assert one.epsilon() == math.inf
        assert one.not_private_reasons == ["test generators were passed", "another"]
    with pytest.raises(PrivacyError, match="reason="):
        ledger.mark_not_private("")


def test_a_run_without_a_claim_says_why() -> None:
    ledger = Ledger.start(MECHANISM, private=False, reason="the baseline")
    assert (ledger.private, ledger.not_private_reasons) == (False, ["the baseline"])
    with pytest.raises(PrivacyError, match="private=False"):
        Ledger.start(MECHANISM, private=False)
    with pytest.raises(PrivacyError, match="reason='why'"):
        Ledger.start(MECHANISM, reason="why")


# ---- Resuming ----


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path]:
    """A run that saved a checkpoint after 20 updates and crashed after 25 releases."""
    live, copy = tmp_path / LEDGER_NAME, tmp_path / "checkpoint-20" / LEDGER_NAME
    ledger = Ledger.start(MECHANISM, live)
    ledger.record(20)
    ledger.snapshot(20).save(copy)
    ledger.record(5)
    return live, copy


def test_releases_after_the_checkpoint_stay_spent(run: tuple[Path, Path]) -> None:
    live, copy = run
    ledger = Ledger.resume(live, copy, MECHANISM, updates=20)
    assert (ledger.steps, ledger.updates, ledger.path) == (25, 20, live)
    assert ledger.run_id == Ledger.load(copy).run_id
    ledger.record()
    assert Ledger.load(live).steps == 26
    assert Ledger.load(copy).steps == 20


def test_resuming_counts_as_much_as_never_stopping(run: tuple[Path, Path]) -> None:
    live, copy = run
    Ledger.load(live).snapshot(25).save(copy)
    ledger = Ledger.resume(live, copy, MECHANISM, updates=25)
    ledger.record(75)
    whole = Ledger.start(MECHANISM)
    whole.record(100)
    assert ledger.releases == whole.releases


def test_a_run_that_goes_on_in_another_folder_counts_all_releases(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    live = tmp_path / "elsewhere" / LEDGER_NAME
    ledger = Ledger.resume(live, run[1], MECHANISM, updates=20)
    assert ledger.steps == Ledger.load(live).steps == 25
    ledger.record(3)
    assert Ledger.resume(live, run[1], MECHANISM, updates=20).steps == 28
    assert Ledger.resume(run[0], run[1], MECHANISM, updates=20).steps == 25


def test_the_larger_count_of_two_folders_counts(run: tuple[Path, Path], tmp_path: Path) -> None:
    live = tmp_path / "elsewhere" / LEDGER_NAME
    Ledger.resume(live, run[1], MECHANISM, updates=20)
    Ledger.resume(run[0], run[1], MECHANISM, updates=20).record(4)
    assert Ledger.resume(live, run[1], MECHANISM, updates=20).steps == 29


def test_a_checkpoint_that_was_moved_goes_on_from_its_own_count(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "moved" / "checkpoint-20"
    shutil.copytree(run[1].parent, moved)
    live = tmp_path / "elsewhere" / LEDGER_NAME
    ledger = Ledger.resume(live, moved / LEDGER_NAME, MECHANISM, updates=20)
    assert ledger.steps == Ledger.load(live).steps == 20


def test_the_ledger_of_another_run_beside_a_checkpoint_does_not_count(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "moved" / "checkpoint-20"
    shutil.copytree(run[1].parent, moved)
    Ledger.start(MECHANISM, moved.parent / LEDGER_NAME).record(50)
    live = tmp_path / "elsewhere" / LEDGER_NAME
    assert Ledger.resume(live, moved / LEDGER_NAME, MECHANISM, updates=20).steps == 20


def test_not_private_in_either_file_stays_not_private(run: tuple[Path, Path]) -> None:
    live, copy = run
    _edit(live, lambda content: content.update(not_private_reasons=["live"]))
    _edit(copy, lambda content: content.update(not_private_reasons=["copy", "live"]))
    ledger = Ledger.resume(live, copy, MECHANISM, updates=20)
    assert ledger.not_private_reasons == ["copy", "live"]


OTHER_VALUES: dict[str, Any] = {
    "noise_multiplier": 1.25,
    "sample_rate": 0.125,
    "max_grad_norm": 1.0,
    "expected_batch_size": 128.0,
    "num_samples": 1025,
    "target_epsilon": 7.0,
    "target_delta": 1e-6,
    "accountant": "pld",
    "engine": "functorch",
    "projection": "rademacher",
    "projection_rank": 8,
    "projection_update_steps": 50,
    "projection_seed": 1,
    "projection_device": "cuda",
    "adjacency": "replace_one",
    "privacy_unit": "author",
    "sampling": "shuffle",
    "method": "dp_adam",
    "clipping": "per_layer",
    "projection_side": "input",
    "projection_ranks": "auto:500",
    "max_batch_size": 128,
    "norm_directions": 16,
    "max_examples_per_unit": 4,
}


def test_every_field_of_a_mechanism_is_tried_on_resume() -> None:
    assert set(OTHER_VALUES) == {f.name for f in fields(Mechanism)}
    assert set(MAY_CHANGE_ON_RESUME) == {"engine", "accountant"}


@pytest.mark.parametrize("name", OTHER_VALUES)
@pytest.mark.parametrize("with_live", [True, False])
def test_resuming_with_another_mechanism_is_refused(
    name: str, with_live: bool, run: tuple[Path, Path]
) -> None:
    live, copy = run
    if not with_live:
        live.unlink()
    with_it = {"sampling": "truncated_poisson"} if name == "max_batch_size" else {}
    other = replace(MECHANISM, **{name: OTHER_VALUES[name]}, **with_it)
    if name in MAY_CHANGE_ON_RESUME:
        assert Ledger.resume(live, copy, other, updates=20).mechanism == other
        assert Ledger.load(live).mechanism == other
        return
    with pytest.raises(PrivacyError) as refusal:
        Ledger.resume(live, copy, other, updates=20)
    assert f"{name}={OTHER_VALUES[name]!r}" in str(refusal.value)
    assert f"recorded: {getattr(MECHANISM, name)!r}" in str(refusal.value)


@pytest.mark.parametrize("changed", ["expected_batch_size", "num_samples"])
def test_only_another_batch_size_is_put_down_to_the_number_of_processes(
    changed: str, run: tuple[Path, Path]
) -> None:
    """Its default is the only one that grows with them."""
    other = replace(MECHANISM, **{changed: OTHER_VALUES[changed]})
    with pytest.raises(PrivacyError) as refusal:
        Ledger.resume(*run, other, updates=20)
    assert ("number of processes" in str(refusal.value)) == (changed == "expected_batch_size")


def test_resuming_with_other_weights_is_refused(run: tuple[Path, Path]) -> None:
    with pytest.raises(PrivacyError, match=r"updates=10, but .* with 20 updates"):
        Ledger.resume(*run, MECHANISM, updates=10)
    Ledger.start(MECHANISM).save(run[1])
    with pytest.raises(PrivacyError, match="with None updates"):
        Ledger.resume(*run, MECHANISM, updates=20)


def test_resuming_inside_another_run_is_refused(run: tuple[Path, Path]) -> None:
    live, copy = run
    other = Ledger.start(MECHANISM, live)
    other.record(100)
    with pytest.raises(PrivacyError, match=f"different runs, {other.run_id}"):
        Ledger.resume(live, copy, MECHANISM, updates=20)


def test_a_live_ledger_behind_its_checkpoint_is_refused(run: tuple[Path, Path]) -> None:
    live, copy = run
    _edit(live, lambda content: content.update(updates=None))
    _edit(live, lambda content: content["releases"][0].update(count=19))
    with pytest.raises(PrivacyError, match="19 and 20 releases"):
        Ledger.resume(live, copy, MECHANISM, updates=20)


@pytest.mark.parametrize("which", [0, 1], ids=["live", "checkpoint"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "binary"])
def test_a_damaged_file_is_refused_by_name(which: int, damage: str, run: tuple[Path, Path]) -> None:
    path = run[which]
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[:-40], "binary": b"\xff\x00"}[damage])
    with pytest.raises(PrivacyError, match=str(path)):
        Ledger.resume(*run, MECHANISM, updates=20)


def test_a_checkpoint_without_a_ledger_is_refused(run: tuple[Path, Path]) -> None:
    live, copy = run
    copy.unlink()
    with pytest.raises(PrivacyError, match=str(copy)):
        Ledger.resume(live, copy, MECHANISM, updates=20)


def test_a_run_names_the_accountant_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one asked for may have to give up; the others bound the same releases."""
    changes = {"accountant": "prv", "noise_multiplier": 2.0, "target_delta": 1e-5, "max_steps": 9}
    args = make_args(tmp_path, **changes)
    assert PrivacyPlan(args, 1000).mechanism().accountant == "prv"
    monkeypatch.setattr(PRV, "max_cells", 10)
    plan = PrivacyPlan(args, 1000)
    ledger = Ledger.start(plan.mechanism())
    assert ledger.mechanism.accountant == "pld"
    ledger.record(9)
    assert ledger.epsilon() == plan.spent(ledger).epsilon


# ---- Files of older versions ----


def _as_version_1(content: dict[str, Any]) -> None:
    content["schema_version"] = 1
    for added in ADDED_IN_VERSION.values():
        for name in added:
            del content["mechanism"][name]


def test_a_file_without_a_clipping_mode_was_clipped_flat(run: tuple[Path, Path]) -> None:
    live, copy = run
    for path in run:
        _edit(path, _as_version_1)
    assert Ledger.load(copy).mechanism == MECHANISM
    with pytest.raises(PrivacyError, match=r"clipping='per_layer' \(recorded: 'flat'\)"):
        Ledger.resume(live, copy, replace(MECHANISM, clipping="per_layer"), updates=20)
    ledger = Ledger.resume(live, copy, MECHANISM, updates=20)
    assert (ledger.steps, json.loads(live.read_text())["schema_version"]) == (25, SCHEMA_VERSION)


def test_an_old_file_is_held_to_its_own_version(tmp_path: Path) -> None:
    """A name that its version did not know is as unknown as any other."""
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path)
    _edit(path, lambda content: content.update(schema_version=1))
    with pytest.raises(PrivacyError, match="clipping='flat' is unknown"):
        Ledger.load(path)
    _edit(path, lambda content: content.update(schema_version=2))
    with pytest.raises(PrivacyError, match="max_batch_size=None is unknown"):
        Ledger.load(path)
    _edit(path, lambda content: content.update(schema_version=3))
    with pytest.raises(PrivacyError, match="max_examples_per_unit=None is unknown"):
        Ledger.load(path)
    _edit(path, _as_version_1)
    _edit(path, lambda content: content.update(schema_version=2))
    with pytest.raises(PrivacyError, match="clipping is missing"):
        Ledger.load(path)


# ---- Validation ----


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ((), "schema_version", 0),
        ((), "schema_version", SCHEMA_VERSION + 1),
        ((), "schema_version", True),
        ((), "epsilon", 0.1),
        ((), "run_id", 5),
        ((), "started_at", ""),
        ((), "versions", {"torch": 2}),
        ((), "updates", 21),
        ((), "updates", -1),
        ((), "updates", True),
        ((), "not_private_reasons", "none"),
        ((), "not_private_reasons", [""]),
        ((), "releases", {}),
        ((), "mechanism", []),
        (("releases", 0), "count", -1),
        (("releases", 0), "count", 0),
        (("releases", 0), "count", 20.0),
        (("releases", 0), "count", True),
        (("releases", 0), "count", "20"),
        (("releases", 0), "noise_multiplier", 100.0),
        (("releases", 0), "sample_rate", 1e-6),
        (("releases", 0), "order", 1),
        (("mechanism",), "noise_multiplier", -1.5),
        (("mechanism",), "noise_multiplier", "Infinity"),
        (("mechanism",), "noise_multiplier", "1.5"),
        (("mechanism",), "sample_rate", 0),
        (("mechanism",), "sample_rate", True),
        (("mechanism",), "sample_rate", None),
        (("mechanism",), "target_delta", 1.0),
        (("mechanism",), "target_epsilon", 0.0),
        (("mechanism",), "max_grad_norm", 0.0),
        (("mechanism",), "expected_batch_size", "Infinity"),
        (("mechanism",), "num_samples", 0),
        (("mechanism",), "projection_rank", 0),
        (("mechanism",), "projection_seed", 1.5),
        (("mechanism",), "method", ""),
        (("mechanism",), "clipping", "ghost"),
        (("mechanism",), "clipping", None),
        (("mechanism",), "seed", 42),
    ],
    ids=lambda value: str(value),
)
def test_a_file_that_says_something_impossible_is_refused(
    place: tuple[str | int, ...], key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path).record(20)

    def change(content: Any) -> None:
        for step in place:
            content = content[step]
        content[key] = value

    _edit(path, change)
    with pytest.raises(PrivacyError) as refusal:
        Ledger.load(path)
    for part in (str(path), key, str(value) if value != "Infinity" else "inf"):
        assert part in str(refusal.value)


@pytest.mark.parametrize("place", [(), ("mechanism",), ("releases", 0)], ids=str)
def test_a_missing_key_is_refused(place: tuple[str | int, ...], tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(MECHANISM, path)
    ledger.record(20)
    part: Any = json.loads(path.read_text())
    for step in place:
        part = part[step]
    for key in part:

        def drop(content: Any, key: str = key) -> None:
            for step in place:
                content = content[step]
            del content[key]

        ledger.save(path)
        _edit(path, drop)
        with pytest.raises(PrivacyError, match=key):
            Ledger.load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"sample_rate": 0.0625', '"sample_rate": NaN'),
        ('"max_grad_norm": 0.5', '"max_grad_norm": Infinity'),
        ('"max_grad_norm": 0.5', '"max_grad_norm": 1' + "0" * 400),
        ('"count": 20', '"count": 2' + "0" * 5000),
        ('"updates": null', '"updates": ' + "[" * 100_000),
    ],
    ids=["nan", "inf", "huge", "endless", "deep"],
)
def test_a_file_that_is_not_strict_json_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path).record(20)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PrivacyError, match=str(path)):
        Ledger.load(path)


@pytest.mark.parametrize("content", ["null", "[]", "3", '"text"', "{}"])
def test_a_file_of_another_shape_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    path.write_text(content)
    with pytest.raises(PrivacyError, match="schema_version=None"):
        Ledger.load(path)


def test_a_wrong_mechanism_is_refused_by_field() -> None:
    with pytest.raises(PrivacyError, match="noise_multiplier=nan"):
        replace(MECHANISM, noise_multiplier=math.nan)
    with pytest.raises(PrivacyError, match=r"num_samples=10\.0 must be of type int"):
        replace(MECHANISM, num_samples=10.0)  # type: ignore[arg-type]
