import json
import math
import os
import random
import shutil
import signal
import time
from dataclasses import fields, replace

import pytest

from dp_grape_hf.accounting.accountants import PRV
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger, Mechanism, Release
from dp_grape_hf.ledger.entries import SCHEMA_VERSION
from dp_grape_hf.ledger.record import LEFT_OUT_IF_NONE, MAY_CHANGE_ON_RESUME
from dp_grape_hf.ledger.storage import FILE_VERSION
from tests.support.ledgers import MECHANISM, content_of, edit, ledger_of, rewrite
from tests.support.trainers import make_args

LOCK_NAME = f".{LEDGER_NAME}.lock"


def _unplaced(ledger):
    return Ledger(ledger.links)


@pytest.mark.parametrize(
    "mechanism",
    [
        MECHANISM,
        replace(MECHANISM, noise_multiplier=0.0, target_epsilon=None, target_delta=None),
        replace(
            MECHANISM,
            projection_rank=None,
            max_grad_norm=math.inf,
            engine="Infinity",
            sample_rate=1 / 3,
            projection_seed=2**62,
        ),
    ],
    ids=["plain", "no budget", "odd values"],
)
def test_a_ledger_survives_saving_and_loading(mechanism, tmp_path):
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


def test_the_file_holds_public_facts_only(tmp_path):
    """Every key is listed here, so that a new one is looked at before it is published."""
    path = tmp_path / LEDGER_NAME
    ledger = ledger_of(3, path=path)
    ledger.snapshot(3, {"model.safetensors": "0" * 64}).save(tmp_path / "checkpoint-3" / "copy")
    other = replace(MECHANISM, accountant="rdp")
    Ledger.resume(path, tmp_path / "checkpoint-3" / "copy", other, updates=3).mark_not_private("so")
    content = content_of(path)
    assert set(content) == {"schema_version", "entries"}
    start, releases, weights, resume, not_private = content["entries"]
    assert [list(entry) for entry in content["entries"]] == [
        ["kind", "run_id", "at", "versions", "mechanism", "schema", "digest"],
        ["kind", "noise_multiplier", "sample_rate", "count", "digest"],
        ["kind", "updates", "files", "digest"],
        ["kind", "session", "updates", "at", "versions", "changes", "digest"],
        ["kind", "reason", "digest"],
    ]
    names = {f.name for f in fields(Mechanism)}
    assert set(start["mechanism"]) == names - set(LEFT_OUT_IF_NONE)
    assert {name for name in start["mechanism"] if "seed" in name} == {"projection_seed"}
    packages = {"dp_grape_hf", "torch", "transformers", "prv-accountant", "dp-accounting"}
    assert set(start["versions"]) == set(resume["versions"]) == packages
    assert (releases["noise_multiplier"], releases["count"]) == (1.5, 3)
    assert (weights["files"], resume["changes"]) == (
        {"model.safetensors": "0" * 64},
        {"accountant": "rdp"},
    )
    assert not_private["reason"] == "so"


def test_releases_are_run_length_coded_and_appended(tmp_path):
    ledger = Ledger.start(MECHANISM, tmp_path / LEDGER_NAME)
    assert ledger.steps == 0
    for done in range(1, 6):
        ledger.record()
        assert ledger.steps == Ledger.load(tmp_path / LEDGER_NAME).steps == done
    ledger.record(95)
    assert [entry for entry, _ in ledger.links[1:]] == [Release(1.5, 0.0625, 100)]


@pytest.mark.parametrize("steps", [0, -1, True, 1.0, None])
def test_only_whole_positive_numbers_of_releases_are_recorded(steps):
    ledger = Ledger.start(MECHANISM)
    with pytest.raises(PrivacyError, match="steps="):
        ledger.record(steps)
    assert ledger.steps == 0


def test_only_a_ledger_started_with_a_path_writes_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = ledger_of(2)
    ledger.mark_not_private("a test")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path)
    before = path.read_bytes()
    Ledger.load(path).record()
    assert path.read_bytes() == before


