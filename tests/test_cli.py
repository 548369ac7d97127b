"""The command line: what it prints is true, and what it refuses is explained in one line."""

import json
import re
import shlex

import pytest

from dp_grape_hf.accounting import ADJACENCY, compute_epsilon
from dp_grape_hf.cli import DEFAULT_EPSILONS, main

PLAN = "calibrate --num_samples 1000 --expected_batch_size 100 --max_steps 50 --delta 1e-5"
RDP = f"{PLAN} --accountant rdp"


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code: object = main(shlex.split(command))
    except SystemExit as stop:  # argparse's own
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    return err


def test_every_example_in_the_help_prints_what_the_help_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  \$ dp-grape ((?:.*\\\n)*.*)\n((?:  .*\n|\n(?=  ))+)", text, re.M)
    assert len(examples) == 2
    for command, shown in examples:
        printed = run(command.replace("\\\n", ""), capsys)
        assert [line.strip() for line in shown.splitlines()] == [
            line.strip() for line in printed.splitlines()
        ]


def test_the_help_fits_the_terminal_and_explains_every_quantity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for word in ("sigma", "delta", "q ", "C ", "Poisson", ADJACENCY):
        assert word in text


def test_the_default_is_an_aligned_table_over_epsilons(capsys: pytest.CaptureFixture[str]) -> None:
    heading, blank, *table = run(RDP, capsys).splitlines()
    assert heading == f"sample rate 0.1, steps 50, delta 1e-05, adjacency {ADJACENCY}"
    assert blank == ""
    assert len({len(line) for line in table}) == 1
    assert [float(line.split()[0]) for line in table[1:]] == list(DEFAULT_EPSILONS)
    for line in table[1:]:
        asked, sigma, achieved, on_mean = map(float, line.split()[:4])
        epsilon = compute_epsilon(
            noise_multiplier=sigma, sample_rate=0.1, steps=50, delta=1e-5, accountant="rdp"
        )
        assert epsilon <= achieved <= asked
        assert achieved >= 0.999 * asked
        assert on_mean == pytest.approx(sigma / 100, rel=1e-3)


def test_json_carries_the_table_and_the_two_directions_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward = json.loads(run(f"{RDP} --target_epsilon 2 6 --json", capsys))
    assert forward["adjacency"] == ADJACENCY
    assert (forward["sample_rate"], forward["steps"], forward["delta"]) == (0.1, 50, 1e-5)
    assert [row["target_epsilon"] for row in forward["rows"]] == [2, 6]
    sigmas = [row["noise_multiplier"] for row in forward["rows"]]
    given = " ".join(map(str, sigmas))
    back = json.loads(run(f"{RDP} --noise_multiplier {given} --json", capsys))
    assert [row["epsilon"] for row in back["rows"]] == [row["epsilon"] for row in forward["rows"]]
    assert all(row["target_epsilon"] is None for row in back["rows"])


def test_json_stays_valid_without_noise(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(f"{RDP} --noise_multiplier 0 --json", capsys)
    (row,) = json.loads(text, parse_constant=pytest.fail)["rows"]
    assert row["epsilon"] == "inf"
    assert "inf" in run(f"{RDP} --noise_multiplier 0", capsys)


@pytest.mark.parametrize(
    ("epochs", "q", "steps"), [("3", "0.1", 30), ("1", "0.3", 4), ("0.5", "0.01", 50)]
)
def test_an_epoch_is_as_many_steps_as_visit_each_example_once_on_average(
    epochs: str, q: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = f"--sample_rate {q} --num_train_epochs {epochs} --delta 1e-5"
    text = run(f"calibrate {plan} --noise_multiplier 1 --accountant rdp --json", capsys)
    result = json.loads(text)
    assert result["steps"] == steps
    assert result["rows"][0]["noise_std_on_mean_over_max_grad_norm"] is None


def test_the_noise_on_the_mean_needs_only_the_size_of_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = "--num_samples 1000 --sample_rate 0.1 --max_steps 50 --delta 1e-5"
    text = run(f"calibrate {plan} --noise_multiplier 2 --accountant rdp", capsys)
    assert text.splitlines()[-1].split() == ["2", text.split()[-3], "0.02", "rdp"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{PLAN} --eps -1", "target_epsilon=-1.0"),
        (f"{PLAN} --noise_multiplier -1", "noise_multiplier=-1.0"),
        (f"{PLAN} --accountant moments", "accountant='moments'"),
        (PLAN.replace("1e-5", "0"), "target_delta=0.0"),
        (PLAN.replace("1e-5", "0.001"), "target_delta=0.001 is not below 1/1000"),
        (PLAN.replace("50", "-5"), "steps=-5"),
        (PLAN.replace("50", "0"), "steps=0"),
        (PLAN.replace("--num_samples 1000", "--num_samples 0"), "num_samples=0"),
        (PLAN.replace("--num_samples 1000", ""), "expected_batch_size=100"),
        (PLAN.replace("size 100", "size 2000"), "sample_rate=2.0"),
        (PLAN.replace("--max_steps 50", "--num_train_epochs -1"), "num_train_epochs=-1.0"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refusal(command, capsys)
    assert message in err
    assert err.startswith("dp-grape calibrate: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "",
        "train",
        PLAN.replace("--delta 1e-5", ""),
        f"{PLAN} --eps 2 --noise_multiplier 1",
        f"{PLAN} --sample_rate 0.1",
        f"{PLAN} --num_train_epochs 3",
        PLAN.replace("--max_steps 50", ""),
        f"{PLAN} --target_eps 2",
    ],
)
def test_a_contradictory_or_incomplete_request_is_a_usage_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "usage: dp-grape" in refusal(command, capsys)
