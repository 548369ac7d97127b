"""The command line: what it prints is true, and what it refuses is explained in one line."""

import argparse
import json
import math
import re
import shlex
from dataclasses import fields
from importlib.metadata import version

import pytest
from transformers import RobertaConfig, TimesformerConfig

from dp_grape_hf import DPGrapeTrainingArguments
from dp_grape_hf.accounting import Adjacency, compute_epsilon
from dp_grape_hf.arguments import METHODS, PrivacyPlan
from dp_grape_hf.auditing import AUDITED_METHODS, AuditSettings
from dp_grape_hf.cli import options
from dp_grape_hf.cli.calibrate import DEFAULT_EPSILONS
from dp_grape_hf.cli.main import main
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME
from dp_grape_hf.memory import COMPARED, Setting
from dp_grape_hf.memory.planning import TITLES
from dp_grape_hf.memory.timeline import KINDS
from dp_grape_hf.projections import PRINCIPAL, PROJECTIONS
from dp_grape_hf.tables import WIDTH, table

PLAN = "calibrate --num_samples 1000 --expected_batch_size 100 --max_steps 50 --delta 1e-5"
RDP = f"{PLAN} --accountant rdp"


@pytest.fixture
def run(capsys):
    def printed(command):
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def refusal(capsys):
    def said(command):
        try:
            code = main(shlex.split(command))
        except SystemExit as stop:  # argparse's own
            code = stop.code
        out, err = capsys.readouterr()
        assert code == 2
        assert out == ""
        assert "Traceback" not in err
        return err

    return said


def test_a_table_has_aligned_columns_and_wraps_wide_rows():
    words = "as many words as it takes to fill more than one line of the column"
    lines = table(
        [("", "b", "c"), ("one", "22", words), ("four", "3", "")], "<><", (2,)
    ).splitlines()
    assert lines == ["     b  c", "on  22  " + words, "e", "fo   3", "ur"]
    lines = table([("a" * 60, words)]).splitlines()
    first, second = (line[62:] for line in lines)
    assert " ".join([first, second]) == words
    assert lines[1] == " " * 62 + second
    assert max(map(len, lines)) <= WIDTH
    assert table([("a" * 99, words)]).splitlines()[0] == "a" * 99 + "  as many words as it"


def options_of(command):
    parser = argparse.ArgumentParser()
    getattr(options, f"add_{command}")(parser)
    return {action.dest: action for action in parser._actions}


def test_options_state_the_names_and_defaults_of_the_package():
    calibrate, memory, card, audit = map(options_of, ("calibrate", "memory", "card", "audit"))
    ends = f"from {DEFAULT_EPSILONS[0]:g} to {DEFAULT_EPSILONS[-1]:g})"
    assert ends in calibrate["target_epsilon"].help
    assert f"(default: {', '.join(COMPARED)})" in memory["methods"].help
    assert {PRINCIPAL, "gaussian"} <= {*memory["projection"].choices} <= {PRINCIPAL, *PROJECTIONS}
    for name in ("projection", "rank"):
        assert memory[name].default == getattr(Setting(), name)
    assert audit["method"].choices == AUDITED_METHODS
    assert f"(default: {METHODS['dp_grape'].projection})" in audit["projection"].help
    settings = {field.name: field.default for field in fields(AuditSettings)}
    assert settings.keys() - audit.keys() == {"tables"}
    for name, value in settings.items():
        if isinstance(value, float | int) and name in audit:
            assert f"(default: {value:g})" in audit[name].help
    assert LEDGER_NAME in card["folder"].help
    assert CARD_NAME in card["write"].help


