"""What a release holds beyond its noise is seen, and noise alone is not taken for it."""

import math

import pytest
import torch

from dp_grape_hf.accounting import correlated
from dp_grape_hf.mechanism import Signal
from tests.support.trainers import make_trainer

SIZES = {"matrix": (40, 250), "vector": (50,)}


def releases(norm, std, count, factors):
    """Returns a gradient of that norm under fresh noise, several times."""
    generator = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(size, generator=generator) for n, size in SIZES.items()}
    total = math.sqrt(sum(float(value.square().sum()) for value in whole.values()))
    return [
        {
            n: norm / total * value
            + std / factors.get(n, 1.0) * torch.randn(value.shape, generator=generator)
            for n, value in whole.items()
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("factors", [{}, {"vector": 4.0}, {"matrix": 0.5}])
def test_the_norm_under_the_noise_is_found(factors):
    signal, std = Signal(), 0.01
    for release in releases(norm=0.5, std=std, count=20, factors=factors):
        norm = signal.add(release, std, factors)
        own = math.sqrt(sum(float(value.square().sum()) for value in release.values()))
        assert float(norm) == pytest.approx(own)
    found = signal.take()[""]
    assert found.signal == pytest.approx(0.5, rel=0.02)
    energy = sum(math.prod(s) * (std / factors.get(n, 1.0)) ** 2 for n, s in SIZES.items())
    assert found.noise == pytest.approx(math.sqrt(energy / 20))
    window = signal.windows[-1]
    assert window.releases == 20
    assert window.strengths[""].signal == pytest.approx(0.5, rel=0.05)
    assert window.strengths[""].noise == pytest.approx(math.sqrt(energy))
    assert signal.take() == {}


def test_a_signal_below_each_windows_noise_shows_over_the_run():
    """A norm of 0.03 under noise of 1: ten releases do not show it, and a hundred do."""
    signal, std = Signal(), 0.01
    shown = []
    for number, release in enumerate(releases(norm=0.03, std=std, count=300, factors={}), 1):
        signal.add(release, std, {})
        if number % 10 == 0:
            shown.append(signal.take()[""])
    assert shown[0].signal == 0
    assert all(strength.signal == pytest.approx(0.03, rel=0.4) for strength in shown[9:])
    assert shown[-1].signal == pytest.approx(0.03, rel=0.15)  # three means, of 100 releases each
    assert shown[-1].noise == pytest.approx(std * math.sqrt(10_050 / 100), rel=1e-4)


def test_what_other_coordinates_held_is_not_added_to_these():
    signal, vector = Signal(), torch.tensor([3.0, 4.0])
    for turn in (1.0, -1.0):  # a mean of all would be zero
        signal.begin_anew()
        for _ in range(2):
            signal.add({"x": turn * vector}, 0.0, {})
    assert signal.take() == {"": (pytest.approx(5.0), 0.0)}


def test_what_correlated_releases_agree_on_is_found():
    """Each has far more noise than their mean; over 16 steps the latter shows a signal."""
    bands, std = (0.6, 0.5, 0.4, 0.4, 0.2645751311064591), 0.02
    drawn = torch.randn(48, 10_050, generator=torch.Generator().manual_seed(0)).numpy() * std
    noise = torch.from_numpy(correlated(bands, drawn)).float()
    gradient = torch.full((10_050,), 0.5 / 10_050**0.5)
    signal = Signal(bands)
    for window in range(3):
        rows = noise[16 * window : 16 * window + 16]
        for row in rows:
            release = {"matrix": (row + gradient)[:10_000].view(40, 250), "vector": row[10_000:]}
            release["vector"] = release["vector"] + gradient[10_000:]
            norm = signal.add(release, std, {})
            assert float(norm) == pytest.approx(float((row + gradient).norm()), rel=1e-5)
        whole, found = signal.take()[""], signal.windows[-1].strengths[""]
        assert found.signal == pytest.approx(0.5, rel=0.1)
        assert found.noise == pytest.approx(float(rows.mean(0).norm()), rel=0.03)
        assert found.noise < 0.4 * float(norm)
        seen = noise[: 16 * window + 16]
        assert whole.signal == pytest.approx(0.5, rel=0.1)
        assert whole.noise == pytest.approx(float(seen.mean(0).norm()), rel=0.03)
    assert signal.take() == {}


@pytest.mark.parametrize("bands", [(1.0,), (0.8, 0.6)])
def test_noise_alone_is_no_signal(bands):
    """Neither of a window nor of a run. By chance it is one in 2.3 % of the cases."""
    of_windows = of_runs = 0
    for seed in range(60):
        drawn = torch.randn(120, 300, generator=torch.Generator().manual_seed(seed)).numpy()
        signal, strength = Signal(bands), None
        for number, row in enumerate(torch.from_numpy(correlated(bands, drawn)).float(), 1):
            signal.add({"x": row}, 1.0, {})
            if number % 30 == 0:
                strength = signal.take()[""]
        of_windows += sum(window.strengths[""].signal > 0 for window in signal.windows)
        of_runs += strength.signal > 0
    assert of_windows <= 14  # of 240; exceeded by chance: below 0.001
    assert of_runs <= 6  # of 60; exceeded by chance: below 0.001


def test_a_run_logs_the_signal_beside_the_noise(tmp_path):
    """Of 24 examples in each draw, each clipped to C, the mean is no longer than C."""
    trainer = make_trainer(
        tmp_path,
        noise_multiplier=0.1,
        max_grad_norm=0.2,
        expected_batch_size=24,
        max_steps=6,
        logging_steps=2,
        projection_update_steps=100,
    )
    trainer.train()
    logged = [logs for logs in trainer.state.log_history if "signal" in logs]
    assert len(logged) == 3
    for releases, logs in zip((2, 4, 6), logged, strict=True):
        assert 0 < logs["signal"] < 0.2 * 1.05
        std = trainer.private_run.mechanism.independent_std
        sizes = trainer.private_run.per_sample.released_shapes(trainer.private_run.projectors)
        count = sum(math.prod(shape) for shape in sizes.values())
        assert logs["noise"] == pytest.approx(std * math.sqrt(count / releases), rel=1e-4)
