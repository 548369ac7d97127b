"""The tests of a checkout of transformers are run with the Trainer, and with ours in its place."""

import json

import pytest

from recipes.report import checks
from tests.host import __main__ as host_tests

CHECKOUT = """
from transformers import Trainer, TrainingArguments


def test_both_pass(tmp_path):
    assert TrainingArguments(tmp_path).output_dir == str(tmp_path)


def test_only_theirs():
    assert not hasattr(Trainer, "privacy_spent")


def test_refused(tmp_path):
    TrainingArguments(tmp_path, optim="adafactor")


def test_fails_with_both():
    raise ValueError
"""


@pytest.mark.slow
def test_a_checkout_is_run_twice_and_compared(tmp_path, capsys):
    checkout = tmp_path / "checkout"
    (checkout / "tests/trainer").mkdir(parents=True)
    (checkout / "tests/trainer/test_own.py").write_text(CHECKOUT)
    (checkout / "src/transformers").mkdir(parents=True)
    (checkout / "src/transformers/__init__.py").write_text('__version__ = "5.99"\n')
    words = ["--transformers", str(checkout), "--output_dir", str(tmp_path / "out")]
    record = host_tests.main(words)
    assert record["checkout"] == "5.99"
    assert record["plain"] == {"passed": 3, "failed": 1}
    assert record["private"] == {"passed": 1, "failed": 2}
    whys = {name: found["why"] for name, found in record["tests"].items()}
    assert whys == {"test_only_theirs": host_tests.UNEXPLAINED, "test_refused": host_tests.REFUSED}
    assert record["tests"]["test_refused"]["refusal"].startswith("optim='adafactor' is not")
    assert json.loads((tmp_path / "out/host_tests.json").read_text()) == record
    assert capsys.readouterr().out.endswith(checks.host_tests(record))


def test_a_passed_teardown_does_not_hide_a_failed_call(tmp_path):
    parts = [("setup", "passed"), ("call", "failed"), ("teardown", "passed")]
    lines = [{"test": "t", "when": w, "outcome": o, "reason": w} for w, o in parts]
    path = tmp_path / "outcomes.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert host_tests.read(path) == {"t": {"outcome": "failed", "reason": "call"}}


def test_a_test_missing_from_our_results_did_not_pass():
    passed = {"outcome": "passed", "reason": ""}
    record = host_tests.compare({"f.py::C::t": passed, "f.py::u": passed}, {"f.py::u": passed})
    assert record["private"] == {"failed": 1, "passed": 1}
    assert record["tests"]["t"]["why"] == host_tests.UNEXPLAINED
