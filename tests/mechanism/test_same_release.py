"""Runs with known streams release what they released when ``same_release.json`` was written.

Each run is described by a few numbers of every tensor, so the file stays small. Write it anew with

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python -m tests.mechanism.test_same_release

only where a change of the release is meant, and say in the changelog which runs it concerns. Where
a stream is new, as with a family of projections, add its lines and leave the others as they are.
"""

import json
import logging
import tempfile
import zlib
from pathlib import Path

import pytest
import torch

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.ledger.entries import encoded
from dp_grape_hf.mechanism import noise_generator
from dp_grape_hf.mechanism.noise import add_noise_
from dp_grape_hf.projections import ProjectionSchedule, rounding_generator
from dp_grape_hf.projections.seeds import projection_seed_for
from tests.support.models import only
from tests.support.trainers import Examples, examples_of, spy_releases
from tests.trainer.distributed.run import trained

RECORD = Path(__file__).with_name("same_release.json")
# Of a tensor's norm. In float32, with other vector instructions or threads, releases were off by
# less than 3e-6, and five updates, which may cancel, by less than 8e-6.
RELEASE, UPDATE = 1e-5, 5e-5


SETTINGS = {
    "max_steps": 5,
    "expected_batch_size": 4,
    "per_device_train_batch_size": 2,  # a logical batch is several physical ones
    "max_grad_norm": 5.5,  # some samples are clipped and some are not
    "noise_multiplier": 0.1,  # little, so that errors of the clipped sum show
    "lr_scheduler_type": "constant",
}
PROJECTED = {"projection_rank": 4, "projection_update_steps": 2}
CASES = {
    "dp_grape": PROJECTED,
    "units": {**PROJECTED, "privacy_unit_column": "user", "max_examples_per_unit": 2},
    "dp_adam": {"method": "dp_adam"},
    "dpzero": {
        "method": "dpzero",
        "n_directions": 2,
        "perturbation": 0.1,  # losses and weights differ by far more than their rounding
        "learning_rate": 0.05,
    },
}
MODELS = {"bert": "bert-classifier", "opt": "opt", "vit": "vit"}
RUNS = [(model, case) for model in MODELS for case in CASES]
QUICK = [each for each in RUNS if "bert" in each]
CHANGED = "bert", "dp_grape"  # to see that a change is noticed


def model_of(name):
    model = only(MODELS[name]).model(num_hidden_layers=1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            weight.normal_(std=0.2, generator=generator)
            if weight.dim() == 1 and key.endswith("weight"):  # of a norm
                weight.add_(1.0)
    return model


def run(folder, model, case, **changes):
    rows = examples_of(MODELS[model], 18).examples
    with pytest.MonkeyPatch.context() as patch:
        releases = spy_releases(patch)
        settings = {**SETTINGS, **CASES[case], **changes}
        if "privacy_unit_column" in settings:
            rows = [{**row, "user": f"u{i % 7}"} for i, row in enumerate(rows)]
        result = trained(folder, model=model_of(model), train_dataset=Examples(rows), **settings)
    first, *_, last = result["weights"]
    assert len(releases) == SETTINGS["max_steps"]
    return {
        "release": {name: torch.stack([r[name] for r in releases]) for name in releases[0]},
        "update": {name: last[name] - first[name] for name in first},
        "ledger": entries(folder / LEDGER_NAME),
    }


def entries(ledger):
    differs = {"run_id", "at", "versions", "digest"}
    content = [encoded(entry) for entry, _ in Ledger.load(ledger).links]
    return [{key: entry[key] for key in entry if key not in differs} for entry in content]


def described(values):
    """Returns each tensor's norm, its first number and a random linear functional of it."""
    return {name: numbers_of(value.double().flatten()) for name, value in values.items()}


def numbers_of(value):
    weights = torch.randn(len(value), generator=torch.Generator().manual_seed(0)).double()
    return [float(f"{number:.7g}") for number in (value.norm(), value[0], weights @ value)]


def record_of(model, case):
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), model, case)
    return {**found, **{key: described(found[key]) for key in ("release", "update")}}


def seeds():
    """Returns seeds of projections, by seed, redraw, name and block of rows."""
    names = ("bert.encoder.layer.0.attention.self.query.weight", "lm_head.weight", "a/1")
    keys = [(s, r, n, b) for s in (0, 17) for r in (0, 3) for n in names for b in (0, 2)]
    return {" ".join(map(str, key)): projection_seed_for(*key) for key in keys}


def streams():
    shapes = {"body.weight": (60, 40), "head.weight": (1500, 2000)}  # the latter: two blocks of P
    made = {}
    for family in ("gaussian", "gaussian_over_r"):
        schedule = ProjectionSchedule(shapes, family=family, rank=2, update_steps=3, seed=5)
        for step in (0, 3, 7):
            drawn = schedule.at(step)
            made |= {f"{family} {name} {step}": p.matrix for name, p in drawn.items()}
    made["rounding"] = torch.randn(4, generator=rounding_generator(5, 1))
    for kind in ("known", "secret", "secure"):
        generator = (
            torch.Generator() if kind == "known" else noise_generator("cpu", kind != "secret")
        )
        if kind != "known":
            for number, stream in enumerate(generator.streams({"secret": 2, "secure": 4}[kind])):
                stream.manual_seed(number)
        generator.manual_seed(9)
        values = [torch.ones(3, 50), torch.zeros(40_000)]
        add_noise_(values, 1.5, generator, divisor=4.0)
        made |= {f"{kind} noise {i}": value for i, value in enumerate(values)}
    return made


def assert_same(found, expected, tolerance=RELEASE):
    assert found.keys() == expected.keys(), f"{RECORD.name}: a line for each"
    for name, (norm, *_) in expected.items():
        assert found[name] == pytest.approx(expected[name], rel=0, abs=tolerance * norm), name


@pytest.fixture(scope="module")
def record():
    content = json.loads(RECORD.read_text())
    return content


@pytest.mark.parametrize(
    ("model", "case"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in RUNS],
)
def test_a_run_releases_what_it_did(model, case, record):
    found, expected = record_of(model, case), record["runs"][f"{model}, {case}"]
    assert_same(found["release"], expected["release"])
    assert_same(found["update"], expected["update"], UPDATE)
    assert found["ledger"] == expected["ledger"]


def test_seeds_of_projections_are_what_they_were(record):
    assert seeds() == record["seeds"]


def test_known_streams_draw_what_they_did(record):
    assert_same(described(streams()), record["streams"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"max_grad_norm": 5.5 * 1.01},
        {"noise_multiplier": 0.1 * 1.001},
        {"seed_of_draws": 1},
        {"projection_seed": 1},
        {"learning_rate": 1.001e-2},
    ],
    ids=str,
)
def test_another_release_is_noticed(change, tmp_path, record):
    found, expected = run(tmp_path, *CHANGED, **change), record["runs"][", ".join(CHANGED)]
    key, tolerance = ("update", UPDATE) if "learning_rate" in change else ("release", RELEASE)
    with pytest.raises(AssertionError):
        assert_same(described(found[key]), expected[key], tolerance)


def main():
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    content = {
        "seeds": seeds(),
        "streams": described(streams()),
        "runs": {f"{model}, {case}": record_of(model, case) for model, case in RUNS},
    }
    RECORD.write_text(compact(content) + "\n")


def compact(value, depth=0):
    if not isinstance(value, dict) or depth > 3:
        return json.dumps(value)
    inner = ",\n".join(f"{json.dumps(k)}: {compact(v, depth + 1)}" for k, v in value.items())
    return f"{{\n{inner}\n}}"


if __name__ == "__main__":
    main()