@pytest.mark.slow
def test_every_example_in_the_help_prints_what_the_help_says(run, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  \$ dp-grape ((?:.*\\\n)*.*)\n((?:  .*\n|\n(?=  ))+)", text, re.M)
    assert len(examples) == 3
    for command, shown in examples:
        printed = run(command.replace("\\\n", ""))
        assert [line.strip() for line in shown.splitlines()] == [
            line.strip() for line in printed.splitlines()
        ]


def test_the_default_is_an_aligned_table_over_epsilons(run):
    heading, blank, *table = run(RDP).splitlines()
    assert heading == "sample rate 0.1, steps 50, delta 1e-05, adjacency add_or_remove_one"
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


def test_json_carries_the_table_and_the_two_directions_agree(run):
    forward = json.loads(run(f"{RDP} --target_epsilon 2 6 --json"))
    assert forward["adjacency"] == Adjacency.ADD_OR_REMOVE_ONE
    assert (forward["sample_rate"], forward["steps"], forward["delta"]) == (0.1, 50, 1e-5)
    assert [row["target_epsilon"] for row in forward["rows"]] == [2, 6]
    sigmas = [row["noise_multiplier"] for row in forward["rows"]]
    given = " ".join(map(str, sigmas))
    back = json.loads(run(f"{RDP} --noise_multiplier {given} --json"))
    assert [row["epsilon"] for row in back["rows"]] == [row["epsilon"] for row in forward["rows"]]
    assert all(row["target_epsilon"] is None for row in back["rows"])


def test_calibrate_says_which_neighbours_are_meant(run):
    option = "--adjacency replace_one"
    plain = json.loads(run(f"{RDP} --target_epsilon 2 --json"))
    result = json.loads(run(f"{RDP} --target_epsilon 2 --json {option}"))
    assert result["adjacency"] == "replace_one" != plain["adjacency"]
    (row,), (other,) = result["rows"], plain["rows"]
    assert row["noise_multiplier"] > other["noise_multiplier"]
    assert "replace_one" in run(f"{RDP} --noise_multiplier 1 {option}").splitlines()[0]


def test_json_stays_valid_without_noise(run):
    text = run(f"{RDP} --noise_multiplier 0 --json")
    (row,) = json.loads(text, parse_constant=pytest.fail)["rows"]
    assert row["epsilon"] == "inf"
    assert "inf" in run(f"{RDP} --noise_multiplier 0")


@pytest.mark.parametrize(
    ("epochs", "q", "steps"), [("3", "0.1", 30), ("3", "0.3", 12), ("0.5", "0.01", 50)]
)
def test_an_epoch_visits_each_example_once_on_average(epochs, q, steps, run):
    plan = f"--sample_rate {q} --num_train_epochs {epochs} --delta 1e-5"
    text = run(f"calibrate {plan} --noise_multiplier 1 --accountant rdp --json")
    result = json.loads(text)
    assert result["steps"] == steps
    assert result["rows"][0]["noise_std_on_mean_over_max_grad_norm"] is None


def test_without_a_batch_size_calibrate_takes_that_of_a_run(tmp_path, run, refusal):
    plan = "--num_samples 1500 --epochs 2 --delta 1e-5 --eps 2 --accountant rdp --json"
    found = json.loads(run(f"calibrate {plan}"))
    args = DPGrapeTrainingArguments(
        tmp_path, eps=2, delta=1e-5, num_train_epochs=2, accountant="rdp", noise="independent"
    )
    chosen = PrivacyPlan(args, 1500)
    assert found["steps"] == chosen.steps
    assert found["sample_rate"] == chosen.mechanism.sample_rate
    sigma = chosen.mechanism.noise_multiplier
    assert found["rows"][0]["noise_multiplier"] == pytest.approx(sigma, rel=1e-3)
    assert "--num_train_epochs" in refusal("calibrate --epochs 2 --delta 1e-5")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dp-grape {version('dp_grape_hf')}\n"


def test_the_noise_on_the_mean_needs_only_the_dataset_size(run):
    plan = "--num_samples 1000 --sample_rate 0.1 --max_steps 50 --delta 1e-5"
    text = run(f"calibrate {plan} --noise_multiplier 2 --accountant rdp")
    assert text.splitlines()[-1].split() == ["2", text.split()[-3], "0.02", "rdp"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{PLAN} --eps -1", "target_epsilon=-1.0"),
        (PLAN.replace("1e-5", "0.001"), "target_delta=0.001 is not below 1/1000"),
        (PLAN.replace("--num_samples 1000", "--num_samples 0"), "num_samples=0"),
        (PLAN.replace("--num_samples 1000", ""), "expected_batch_size=100"),
        (PLAN.replace("--max_steps 50", "--num_train_epochs -1"), "num_train_epochs=-1.0"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(command, message, refusal):
    err = refusal(command)
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
def test_a_contradictory_or_incomplete_request_is_a_usage_error(command, refusal):
    assert "usage: dp-grape" in refusal(command)


TINY = {
    **{"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 40},
}


@pytest.fixture
def config(tmp_path):
    RobertaConfig(**TINY, architectures=["RobertaForSequenceClassification"]).save_pretrained(
        tmp_path
    )
    return str(tmp_path)


@pytest.mark.slow
def test_memory_shows_every_method_side_by_side_in_aligned_columns(config, run):
    head = "--head token-classification --num_labels 32 --dtype bfloat16"
    text = run(f"memory --model_name_or_path {config} --batch_size 4 --seq_len 32 {head}")
    heading, batch, blank, titles, *rows = text.splitlines()
    assert heading.startswith("RobertaForTokenClassification, ")
    assert batch == "batch 4, 32 tokens, bfloat16 weights, rank 16"
    assert blank == ""
    assert titles.startswith("peak memory, GiB  ")
    assert [row.split("  ")[0] for row in rows] == [*KINDS, "total", "reached in"]
    assert len({len(row) for row in [titles, *rows]}) == 1
    for title in (TITLES[name] for name in COMPARED):
        end = titles.index(title) + len(title)
        assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows)


@pytest.mark.slow
def test_memory_in_json_adds_up_and_names_what_fits(config, run):
    words = f"memory --batch_size 8 --seq_len 8 --json --model_name_or_path {config}"
    peak = json.loads(run(f"{words} --methods dp_grape"))["methods"]["dp_grape"]["peak"]
    card = f"--gpu_memory {0.98 * peak / 2**30 + 1}"
    result = json.loads(run(f"{words} {card} --methods adamw dp_grape"))
    assert set(result["methods"]) == {"adamw", "dp_grape"}
    for method in result["methods"].values():
        assert sum(method["kinds"].values()) == method["peak"]
        assert method["largest_batch"] > 0
    assert result["methods"]["dp_grape"]["largest_batch"] < 8


@pytest.mark.slow
def test_memory_says_which_batch_fits(config, run):
    command = f"memory --model_name_or_path {config} --batch_size 64 --methods adamw dp_grape"
    text = run(f"{command} --seq_len 32 --gpu_memory 1.002")
    assert text.startswith("RobertaForSequenceClassification, ")
    assert "\nOn a 1.002 GiB card, 1 GiB of it left to CUDA:\n" in text
    assert re.search(r"^AdamW     fits up to B=\d+$", text, re.M)
    assert re.search(r"^DP-GRAPE  fits up to B=\d+$", text, re.M)
    nothing = run(f"{command} --seq_len 32 --gpu_memory 1.0001")
    assert "AdamW     does not fit, even B=1\n" in nothing
    assert "DP-GRAPE  does not fit, even B=1\n" in nothing


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--seq_len 41", "seq_len=41"),
        ("--gpu_memory 1", "gpu_memory=1 leaves no memory"),
        ("--batch_size 0", "0 must be at least 1"),
        ("--head image-classification", "makes no AutoModelForImageClassification"),
        ("--methods sgd", "method='sgd'"),
        ("--head nothing", "head='nothing'"),
    ],
)
def test_memory_refuses_what_it_cannot_simulate(more, message, config, refusal):
    assert message in refusal(
        f"memory --model_name_or_path {config} --batch_size 2 --seq_len 8 {more}"
    )


def test_memory_needs_a_config_and_a_head(tmp_path, refusal):
    command = f"memory --model_name_or_path {tmp_path} --batch_size 2 --seq_len 8"
    assert "has no config" in refusal(command)
    TimesformerConfig(architectures=["TimesformerModel"]).save_pretrained(tmp_path)
    assert "Give --head" in refusal(command)


def test_calibrate_says_what_correlated_noise_leaves(run, refusal):
    words = "calibrate --num_samples 1024 --expected_batch_size 64 --max_steps 50 --delta 1e-5"
    given = "--eps 8 --accountant rdp --json --noise banded"
    (row,) = json.loads(run(f"{words} {given}"))["rows"]
    assert len(row["coefficients"]) > 1
    assert 0.4 < row["noise_left"] < 0.8
    assert row["epsilon"] <= 8
    bands = len(row["coefficients"])
    accounted = row["accounted_releases"], row["accounted_sample_rate"]
    assert accounted == (math.ceil(50 / bands), bands * 64 / 1024)
    assert row["noise_std_on_mean_over_max_grad_norm"] is None
    (sgd,) = json.loads(run(f"{words} {given} --momentum 0"))["rows"]
    assert sgd["coefficients"] != row["coefficients"]
    for wrong in (
        "--noise banded --noise_multiplier 1",
        "--momentum 0.5",
        "--noise banded --momentum 1",
    ):
        said = refusal(f"{words} {wrong}")
        assert "momentum" in said or "noise_multiplier" in said


def test_audit_of_a_saved_run_says_what_can_be_done(tmp_path, refusal):
    said = refusal(f"audit {tmp_path}")
    assert "canaries" in said
    assert f"dp-grape verify {tmp_path}" in said
