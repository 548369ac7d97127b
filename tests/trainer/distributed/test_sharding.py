"""Two and three processes with sharded weights against one; what they do is in ``sharded``."""

import shutil
import signal
from collections import Counter
from typing import Any, cast

import pytest
import torch
from accelerate import ParallelismConfig
from safetensors.torch import load_file

from dp_grape_hf import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import layerwise, replay
from dp_grape_hf.gradients.definition import FunctorchEngine
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import verify
from dp_grape_hf.sharding import shard_
from tests.support.models import only, row
from tests.support.trainers import assert_same_weights, make_trainer
from tests.trainer.distributed.processes import (
    TOLERANCE,
    WAITING,
    assert_same_runs,
    fork,
    launch,
    results,
    seen,
)
from tests.trainer.distributed.sharded import (
    IN_TWO,
    RESUMED,
    SAVED,
    SCENARIOS,
    SHARDED,
    WholeWeights,
    main_of,
    trained,
)

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def one(folder):
    names = [*IN_TWO, "llama, uneven"]
    found = {name: trained(folder / f"{name}-1", name, sharded=False) for name in names}
    noise = {}
    for name in RESUMED:
        place = folder / f"{name}-whole"
        watch = WholeWeights(stop_at=2)
        noise[name] = trained(place, name, sharded=False, watch=watch, **SAVED)["noise"]
        shutil.copytree(place, folder / f"{name}-whole-for-2")
        place = folder / f"{name}-uninterrupted"
        found["uninterrupted", name] = trained(place, name, sharded=False, **SAVED)
    torch.save(noise, folder / "noise.pt")
    return found


@pytest.fixture(scope="module")
def two(folder, one):
    assert fork(2, main_of, str(folder), "two") == [0, 0]
    return seen(folder, 2, SCENARIOS["two"])


@pytest.fixture(scope="module")
def three(folder, two):
    """Three that were started as the README says."""
    flags = ("--use_fsdp", "--fsdp_version", "2")
    launch(folder, 3, main_of.__module__, flags)
    return seen(folder, 3, SCENARIOS["three"])


@pytest.mark.parametrize(
    ("processes", "scenario", "run"),
    [
        *(("two", name, name) for name in IN_TWO),
        ("two", "loaded_by_the_first", "opt"),  # the first process alone has weights
        ("three", "llama, uneven", "llama, uneven"),  # and uneven rows
    ],
)
def test_processes_with_sharded_weights_train_as_one(processes, scenario, run, one, request):
    assert_same_runs(results(request.getfixturevalue(processes), scenario), one[run])


def test_each_process_has_its_rows(two):
    for found in results(two, "spread"):
        assert found["whole"] == 0
        assert 0.4 < found["share"] < 0.6
        assert found["generated"] == (1, 6)
        assert found["metrics"]["eval_loss"] > 0


def test_16_bit_weights_are_rounded_by_the_same_coins(two):
    for sharded, whole in results(two, "rounded"):
        for name, weight in sharded.items():
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight, whole[name]), name


def test_autocast_computes_what_it_does_without(two):
    for sharded, whole in results(two, "autocast"):
        for ours, theirs in zip(sharded["weights"], whole["weights"], strict=True):
            assert_same_weights(ours, theirs, **TOLERANCE)


def status_of(folder):
    return {check.what: check.status for check in verify(folder)}


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_is_that_of_one_process(name, folder, one, two):
    results(two, "save")
    places = (folder / f"{name}-sharded-kept", folder / f"{name}-whole")
    sharded, plain = (place / "checkpoint-2" for place in places)
    names = [
        {p.name for p in place.iterdir() if not p.name.startswith("rng_state")}  # one a process
        for place in (sharded, plain)
    ]
    assert names[0] == names[1]
    (file,) = (n for n in names[0] if n in ("model.safetensors", "adapter_model.safetensors"))
    weights = (load_file(place / file) for place in (sharded, plain))
    assert_same_weights(*weights, **TOLERANCE)
    states = [torch.load(f / "optimizer.pt", weights_only=False) for f in (sharded, plain)]
    shapes = [
        {(i, k): getattr(v, "shape", None) for i, e in s["state"].items() for k, v in e.items()}
        for s in states
    ]
    assert shapes[0] == shapes[1]
    assert status_of(sharded) == status_of(plain)
    assert Ledger.load(sharded / LEDGER_NAME).steps == 2


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_goes_on_from_it(name, processes, one, two, three):
    for found in results({2: two, 3: three}[processes], "resume"):
        expected = one["uninterrupted", name]["weights"][-1]
        assert_same_weights(found[name]["weights"][-1], expected, **TOLERANCE)
        assert found[name]["steps"] == 4