def test_a_new_run_keeps_the_ledger_of_the_one_before(tmp_path):
    path = tmp_path / LEDGER_NAME
    first = ledger_of(7, path=path)
    second = Ledger.start(MECHANISM, path)
    assert Ledger.load(path) == _unplaced(second)
    kept = tmp_path / f"privacy_ledger.before-{second.run_id}.json"
    assert Ledger.load(kept) == _unplaced(first)


def test_a_snapshot_cannot_hold_more_updates_than_releases():
    ledger = ledger_of(3)
    assert ledger.snapshot(3).updates == 3
    for updates in (4, -1):
        with pytest.raises(PrivacyError, match=f"updates={updates} "):
            ledger.snapshot(updates)
    assert ledger.updates == 3


@pytest.mark.parametrize(
    ("call", "done", "steps", "left"),
    [
        *(("fsync", False, 1, 2), ("fsync", False, 2, 1)),
        *(("replace", False, 2, 1), ("replace", True, 2, 3)),
    ],
)
def test_a_failed_write_stops_the_release_and_loses_none(
    call, done, steps, left, tmp_path, monkeypatch
):
    """A line that may have been written stays; a file that was to be written anew does not.

    Also if the write is ``done`` before it raises.
    """
    path = tmp_path / LEDGER_NAME
    ledger = ledger_of(1, path=path)

    original = getattr(os, call)

    def fail(*given):
        if done:
            original(*given)
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(PrivacyError, match=r"disk full.*not made"):
            ledger.record(steps)
    assert Ledger.load(path).steps == left
    assert ledger.steps == 1 + steps, "what may have been written stays counted"
    assert {file.name for file in tmp_path.iterdir()} == {LEDGER_NAME, LOCK_NAME}
    ledger.record()
    assert Ledger.load(path) == _unplaced(ledger)


