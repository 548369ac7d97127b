"""The recipes on images: every loader, the batches, the presets, and a few steps of training."""

import gzip
import io

import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as Picture
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from recipes.paper import vit
from recipes.paper.experiment import CONFIGS, main, parse
from recipes.paper.images import Batches, Images, Source, load_images
from tests.support.experiments import resumed
from tests.support.images import SMALL, both_splits, random_arrays, words, write_idx, write_mnist

COLOUR = Source("someone/colour", "img", "fine_label", 10)
GREY = Source("someone/grey", "image", "label", 10)
PRESETS = sorted(path.stem.removeprefix("vit_") for path in CONFIGS.glob("vit_*.yaml"))


def assert_loaded(loaded, arrays):
    assert loaded.keys() == arrays.keys()
    for split, (pixels, labels) in arrays.items():
        array = pixels[..., None] if pixels.ndim == 3 else pixels  # (N, H, W, C)
        assert torch.equal(loaded[split].pixels, torch.tensor(array).permute(0, 3, 1, 2))
        assert loaded[split].pixels.dtype is torch.uint8
        assert loaded[split].labels.tolist() == labels.tolist()


@pytest.mark.parametrize("ending", [".gz", ""])
def test_idx_files_are_read(ending, tmp_path):
    arrays = both_splits((5, 7))
    write_mnist(tmp_path, arrays, ending)
    assert_loaded(load_images(GREY, str(tmp_path)), arrays)


def write_pictures(path, pixels, labels, form="PNG"):
    """Writes encoded images back to back; those in PNG come back as they were."""
    files = []
    for array in pixels:
        buffer = io.BytesIO()
        Picture.fromarray(array).save(buffer, format=form)
        files.append(np.frombuffer(buffer.getvalue(), dtype=np.uint8))
    offsets = np.cumsum([0, *(len(file) for file in files)])
    np.savez(path, jpeg=np.concatenate(files), offsets=offsets, label=labels)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_arrays_and_encoded_images_are_read_by_their_name(shape, tmp_path):
    arrays, others = both_splits(shape), both_splits(shape, counts=(3, 2))
    for split in ("train", "test"):
        write_pictures(tmp_path / f"full_{split}.npz", *arrays[split])
        np.savez(tmp_path / f"part_{split}.npz", img=others[split][0], label=others[split][1])
    assert_loaded(load_images(COLOUR, str(tmp_path / "full")), arrays)
    assert_loaded(load_images(COLOUR, str(tmp_path / "part")), others)


def test_what_jpeg_has_changed_is_marked(tmp_path):
    for split, form in (("train", "JPEG"), ("test", "PNG")):
        write_pictures(tmp_path / f"a_{split}.npz", *random_arrays(4, (8, 8, 3), seed=0), form=form)
    given = words(
        tmp_path, tmp_path / "a", "CIFAR-10", num_channels=3, model_name_or_path="vit-base"
    )
    experiment = vit.load(*parse(vit.FAMILY, given))
    note = "train: images were stored as JPEG, which changes them a little"
    assert experiment.notes == [note]


def test_images_of_the_hub_are_those_of_the_named_columns(monkeypatch):
    arrays = both_splits((5, 7, 3))

    def hub(name, config, split, **others):
        pixels, labels = arrays[split]
        columns = {
            "img": [Picture.fromarray(array) for array in pixels],
            "fine_label": labels.astype(int),
            "coarse_label": np.zeros(len(labels), int),
        }
        return Dataset.from_dict(columns).cast_column("img", Image())

    monkeypatch.setattr("recipes.paper.data.load_dataset", hub)
    assert_loaded(load_images(COLOUR), arrays)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"
