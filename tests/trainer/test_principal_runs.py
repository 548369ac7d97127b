"""Runs whose P has principal directions: of what it is a function, and what becomes of it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch import Tensor

from dp_grape_hf import PrivacyError
from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.ledger.entries import Projection
from dp_grape_hf.projections import default_targets, principal_directions, synthetic_batches
from dp_grape_hf.trainer.data import refuse_public_dataset
from tests.support.models import only
from tests.support.trainers import Examples, Watch, examples_of, make_args, make_trainer

BERT = "bert-classifier"
SETTINGS: dict[str, Any] = {"projection": "principal", "projection_update_steps": None}


def trainer_of(folder: Path, **changes: Any) -> Any:
    settings = {"model": only(BERT).model(), "train_dataset": examples_of(BERT, 24)} | SETTINGS
    return make_trainer(folder, **settings | changes)


def matrices(trainer: Any) -> dict[str, Tensor]:
    return {name: p.matrix for name, p in trainer.private_run.projectors.items()}


def digests(folder: Path) -> list[str]:
    entries = (link.entry for link in Ledger.load(folder / LEDGER_NAME).links)
    return [entry.sha256 for entry in entries if isinstance(entry, Projection)]


@pytest.mark.slow
def test_p_is_the_same_bit_by_bit_whatever_the_training_data(tmp_path: Path) -> None:
    fewer = {"train_dataset": examples_of(BERT, 8, seed=5), "num_samples": 24, "max_grad_norm": 0.1}
    one, other = trainer_of(tmp_path / "one"), trainer_of(tmp_path / "other", **fewer)
    for trainer in (one, other):
        trainer.train()
    assert set(matrices(one)) == set(default_targets(one.model))
    assert all(torch.equal(matrices(one)[name], p) for name, p in matrices(other).items())
    assert digests(tmp_path / "one") == digests(tmp_path / "other")
    assert len(digests(tmp_path / "one")) == 1


@pytest.mark.slow
def test_p_is_of_the_weights_before_training_and_of_synthetic_inputs(tmp_path: Path) -> None:
    """Another seed is another sample of the same inputs."""
    model = only(BERT).model()
    expected = principal_directions(
        model.eval(),
        dict.fromkeys(default_targets(model), 2),
        lambda: synthetic_batches(model),
    )
    one, other = (trainer_of(tmp_path / str(seed), projection_seed=seed) for seed in (0, 1))
    for trainer in (one, other):
        trainer.train()
    for name, p in matrices(one).items():
        assert torch.equal(p, expected[name].directions)
        assert not torch.equal(p, matrices(other)[name])
        assert torch.linalg.svdvals(p.T @ matrices(other)[name])[0] > 0.9


def test_what_training_does_not_touch_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.start()
    state = torch.get_rng_state()
    trainer.model.train()
    trainer.private_run.projectors_at(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in trainer.model.modules())


# ---- Made anew, and resumed ----


@pytest.mark.slow
def test_directions_of_current_weights_are_measured_every_f_steps(tmp_path: Path) -> None:
    trainer_of(tmp_path, projection_update_steps=2, learning_rate=0.3, max_steps=5).train()
    found = digests(tmp_path)
    assert len(found) == len(set(found)) == 3


@pytest.mark.slow
def test_a_resumed_run_has_the_p_that_it_began_with(tmp_path: Path) -> None:
    settings = {
        "projection_update_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 8,
        "learning_rate": 0.1,
    }
    stopped = trainer_of(tmp_path, callbacks=[Watch(stop_at=2)], **settings)
    stopped.train()
    resumed = trainer_of(tmp_path, callbacks=[Watch(stop_at=3)], **settings)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(matrices(stopped)[name], p) for name, p in matrices(resumed).items())
    assert len(digests(tmp_path)) == 1


@pytest.mark.slow
def test_another_p_than_the_ledger_has_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer_of(tmp_path, callbacks=[Watch(stop_at=2)], **settings).train()
    path = tmp_path / "checkpoint-2" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    for matrix in state["projection"]["matrices"].values():
        matrix.neg_()
    torch.save(state, path)
    with pytest.raises(PrivacyError, match="the projection has the digest"):
        trainer_of(tmp_path, **settings).train(resume_from_checkpoint=True)


# ---- On public data ----


@pytest.mark.slow
def test_a_public_dataset_is_measured_on_and_named(tmp_path: Path) -> None:
    public = examples_of(BERT, 10, seed=9)
    trainer = trainer_of(tmp_path, public_dataset=public, eval_strategy="no")
    trainer.train()
    trainer.save_model()
    rows = {key: torch.stack([row[key] for row in public.examples]) for key in public[0]}
    rows.pop("labels")
    expected = principal_directions(
        only(BERT).model().eval(), dict.fromkeys(matrices(trainer), 2), lambda: [rows]
    )
    for name, p in matrices(trainer).items():
        assert torch.linalg.svdvals(p.T @ expected[name].directions).min() > 0.999
    assert Ledger.load(tmp_path / LEDGER_NAME).mechanism.public_dataset == "Examples, 10 examples"
    card = (tmp_path / CARD_NAME).read_text()
    assert "| Not protected, as declared public | Examples, 10 examples |" in card


def test_the_training_data_is_no_public_dataset(tmp_path: Path) -> None:
    data = examples_of(BERT, 24)
    with pytest.raises(PrivacyError, match="public_dataset is the train_dataset"):
        trainer_of(tmp_path, train_dataset=data, public_dataset=data)
    again = examples_of(BERT, 24)
    data._fingerprint = again._fingerprint = "loaded twice"  # type: ignore[attr-defined]
    with pytest.raises(PrivacyError, match="public_dataset is the train_dataset"):
        trainer_of(tmp_path, train_dataset=data, public_dataset=again)


def test_rows_of_the_training_data_are_not_public(tmp_path: Path) -> None:
    data, other = examples_of(BERT, 24), examples_of(BERT, 3, seed=9)
    without = [{k: v for k, v in row.items() if k != "labels"} for row in data.examples]
    for copied in (copy.deepcopy(data), Examples([*other.examples, without[23]])):
        with pytest.raises(PrivacyError, match=r"public_dataset\[\d\] has the contents of an"):
            trainer_of(tmp_path, train_dataset=data, public_dataset=copied)
    trainer_of(tmp_path, train_dataset=data, public_dataset=other)


def tokens(count: int = 40, seed: int = 0, **columns: Any) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 7, (count,), generator=generator).tolist()
    ids = [torch.randint(50, (n,), generator=generator).tolist() for n in lengths]
    masks = [[1] * n for n in lengths]
    labels = torch.randint(2, (count,), generator=generator).tolist()
    held = {"input_ids": ids, "attention_mask": masks, "labels": labels, "idx": range(count)}
    return datasets.Dataset.from_dict(held | columns)


def pictures(count: int = 12, seed: int = 0) -> datasets.Dataset:
    values = np.random.default_rng(seed).integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)
    features = {"image": datasets.Image(), "label": datasets.Value("int64")}
    rows = {"image": [*map(Picture.fromarray, values)], "label": [0] * count}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def nested(count: int = 12, seed: int = 0) -> datasets.Dataset:
    words = tokens(count, seed)["input_ids"]
    said = [[{"role": "user", "content": f"Of {w}?"}] for w in words]
    return datasets.Dataset.from_dict({"messages": said, "raw": [bytes(w) for w in words]})


def pixels(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"pixel_values": [torch.tensor(np.asarray(image)) / 255 for image in batch["image"]]}


COPIES: dict[str, Callable[[datasets.Dataset], Any]] = {
    "loaded again": copy.deepcopy,
    "shuffled": lambda data: data.shuffle(seed=3),
    "a part": lambda data: data.select([len(data) - 1]),
    "rows": datasets.Dataset.to_list,
    "from rows": lambda data: datasets.Dataset.from_list([*data]),
    "the last of the first 512": lambda data: datasets.concatenate_datasets(
        [tokens(511, seed=1), data]
    ),
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("loaded again", nested),
        ("shuffled", tokens),
        ("a part", pictures),
        ("rows", nested),
        ("from rows", pictures),
        ("the last of the first 512", tokens),
    ],
)
def test_copies_are_told_by_their_contents(how: str, kind: Callable[..., Any]) -> None:
    args = make_args("unused", **SETTINGS)
    data = kind()
    copied = COPIES[how](data)
    with pytest.raises(PrivacyError, match=r"public_dataset( is|\[\d+\] has the contents)"):
        refuse_public_dataset(copied, data, args)
    refuse_public_dataset(COPIES[how](kind(seed=2)), data, args)


@pytest.mark.parametrize(
    "form",
    [
        lambda data: data.remove_columns(["labels", "attention_mask", "idx"]),
        lambda data: tokens(labels=[7] * len(data), idx=[*range(100, 100 + len(data))]),
        lambda data: data.with_format("torch"),
        lambda data: [{"input_ids": np.array(ids)} for ids in data["input_ids"]],
        lambda data: [{"input_ids": tuple(ids), "side": 1.5} for ids in data["input_ids"]],
        lambda data: data.add_column("text", ["?"] * len(data)).with_transform(
            lambda batch: {"input_ids": batch["input_ids"][:2]}
        ),
    ],
)
def test_copies_in_another_form_are_told(form: Callable[[datasets.Dataset], Any]) -> None:
    args = make_args("unused", **SETTINGS)
    state = torch.get_rng_state()
    for pair in ((form(tokens()), tokens()), (tokens(), form(tokens()))):
        with pytest.raises(PrivacyError, match=r"public_dataset\[0\] has the contents"):
            refuse_public_dataset(*pair, args)
    refuse_public_dataset(form(tokens(seed=2)), tokens(seed=3), args)
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_of_what_a_transform_makes_are_told() -> None:
    args = make_args("unused", **SETTINGS)
    data = pictures().with_transform(pixels)
    made = [{"pixel_values": data[i]["pixel_values"]} for i in (3, 5)]
    for copied in (made, pictures().select([4]), pictures().select([4]).with_transform(pixels)):
        with pytest.raises(PrivacyError, match=r"public_dataset\[0\] has the contents"):
            refuse_public_dataset(copied, data, args)
    other = pictures(seed=2).with_transform(pixels)
    refuse_public_dataset([other[0]], data, args)


@pytest.mark.parametrize(
    ("public", "data"),
    [
        ([{"idx": 0, "labels": 1}], [{"idx": 0, "labels": 1}]),  # numbers of rows and classes
        ([{"user": "a", "text": "x"}], [{"user": "a", "text": "y"}]),
        ([{"user": "a", "words": "x"}], [{"user": "a", "text": "x"}]),
        ([{"text": "", "labels": 1}], [{"text": "", "labels": 1}]),
        ([{"ids": [1, 2], "attention_mask": [1, 1]}], [{"attention_mask": [1, 1]}]),
        ([{"x": [1, 2]}], [{"x": [[1, 2]]}]),
        ([{"x": ["ab", "c"]}], [{"x": ["a", "bc"]}]),
    ],
)
def test_what_many_rows_have_alike_is_no_overlap(public: Any, data: Any) -> None:
    unit = {"privacy_unit_column": "user", "expected_batch_size": 1}
    refuse_public_dataset(public, data, make_args("unused", **SETTINGS, **unit))


@pytest.mark.parametrize(
    ("public", "data"),
    [
        ([{"age": 31, "height": 1.75}], [{"age": 31, "height": 1.75, "labels": 1}]),
        ([{"labels": [4, 5]}], [{"labels": [4, 5]}]),
        ([([1.5], 0)], [([1.5], 0)]),
    ],
)
def test_rows_without_texts_are_told_by_what_they_have(public: Any, data: Any) -> None:
    with pytest.raises(PrivacyError, match=r"public_dataset\[0\] has the contents"):
        refuse_public_dataset(public, data, make_args("unused", **SETTINGS))


def test_what_is_shared_is_not_quoted() -> None:
    rows = [{"text": "my secret"}]
    with pytest.raises(PrivacyError, match=r"public_dataset\[0\]") as caught:
        refuse_public_dataset(rows, [*rows, {"text": "more"}], make_args("unused", **SETTINGS))
    assert "secret" not in str(caught.value)


def test_a_public_dataset_that_nothing_looks_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="projection='gaussian' measures nothing on it"):
        trainer_of(tmp_path, projection="gaussian", public_dataset=examples_of(BERT, 4))


# ---- Refused ----


def test_a_model_that_reads_unknown_inputs_is_measured_by_form_or_public_data(
    tmp_path: Path,
) -> None:
    make_trainer(tmp_path / "by_form", **SETTINGS).train()
    rows = Examples([{"x": torch.randn(6)} for _ in range(4)])
    make_trainer(tmp_path, public_dataset=rows, **SETTINGS).train()


def test_a_model_that_fails_on_synthetic_inputs_is_refused_with_the_cause(tmp_path: Path) -> None:
    model = only(BERT).model()
    model.bert.register_forward_pre_hook(_needs_more, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="where is token_type_ids"):
        trainer_of(tmp_path, model=model).train()


def _needs_more(module: Any, args: Any, kwargs: Any) -> None:
    if "token_type_ids" not in kwargs:
        raise ValueError("where is token_type_ids")
