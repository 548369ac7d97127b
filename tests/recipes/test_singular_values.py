"""Singular values of gradients: those of the definition, for images and for texts."""

import json
import math

import pytest
import torch

from recipes.paper import singular_values
from recipes.paper.opt import choice_loss, score_answers
from recipes.paper.opt_tasks import Collator
from tests.support import images as mnist, questions
from tests.support.models import only
from tests.support.oracles import single_sample_gradients

GRID = ["--bounds", "0.5", "1e9", "--noise_multipliers", "2", "--top=4"]


@pytest.fixture
def images(tmp_path):
    """Training and test images, as files of MNIST."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    mnist.write_mnist(folder, mnist.both_splits((8, 8), counts=(40, 20)))
    return folder


def image_words(folder, data):
    given = mnist.words(folder, data, noise_multiplier=None, max_steps=None)
    return ["--family=vit", *given, f"--spectrum_path={folder / 'spectrum.json'}", *GRID]


def test_spectra_are_written(tmp_path, images):
    words = image_words(tmp_path, images)
    result = singular_values.main(words)
    assert json.loads((tmp_path / "spectrum.json").read_text()) == result
    assert result["script"]["task"] == "MNIST"
    settings = [(row["C"], row["sigma"]) for row in result["spectra"]]
    assert settings == [(None, 0.0), (0.5, 0.0), (0.5, 2.0), (1e9, 0.0), (1e9, 2.0)]
    plain, clipped, noisy, unclipped, _ = (row["singular_values"] for row in result["spectra"])
    assert plain == unclipped
    assert all(len(row["singular_values"]) == 4 for row in result["spectra"])
    assert sum(clipped) < sum(plain)
    assert noisy[-1] / noisy[0] > 3 * clipped[-1] / clipped[0]  # noise fills the spectrum
    assert result["notes"][0].startswith("not private")
    assert (result["device"], result["versions"]["torch"]) == ("cpu", torch.__version__)
    assert result.keys() >= {"date", "git_commit"}


def test_clipped_sums_take_all_options_of_an_example_together():
    torch.manual_seed(0)
    model = score_answers(only("opt").model()).eval()
    kinds = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    names = [f"{n}.weight" for n, _ in model.named_modules() if n.rpartition(".")[2] in kinds]
    batch = Collator(pad=1)(questions.examples([5] * 6, options=2, longest=1))
    gradients = single_sample_gradients(model, batch, loss=choice_loss)[1]
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)  # (B,)
    bounds = [math.inf, 1.0]
    expected = {
        bound: {n: torch.tensordot((bound / norms).clamp(max=1), gradients[n], 1) for n in names}
        for bound in bounds
    }
    batches = [
        {name: value[rows] for name, value in batch.items()} for rows in (slice(4), slice(4, 6))
    ]
    found = singular_values.clipped_sums(model, batches, bounds, choice_loss)
    torch.testing.assert_close(found, expected)


def test_spectra_are_means_of_the_largest_singular_values():
    totals = (torch.diag(torch.tensor(values)) for values in ([4.0, 8.0, 2.0], [2.0, 0.0, 1e-6]))
    released = [singular_values.privatised(g, math.inf, 0.0, 2, torch.Generator()) for g in totals]
    assert singular_values.mean_spectrum(released, top=2) == [2.5, 1.0]
    assert singular_values.mean_spectrum(released[1:], top=2) == [1.0, 5e-7]


def test_noise_of_a_privatised_gradient_has_the_deviation_it_should():
    generator = torch.Generator().manual_seed(0)
    noisy = singular_values.privatised(torch.zeros(300, 300), 3.0, 0.5, 10, generator)
    # 90,000 draws: the estimate of the deviation is off by 1.5 % once in 10^9 times.
    assert float(noisy.std()) == pytest.approx(0.5 * 3.0 / 10, rel=0.015)