WRONG = np.array([0, 1, 2, 10], dtype=np.uint8)
DAMAGES = {
    "go from 0 to 10, and those of the task from 0 to 9": lambda folder: write_idx(
        folder / LABELS.format("t10k"), WRONG
    ),
    r"says \(6, 5, 7\), and holds 209 numbers": lambda folder: (folder / IMAGES).write_bytes(
        gzip.compress(gzip.decompress((folder / IMAGES).read_bytes())[:-1])
    ),
    r"must hold one train-labels-idx1-ubyte\*, and holds 0": lambda folder: (
        folder / LABELS.format("train")
    ).unlink(),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files_are_refused(message, tmp_path):
    write_mnist(tmp_path, both_splits((5, 7)))
    DAMAGES[message](tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_images(GREY, str(tmp_path))


def one_image(rows):
    return [{"pixel_values": torch.tensor([rows], dtype=torch.uint8), "labels": torch.tensor(3)}]


def test_bytes_are_normalised_and_grey_fills_all_channels():
    batch = Batches(size=2, channels=3, mean=0.5, std=0.25)(one_image([[0, 255], [51, 204]]))
    expected = torch.tensor([[-2.0, 2.0], [-1.2, 1.2]]).expand(1, 3, 2, 2)
    torch.testing.assert_close(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == [3]


def test_shrinking_averages():
    rows = [[0, 51, 102, 255]] * 4
    batch = Batches(size=2, channels=1, mean=0.0, std=1.0)(one_image(rows))
    # A triangle twice as wide as at full size: centres at distances 1/2, 1/2, 3/2 weigh 3, 3, 1.
    left, right = (3 * 0 + 3 * 0.2 + 0.4) / 7, (3 * 1 + 3 * 0.4 + 0.2) / 7
    torch.testing.assert_close(
        batch["pixel_values"], torch.tensor([left, right]).expand(1, 1, 2, 2)
    )


def test_an_image_does_not_depend_on_its_batch():
    pixels, labels = random_arrays(5, (3, 9, 9), seed=0)
    images = Images(torch.tensor(pixels), torch.tensor(labels.astype(np.int64)))
    batches = Batches(size=6, channels=3, mean=0.5, std=0.5)
    together = batches([images[i] for i in range(5)])["pixel_values"]
    alone = torch.cat([batches([images[i]])["pixel_values"] for i in range(5)])
    assert torch.equal(together, alone)


def test_colours_do_not_fit_one_channel():
    images = Images(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="Images of 3 channels do not fit num_channels=1"):
        Batches(size=2, channels=1, mean=0.5, std=0.5)([images[0]])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    write_mnist(folder, both_splits((8, 8), counts=(40, 20)))
    return folder


def run(folder, data, **changes):
    return main(vit.FAMILY, words(folder, data, **changes))


def test_a_run_from_scratch_is_scored_on_the_test_split(tmp_path, data):
    result = run(tmp_path, data, curve_steps=1)
    assert result["splits"] == {"train": 40, "test": 20}
    assert [point["step"] for point in result["curve"]] == [1, 2]
    assert result["metrics"] == {"test": {"accuracy": result["curve"][-1]["accuracy"]}}
    assert result["privacy"]["private"]
    assert result["privacy"]["steps"] == 2


@pytest.mark.slow
def test_a_killed_run_resumes_and_leaves_a_plain_model(tmp_path, data):
    """By the same command; a processor makes of images what the recipe does."""
    options = {"config": "reference_code", "noise_multiplier": None, "target_epsilon": 8}
    command = words(tmp_path, data, **options, max_steps=60, save_model=True, curve_steps=5)
    command.append("--held_out=False")
    _, result, path = resumed(vit.FAMILY, command, tmp_path / "out")
    updates = Ledger.load(path / LEDGER_NAME).updates  # fewer by the steps after the checkpoint
    assert updates is not None
    assert 60 - 6 <= updates <= 60  # a checkpoint is saved every 6 steps
    assert [point["step"] for point in result["curve"]] == list(range(5, updates + 1, 5))
    model = AutoModelForImageClassification.from_pretrained(path)
    processor = AutoImageProcessor.from_pretrained(path)
    test = load_images(vit.SOURCES["MNIST"], str(data))["test"]
    pictures = [Picture.fromarray(pixels[0].numpy()) for pixels in test.pixels]
    found = model(**processor(pictures, return_tensors="pt")).logits.argmax(-1)
    right = 100 * (found == test.labels).float().mean().item()
    assert result["metrics"] == {"test": {"accuracy": pytest.approx(right)}}


def test_a_search_holds_out_data_and_never_reads_the_test(tmp_path, data):
    result = run(tmp_path, data, held_out=True, task="FASHION-MNIST")
    assert result["splits"] == {"train": 32, "dev": 8}
    assert list(result["metrics"]) == ["dev"]


def test_training_examples_are_drawn_by_the_seed(tmp_path, data):
    assert run(tmp_path, data, train_examples=10)["splits"]["train"] == 10
    rows = list(range(100))
    assert list(vit.drawn(rows, 10, seed=1)) == list(vit.drawn(rows, 20, seed=1))[:10]
    assert list(vit.drawn(rows, 10, seed=1)) != list(vit.drawn(rows, 10, seed=2))
    with pytest.raises(ValueError, match="train_examples=101 must be from 1 to 100"):
        vit.drawn(rows, 101, seed=1)


def test_fine_tuning_starts_from_the_checkpoint_with_another_head(tmp_path, data):
    shape = {k: v for k, v in SMALL.items() if k in vit._SHAPE}
    saved = ViTForImageClassification(ViTConfig(**shape, intermediate_size=32, num_labels=5))
    saved.save_pretrained(tmp_path / "model")
    no_shape = dict.fromkeys(vit._SHAPE)
    given = {"model_name_or_path": tmp_path / "model", **no_shape}
    command = words(tmp_path, data, "CIFAR-10-fine-tune", **given)
    model = vit.build_model(parse(vit.FAMILY, command)[0], classes=10)
    assert model.classifier.weight.shape == (10, 16)
    for name, value in model.state_dict().items():
        assert name.startswith("classifier.") or torch.equal(value, saved.state_dict()[name])
    result = main(vit.FAMILY, command)
    assert result["script"]["from_scratch"] is False
    assert result["privacy"]["steps"] == 2


def test_a_task_that_fine_tunes_does_not_start_from_scratch(tmp_path, data):
    with pytest.raises(ValueError, match=r"starts from a checkpoint.*or the task 'CIFAR-10'"):
        run(tmp_path, data, task="CIFAR-10-fine-tune", from_scratch=True)


def test_the_shape_of_a_checkpoint_is_not_changed(tmp_path, data):
    script, _ = parse(vit.FAMILY, words(tmp_path, data, "CIFAR-10-fine-tune"))
    with pytest.raises(ValueError, match=r"image_size=8, .* is that of its checkpoint"):
        vit.build_model(script, classes=10)


def test_a_configuration_in_a_folder_may_be_changed(tmp_path, data):
    ViTConfig(num_hidden_layers=3, hidden_act="relu").save_pretrained(tmp_path)
    given = words(tmp_path, data, model_name_or_path=tmp_path, num_hidden_layers=None)
    config = vit.build_model(parse(vit.FAMILY, given)[0], classes=10).config
    assert (config.hidden_act, config.num_hidden_layers) == ("relu", 3)
    assert (config.hidden_size, config.intermediate_size, config.num_labels) == (16, 64, 10)


def test_built_in_sizes_are_those_of_the_paper():
    script = vit.ViTArguments(task="MNIST", model_name_or_path="vit-base", from_scratch=True)
    with torch.device("meta"):
        model = vit.build_model(script, classes=10)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 85.8
    assert (model.config.image_size, model.config.patch_size) == (224, 16)


def test_class_token_and_position_table_may_be_frozen(tmp_path, data):
    tables = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    for frozen, expected in ((True, tables), (False, set())):
        script, _ = parse(vit.FAMILY, words(tmp_path, data, freeze_embeddings=frozen))
        model = vit.build_model(script, classes=10)
        assert {name for name, p in model.named_parameters() if not p.requires_grad} == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_every_delta_is_below_one_over_the_number_of_examples(preset):
    for task in ("MNIST", "CIFAR-100", "CIFAR-10-fine-tune"):
        words = [f"--config={preset}", f"--task={task}", "--target_epsilon=2", "--use_cpu"]
        script, args = parse(vit.FAMILY, words)
        size = 60_000 if "MNIST" in task else 50_000
        assert args.target_delta < 1 / size or script.held_out
        assert args.target_delta < 1 / (size * (1 - vit.HELD_OUT))
        fine_tuned = task.endswith(vit.FINE_TUNE)
        assert script.from_scratch != fine_tuned or preset in ("small", "chosen")