@pytest.mark.parametrize("name", RESUMED)
def test_one_process_goes_on_from_it(name, folder, one, two):
    noise = torch.load(folder / "noise.pt")[name]
    place = folder / f"{name}-sharded-for-1"
    found = trained(place, name, sharded=False, resume=True, stream=noise, **SAVED)
    expected = one["uninterrupted", name]["weights"][-1]
    assert_same_weights(found["weights"][-1], expected, **TOLERANCE)


def test_a_step_gathers_weights_and_scatters_no_gradients(two):
    """In every process and step the same, whatever was sampled; sums are one message."""
    every = [messages for steps in results(two, "bytes_of_a_step") for messages in steps[1:]]
    kinds = Counter(name.removeprefix("c10d::") for name, _ in every[0])
    assert kinds.keys() == {"_allgather_base_", "allreduce_"}
    assert all(messages == every[0] for messages in every)


def test_a_process_that_fails_ends_all(two):
    first, second = (rank["broken_data"] for rank in two)
    assert "the disk of the second machine is gone" in second["error"]
    assert "error" in first
    assert max(first["seconds"], second["seconds"]) < WAITING


def test_a_process_that_is_killed_ends_the_others(folder, one):
    assert fork(2, main_of, str(folder), "killed")[1] == -signal.SIGKILL
    found = torch.load(folder / "killed-0-of-2.pt", weights_only=False)
    assert "error" in found
    assert found["seconds"] < WAITING


def test_what_would_put_a_process_out_of_step_is_refused(monkeypatch):
    """To learn more of a model would run it again, where the others do not."""
    entry = row("T5, seq2seq LM")
    unmasked, masked = entry.batch(4), entry.batch(4)
    for batch, last in ((unmasked, 1), (masked, 0)):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -1] = last
    engine = LayerwiseEngine(entry.model())
    engine(unmasked, {})
    engine.stay_in_step(unmasked, {})
    engine(masked, {})  # which was tried
    monkeypatch.setattr(layerwise, "_with_masks", lambda inputs, padded: inputs)
    monkeypatch.setattr(replay, "_of_other_lengths", lambda engine, batch: batch)
    engine = LayerwiseEngine(entry.model())
    engine(unmasked, {})
    engine.stay_in_step(unmasked, {})
    with pytest.raises(UnsupportedModelError, match=r"SelfAttention.*Remove fsdp"):
        engine(masked, {})


def test_an_engine_that_cannot_stay_in_step_says_so():
    entry = only("opt")
    with pytest.raises(UnsupportedModelError, match="FunctorchEngine does not support"):
        FunctorchEngine(entry.model()).stay_in_step(entry.batch(2), {})


@pytest.mark.parametrize(
    ("layers", "found"), [(["Nothing"], "none"), (["OPTDecoder", "OPTDecoderLayer"], "one inside")]
)
def test_layers_that_cannot_be_sharded(layers, found):
    with pytest.raises(PrivacyError, match=f"OPTForCausalLM has {found}.*transformer_layer_cls"):
        shard_(only("opt").model(), torch.device("cpu"), cast(Any, None), layers)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fsdp_config": {"version": 2, "cpu_offload": True}}, "cpu_offload"),
        ({"fsdp_config": {"version": 2, "activation_checkpointing": True}}, "activation_check"),
        ({"fsdp_config": {"version": 1}}, "of version=1"),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "parallelism_config"),
        ({"engine": "functorch"}, "engine='functorch'"),
        ({"method": "dpzero"}, "method='dpzero'"),
    ],
)
def test_what_sharding_does_not_have(settings, named, tmp_path):
    with pytest.raises(PrivacyError, match=named):
        make_trainer(tmp_path, **SHARDED | settings)