@pytest.mark.parametrize("saved", [False, True], ids=["another release", "the first since a save"])
def test_a_torn_line_counts_as_a_release(saved, tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = ledger_of(3, path=path)
    if saved:
        ledger.snapshot(3)
    before = len(path.read_bytes())
    ledger.record()
    whole = path.read_bytes()
    for size in range(before + 1, len(whole)):
        for end in (b"", b"\0" * 3):
            path.write_bytes(whole[:size] + end)
            assert Ledger.load(path) == _unplaced(ledger)
    path.write_bytes(whole[:before])
    assert Ledger.load(path).steps == 3
    path.write_bytes(whole[: before + 20] + b"?")
    with pytest.raises(PrivacyError, match="neither complete nor the beginning"):
        Ledger.load(path)


def test_a_ledger_of_version_1_is_read_and_goes_on(run):
    """It was one JSON object, with the same entries and digests."""
    for path in run:
        content = content_of(path) | {"schema_version": 1}
        path.write_text(json.dumps(content, indent=2))
    ledger = Ledger.resume(*run, MECHANISM, updates=20)
    assert ledger.steps == 25
    ledger.record()
    assert Ledger.load(run[0]).steps == 26
    assert Ledger.load(run[0]).goes_on_from(Ledger.load(run[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_process_leaves_a_ledger_that_holds_every_release(tmp_path):
    """At 20 moments; at most one more was recorded than acknowledged."""
    path, moments = tmp_path / LEDGER_NAME, random.Random(0)
    for _ in range(20):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ledger = Ledger.start(MECHANISM, path)
                while True:
                    ledger.record()
                    os.write(write, f"{ledger.steps}\n".encode())
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as acknowledged:
            lines = [acknowledged.readline() for _ in range(moments.randint(1, 40))]
            time.sleep(moments.random() / 1000)
            os.kill(child, signal.SIGKILL)
            lines += [line for line in acknowledged if line.endswith("\n")]
        os.waitpid(child, 0)
        assert Ledger.load(path).steps in (int(lines[-1]), int(lines[-1]) + 1)
        left = {file.name for file in tmp_path.iterdir() if "before" not in file.name}
        assert left <= {LEDGER_NAME, f".{LEDGER_NAME}.tmp", LOCK_NAME}
    Ledger.start(MECHANISM, path)  # the dead process holds no lock


def test_epsilon_needs_a_delta():
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
def test_a_mechanism_without_a_guarantee_is_never_private(change, reason, tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(replace(MECHANISM, **change), path)
    assert not ledger.private
    assert ledger.epsilon() == math.inf
    assert reason in ledger.not_private_reasons[0]
    rewrite(path, lambda content: content["entries"][1:].clear())
    assert Ledger.load(path).epsilon() == math.inf


def test_not_private_is_for_good(tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = ledger_of(1, path=path)
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


@pytest.fixture
def run(tmp_path):
    """A run that saved a checkpoint after 20 updates and crashed after 25 releases."""
    live, copy = tmp_path / LEDGER_NAME, tmp_path / "checkpoint-20" / LEDGER_NAME
    ledger = ledger_of(20, path=live)
    ledger.snapshot(20).save(copy)
    ledger.record(5)
    return live, copy


def test_releases_after_the_checkpoint_stay_spent(run):
    live, copy = run
    ledger = Ledger.resume(live, copy, MECHANISM, updates=20)
    assert (ledger.steps, ledger.updates, ledger.path) == (25, 20, live)
    assert ledger.run_id == Ledger.load(copy).run_id
    ledger.record()
    assert Ledger.load(live).steps == 26
    assert Ledger.load(copy).steps == 20
    assert Ledger.load(live).goes_on_from(Ledger.load(copy))


def test_a_run_resumed_in_another_folder_counts_all_releases(run, tmp_path):
    live = tmp_path / "elsewhere" / LEDGER_NAME
    ledger = Ledger.resume(live, run[1], MECHANISM, updates=20)
    assert ledger.steps == Ledger.load(live).steps == 25
    ledger.record(3)
    assert Ledger.resume(live, run[1], MECHANISM, updates=20).steps == 28
    assert Ledger.resume(run[0], run[1], MECHANISM, updates=20).steps == 25


def test_the_larger_count_of_two_folders_counts(run, tmp_path):
    live = tmp_path / "elsewhere" / LEDGER_NAME
    Ledger.resume(live, run[1], MECHANISM, updates=20)
    Ledger.resume(run[0], run[1], MECHANISM, updates=20).record(4)
    assert Ledger.resume(live, run[1], MECHANISM, updates=20).steps == 29


@pytest.mark.parametrize("beside", [None, 50], ids=["nothing", "another run"])
def test_a_moved_checkpoint_continues_from_its_saved_count(beside, run, tmp_path):
    moved = tmp_path / "moved" / "checkpoint-20"
    shutil.copytree(run[1].parent, moved)
    if beside:
        ledger_of(beside, path=moved.parent / LEDGER_NAME)
    live = tmp_path / "elsewhere" / LEDGER_NAME
    ledger = Ledger.resume(live, moved / LEDGER_NAME, MECHANISM, updates=20)
    assert ledger.steps == Ledger.load(live).steps == 20


def test_reasons_in_either_file_are_kept(run):
    """A branch that released nothing may have noted one in the copy alone."""
    for path, reasons in zip(run, (["both", "live"], ["copy", "both"]), strict=True):
        writer = Ledger.load(path)
        for reason in reasons:
            writer.mark_not_private(reason)
        writer.save(path)
    ledger = Ledger.resume(*run, MECHANISM, updates=20)
    assert ledger.not_private_reasons == ["both", "live", "copy"]


OTHER_VALUES = {
    **{"noise_multiplier": 1.25, "public_dataset": "sentences, 100 examples", "sample_rate": 0.125},
    **{"max_grad_norm": 1.0, "expected_batch_size": 128.0, "num_samples": 1025},
    **{"target_epsilon": 7.0, "target_delta": 1e-6, "accountant": "pld", "engine": "functorch"},
    **{"projection": "gaussian_over_r", "projection_rank": 8, "projection_update_steps": 50},
    **{"projection_seed": 1, "projection_device": "cuda", "adjacency": "replace_one"},
    **{"privacy_unit": "author", "sampling": "shuffle", "method": "dp_adam"},
    **{"clipping": "automatic", "projection_side": "input", "projection_ranks": '{"body": 4}'},
    **{"max_examples_per_unit": 4, "noise": "banded", "coefficients": "[0.8, 0.6]"},
    **{"gradient_factors": '{"head": 4.0}', "clipped_apart": "head"},
    **{"chosen": "head: learning rate 0.1"},
}


def test_every_field_of_a_mechanism_is_tried_on_resume():
    assert set(OTHER_VALUES) == {f.name for f in fields(Mechanism)} - {
        "max_batch_size",
        "norm_directions",
    }
    assert set(MAY_CHANGE_ON_RESUME) == {"engine", "accountant"}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_resuming_with_another_mechanism_is_refused(name, run):
    live, copy = run
    with_it = {}
    if name in LEFT_OUT_IF_NONE:
        with_it = {other: OTHER_VALUES[other] for other in LEFT_OUT_IF_NONE}
    other = replace(MECHANISM, **with_it | {name: OTHER_VALUES[name]})
    if name in MAY_CHANGE_ON_RESUME:
        assert Ledger.resume(live, copy, other, updates=20).mechanism == other
        assert Ledger.load(live).mechanism == other
        return
    with pytest.raises(PrivacyError) as refusal:
        Ledger.resume(live, copy, other, updates=20)
    assert f"{name}={OTHER_VALUES[name]!r}" in str(refusal.value)
    assert f"recorded: {getattr(MECHANISM, name)!r}" in str(refusal.value)
    # Its default is the only one that grows with them.
    assert ("number of processes" in str(refusal.value)) == (name == "expected_batch_size")


def test_resuming_with_other_weights_is_refused(run):
    with pytest.raises(PrivacyError, match=r"updates=10, but .* with 20 updates"):
        Ledger.resume(*run, MECHANISM, updates=10)
    Ledger.start(MECHANISM).save(run[1])
    with pytest.raises(PrivacyError, match="with None updates"):
        Ledger.resume(*run, MECHANISM, updates=20)


def test_resuming_inside_another_run_is_refused(run):
    live, copy = run
    other = ledger_of(100, path=live)
    with pytest.raises(PrivacyError, match=f"different runs, {other.run_id}"):
        Ledger.resume(live, copy, MECHANISM, updates=20)


def test_a_live_ledger_behind_its_checkpoint_is_refused(run):
    live, copy = run
    behind = Ledger(Ledger.load(copy).links[:1])
    behind.record(19)
    behind.save(live)
    with pytest.raises(PrivacyError, match="19 and 20 releases"):
        Ledger.resume(live, copy, MECHANISM, updates=20)


def test_branches_that_both_released_are_refused(run, tmp_path):
    """Either alone would count its own releases, and the larger count is not all of them."""
    elsewhere = tmp_path / "elsewhere" / LEDGER_NAME
    Ledger.resume(elsewhere, run[1], MECHANISM, updates=20).record(3)
    Ledger.resume(run[0], run[1], MECHANISM, updates=20).record(4)
    with pytest.raises(PrivacyError, match="branches of one run"):
        Ledger.resume(elsewhere, run[1], MECHANISM, updates=20)
    branch = Ledger.load(run[1])  # also one in a copy
    branch.record(2)
    branch.snapshot(22).save(run[1])
    with pytest.raises(PrivacyError, match="branches of one run"):
        Ledger.resume(*run, MECHANISM, updates=22)


@pytest.mark.parametrize("which", [0, 1], ids=["live", "checkpoint"])
def test_a_damaged_file_is_refused_by_name(which, run):
    path = run[which]
    whole = path.read_bytes()
    for content in (b"", whole[:-40], b"\xff\x00"):
        path.write_bytes(content)
        with pytest.raises(PrivacyError, match=str(path)):
            Ledger.resume(*run, MECHANISM, updates=20)
    if which == 1:  # while a live file that is gone is written anew
        path.unlink()
        with pytest.raises(PrivacyError, match=str(path)):
            Ledger.resume(*run, MECHANISM, updates=20)


def test_a_run_names_the_accountant_that_answers(tmp_path, monkeypatch):
    """The one asked for may have to give up; the others bound the same releases."""
    changes = {"accountant": "prv", "noise_multiplier": 2.0, "target_delta": 1e-5, "max_steps": 9}
    args = make_args(tmp_path, **changes)
    assert PrivacyPlan(args, 1000).mechanism.accountant == "prv"
    monkeypatch.setattr(PRV, "max_cells", 10)
    plan = PrivacyPlan(args, 1000)
    ledger = Ledger.start(plan.mechanism)
    assert ledger.mechanism.accountant == "pld"
    ledger.record(9)
    assert ledger.epsilon() == plan.spent(ledger).epsilon


def _story(path):
    ledger = ledger_of(20, path=path)
    copy = path.parent / "checkpoint-20" / LEDGER_NAME
    ledger.snapshot(20, {"model.safetensors": "1" * 64}).save(copy)
    ledger.record(5)
    ledger = Ledger.resume(path, copy, replace(MECHANISM, accountant="rdp"), updates=20)
    ledger.record(7)
    ledger.mark_not_private("a story")
    return ledger


TAMPERING = {
    "a count": lambda e: e[1].update(count=19),
    "the last entry": lambda e: e[6].update(reason="another"),
    "a digest of weights": lambda e: e[2]["files"].update({"model.safetensors": "2" * 64}),
    "delta": lambda e: e[0]["mechanism"].update(target_delta=1e-6),
    "sigma everywhere": lambda e: [
        one.update(noise_multiplier=2.0) for one in (e[0]["mechanism"], e[1], e[3], e[5])
    ],
    "a digest": lambda e: e[3].update(digest="3" * 64),
    "order": lambda e: e.insert(3, e.pop(4)),
    "an entry is gone": lambda e: e.pop(3),
    "another first entry": lambda e: e[0].update(run_id="another"),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_an_edit_breaks_the_chain(what, tmp_path):
    path = tmp_path / LEDGER_NAME
    _story(path)
    Ledger.load(path)
    edit(path, lambda content: TAMPERING[what](content["entries"]))
    with pytest.raises(PrivacyError, match="does not fit its digest"):
        Ledger.load(path)


def test_what_a_chain_cannot_show(tmp_path):
    """It shows edits, not lies: these have to be found by other means, if at all."""
    path = tmp_path / LEDGER_NAME
    honest = _story(path)
    edit(path, lambda content: content["entries"].pop())
    rolled_back = Ledger.load(path)
    assert rolled_back.private
    assert rolled_back.links == honest.links[:-1]
    assert honest.has_ended_with(rolled_back.head)
    assert not rolled_back.has_ended_with(honest.head)
    rewrite(path, lambda content: content["entries"][1].update(count=20_000))
    assert Ledger.load(path).steps == 20_012


def test_each_head_that_a_chain_had_can_be_checked_later(tmp_path):
    ledger = Ledger.start(MECHANISM)
    heads = [ledger.head]
    for _ in range(4):
        ledger.record()
        heads.append(ledger.head)
    middle = Ledger(ledger.links)
    ledger.snapshot(4)
    ledger.record(3)
    heads.append(ledger.head)
    assert all(map(ledger.has_ended_with, heads))
    assert len(set(heads)) == 6
    assert ledger.goes_on_from(middle)
    assert not middle.goes_on_from(ledger)
    middle.record()
    assert not ledger.goes_on_from(middle), "5 releases and then weights is not 4"
    assert not ledger.has_ended_with(middle.head)


def test_saving_the_same_weights_again_is_one_entry():
    ledger = ledger_of(2)
    ledger.snapshot(2, {"a.bin": "1" * 64})
    head = ledger.head
    assert ledger.snapshot(2, {"a.bin": "1" * 64}).head == head
    assert ledger.snapshot(2, {"a.bin": "2" * 64}).head != head


@pytest.mark.parametrize("how", ["starts", "resumes"])
def test_a_run_stops_when_another_writes_where_it_did(how, run):
    """Its next record would write over what the other one released."""
    one, another = (
        Ledger.resume(*run, MECHANISM, updates=20)
        if how == "resumes"
        else ledger_of(steps, path=run[0])
        for steps in (1, 5)
    )
    with pytest.raises(PrivacyError, match="since this run last wrote it"):
        one.record()
    another.record()
    assert Ledger.load(run[0]) == _unplaced(another)


def test_a_live_file_that_was_deleted_is_written_again(tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = ledger_of(3, path=path)
    path.unlink()
    ledger.record()
    assert Ledger.load(path).steps == 4


def test_releases_on_other_data_are_recorded_and_do_not_compose():
    first, alone = ledger_of(100), ledger_of(50)
    first.mark_not_private("the first")
    second = ledger_of(50, continues=first, same_data=False)
    assert second.private
    assert second.epsilon() == alone.epsilon()
    assert [run.steps for run in second.runs] == [100, 50]
    third = Ledger.start(MECHANISM, continues=second)
    assert third.not_private_reasons == ["the first"], "the same data as any run before it"


@pytest.mark.parametrize("change", [{"adjacency": "replace_one"}, {"privacy_unit": "author"}])
def test_runs_about_different_neighbours_do_not_add_up(change):
    first = Ledger.start(MECHANISM)
    with pytest.raises(PrivacyError, match=f"{next(iter(change))}=.* do not add up"):
        Ledger.start(replace(MECHANISM, **change), continues=first)
    Ledger.start(replace(MECHANISM, **change), continues=first, same_data=False)


IMPOSSIBLE = {
    (): [("schema_version", 7)],
    ("entries",): [(0, [])],
    (0,): [
        *(("kind", "end"), ("run_id", 5), ("at", ""), ("versions", {"torch": 2})),
        *(("schema", SCHEMA_VERSION + 1), ("continues", "same data"), ("mechanism", [])),
    ],
    (1,): [
        *(("count", 0), ("count", True), ("noise_multiplier", 100.0), ("sample_rate", 1e-6)),
        *(("order", 1), ("digest", "1" * 63), ("count", 10**30)),
    ],
    (2,): [
        *(("updates", 21), ("updates", -1)),
        *(("files", []), ("files", {"model.safetensors": "1" * 63})),
    ],
    (4,): [("changes", {"noise_multiplier": "1"}), ("changes", {"accountant": 5})],
    (6,): [("reason", "")],
    (0, "mechanism"): [
        *(("noise_multiplier", -1.5), ("noise_multiplier", "Infinity"), ("sample_rate", 0)),
        *(("target_delta", 1.0), ("target_epsilon", 0.0), ("max_grad_norm", 0.0)),
        *(("target_delta", 5e-324), ("norm_directions", 64)),
        *(("expected_batch_size", "Infinity"), ("num_samples", 0), ("projection_rank", 0)),
        *(("projection_seed", 1.5), ("method", ""), ("clipping", "ghost")),
        ("num_trials", 10.0),  # which older versions counted in epsilon
    ],
}
"""Where in a file something impossible stands: the keys there, and their values."""


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [(place, *pair) for place, pairs in IMPOSSIBLE.items() for pair in pairs],
    ids=str,
)
def test_a_file_that_says_something_impossible_is_refused(place, key, value, tmp_path):
    path = tmp_path / LEDGER_NAME
    _story(path)

    def change(content):
        for step in ("entries", *place) if place and place[0] != "entries" else place:
            content = content[step]
        content[key] = value

    (edit if key in (0, "digest") else rewrite)(path, change)
    with pytest.raises(PrivacyError) as refusal:
        Ledger.load(path)
    assert "does not fit its digest" not in str(refusal.value)
    shown = next(iter(value.values()), "") if isinstance(value, dict) else value
    parts = (str(path), str(key), str(shown).replace("Infinity", "inf"))
    for part in parts if key != 0 else parts[:1]:
        assert part in str(refusal.value)


@pytest.mark.parametrize("place", [None, 0, 1, 2, 4, 6], ids=str)
def test_a_missing_key_is_refused(place, tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = _story(path)
    whole = content_of(path)
    for key in ("schema_version",) if place is None else whole["entries"][place]:

        def drop(content, key=key):
            del (content if place is None else content["entries"][place])[key]

        ledger.save(path)
        edit(path, drop)
        with pytest.raises(PrivacyError, match=key):
            Ledger.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.clear(), "must begin with a 'start'"),
        (lambda e: e.pop(0), "'releases' comes before any 'start'"),
        (lambda e: e.append(dict(e[0])), "continues=None, but 1 runs come before"),
        (lambda e: e.append(e[0] | {"continues": "same data"}), "is that of a run before it"),
    ],
)
def test_entries_that_do_not_belong_together_are_refused(change, message, tmp_path):
    path = tmp_path / LEDGER_NAME
    _story(path)
    rewrite(path, lambda content: change(content["entries"]))
    with pytest.raises(PrivacyError, match=message):
        Ledger.load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"sample_rate": 0.0625', '"sample_rate": NaN'),
        ('"max_grad_norm": 0.5', '"max_grad_norm": Infinity'),
        ('"max_grad_norm": 0.5', '"max_grad_norm": 1' + "0" * 400),
        ('"count": 20', '"count": 2' + "0" * 5000),
        ('"count": 20', '"count": ' + "[" * 100_000),
        ('"count": 20', '"count": 2, "count": 20'),
    ],
    ids=["nan", "inf", "huge", "endless", "deep", "twice"],
)
def test_a_file_that_is_not_strict_json_is_refused(old, new, tmp_path):
    path = tmp_path / LEDGER_NAME
    Ledger.start(MECHANISM, path).record(20)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PrivacyError, match=str(path)):
        Ledger.load(path)


@pytest.mark.parametrize("version", [0, FILE_VERSION + 1])
def test_any_file_of_another_schema_raises_the_same_error(version, tmp_path):
    path = tmp_path / LEDGER_NAME
    path.write_text(json.dumps({"schema_version": version, "releases": [], "later": {}}))
    with pytest.raises(PrivacyError) as refusal:
        Ledger.load(path)
    assert str(refusal.value).startswith(
        f"no valid privacy ledger at {path}: schema_version={version} is unknown; this version "
        f"reads 1 and {FILE_VERSION}. Read the file with the version of dp_grape_hf that wrote it."
    )
    for shape in ("[]", "{}"):
        path.write_text(shape)
        with pytest.raises(PrivacyError, match="schema_version=None"):
            Ledger.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"num_samples": 10.0}, r"num_samples=10\.0 must be of type int"),
        ({"clipping": "per_layer"}, "clipping='per_layer' must be .* that wrote it"),
        ({"max_batch_size": 128}, "max_batch_size=128 must be None"),
        ({"norm_directions": 64}, "norm_directions=64 must be None"),  # of an older version
    ],
    ids=str,
)
def test_a_wrong_mechanism_is_refused_by_field(change, message):
    with pytest.raises(PrivacyError, match=message):
        replace(MECHANISM, **change)
