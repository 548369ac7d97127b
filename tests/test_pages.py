"""The pages: what they show runs, what they name is there, where they point leads somewhere.

The text of a page itself is run, block by block from top to bottom, in one folder and one namespace
for each page; what a block may take for granted, such as a model, is made by the function of
``PRELUDES`` that bears the page's name. The language after a fence says what a block is:

* ``python``: code; a training run in it is stopped after ``STEPS`` steps.
* ``text``: what the ``python`` block above prints.
* ``sh`` or ``bash``: commands. Those of ``dp-grape`` run; all others, and those of ``LONG``, are
  parsed by the parser of the program they start, so that each option exists.
* ``console``: commands of ``dp-grape`` after ``$``, and what they print.
* ``math``: a formula.
* none: a picture.

A block under ``<!-- not run: reason -->`` is not run; its commands are parsed where they can be.
"""

import argparse
import configparser
import contextlib
import importlib.util
import io
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    TrainerCallback,
    trainer,
    training_args,
)

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.accounting import ACCOUNTANTS, Adjacency, find_noise_multiplier
from dp_grape_hf.cli.main import COMMANDS, main
from tests.support.hub_server import TOKEN, serve_as_the_hub
from tests.support.marks import slow_but
from tests.support.methods import OURS
from tests.support.sft import SPECIAL, WORDS, llama, tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        *("README.md", "CONTRIBUTING.md", "model_cards/README.md"),
        *("dp_grape_hf/*/README.md", "recipes/**/README.md", "recipes/guide/[a-z]*.md"),
    )
    for path in ROOT.glob(pattern)
)
TOPS = ("dp_grape_hf", "recipes", "tests")
SHELLS = ("sh", "bash")
STEPS = 4
LONG = ("calibrate", "memory", "audit")
"""Commands of ``dp-grape`` that take from some seconds to some minutes."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it begins in, or why it is not run."""

    language: str
    text: str
    line: int
    not_run: str | None


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(text):
    found, above, inside = [], "", None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.fullmatch(r"```(\w*)", line)
        if inside is None and fence:
            reason = re.fullmatch(r"<!-- not run: (.+) -->", above)
            inside, body, first = fence[1], [], number + 1
            why = reason[1] if reason else None
        elif inside is not None and line == "```":
            found.append(Block(inside, "\n".join(body), first, why))
            inside = None
        elif inside is not None:
            body.append(line)
        if line.strip():
            above = line.strip()
    assert inside is None, "a fence is not closed"
    return found


def prose_of(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def commands_of(text):
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def transcript_of(text):
    """Yields the words of each command of a ``console`` block, and what it prints."""
    assert text.startswith("$ "), "a console block begins with a command"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, printed = part.replace("\\\n", " ").partition("\n")
        yield shlex.split(line), printed.strip("\n")


VOCABULARY = len(SPECIAL) + len(WORDS)
SMALL = {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCABULARY}


def classifier():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(**SMALL, **sizes))


def sentences(num_samples):
    ids = torch.randint(4, VOCABULARY, (num_samples, 8))
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": (ids[:, 0] % 2).tolist()})


def own_script():
    """What a script has before it is made private."""
    data = {"train_dataset": sentences(1024), "eval_dataset": sentences(8)}
    return {"model": classifier(), "tokenizer": tokenizer(), **data}


def saved_run():
    """A private run that was saved in ``out``."""
    args = DPGrapeTrainingArguments(
        output_dir="out", eps=8.0, delta=1e-3, max_steps=STEPS, report_to="none", disable_tqdm=True
    )
    run = DPGrapeTrainer(model=classifier(), args=args, train_dataset=sentences(64))
    run.train()
    run.save_model()
    return {}


def saved_run_and_base():
    """A run that was saved in ``out``, and what another begins with."""
    classifier().save_pretrained("my-model")
    return saved_run() | {"train_dataset": sentences(64)}


def causal_model():
    """A language model in ``my-model``, and data for it."""
    pytest.importorskip("trl", reason="TRL is an optional extra")
    llama().save_pretrained("my-model")
    tokenizer().save_pretrained("my-model")
    rows = [{"prompt": f"w{i % 24}", "completion": f" w{(i + 1) % 24}"} for i in range(64)]
    return {"prompts_and_completions": Dataset.from_list(rows)}


def preferences():
    causal_model()
    pairs = [{"chosen": f"w{i % 24} w1", "rejected": f"w{i % 24} w2 w3"} for i in range(64)]
    prompts = [{"prompt": f"w{i % 24} w4"} for i in range(64)]
    return {
        "private_preferences": Dataset.from_list(pairs),
        "public_prompts": Dataset.from_list(prompts),
    }


def configurations():
    """Of RoBERTa-large, and of a small one."""
    for name, hidden, layers in (("large", 1024, 24), ("small", 256, 4)):
        RobertaConfig(
            architectures=["RobertaForSequenceClassification"],
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_attention_heads=hidden // 64,
            num_hidden_layers=layers,
            max_position_embeddings=514,
            type_vocab_size=1,
            vocab_size=50265,
        ).save_pretrained(f"roberta-{name}")
    return {}


def cards():
    shutil.copytree(ROOT / "model_cards", "model_cards")
    return {}


PRELUDES = {
    "README.md": own_script,
    "dp_grape_hf/ledger/README.md": saved_run,
    "dp_grape_hf/memory/README.md": configurations,
    "dp_grape_hf/publishing/README.md": saved_run_and_base,
    "dp_grape_hf/trainer/README.md": causal_model,
    "model_cards/README.md": cards,
    "recipes/synthetic_text/README.md": preferences,
}


class _Stops(TrainerCallback):
    """Ends a run that a page shows at its usual length."""

    def on_step_end(self, args, state, control, **rest):
        control.should_training_stop = state.global_step >= STEPS


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder to run a page in, with a Hub that takes what is published."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, _Stops])
    # TRL's default is bfloat16, which Arguments refuse where there is no GPU.
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    with serve_as_the_hub(monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield


class _Understood(Exception):
    """A program has read all its words."""


@contextlib.contextmanager
def only_parsing():
    """Ends a program as soon as a parser has understood all its words; fails if none does."""
    original, depth = argparse.ArgumentParser.parse_known_args, 0

    def watched(self, *args, **rest):
        nonlocal depth
        depth += 1  # a parser of a subcommand is called by another one
        try:
            found = original(self, *args, **rest)
        finally:
            depth -= 1
        if depth == 0 and not found[1]:
            raise _Understood
        return found

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", watched)
        try:
            yield
        except _Understood:
            return
        except SystemExit as end:
            if end.code:
                raise AssertionError(said.getvalue()) from None
            return
    raise AssertionError("it reads no words")


def parse_module(name, words):
    """Lets a recipe that is run by ``-m`` read its words; of other modules, that they exist."""
    assert importlib.util.find_spec(name), f"there is no module {name}"
    if name.startswith("recipes.") and words:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), only_parsing():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was imported before
            patch.setattr(sys, "argv", [name, *words])
            runpy.run_module(name, run_name="__main__", alter_sys=True)


def parse_make(words):
    targets = [word for word in words if "=" not in word]
    known = re.findall(r"^([\w-]+):.*## ", text_of("Makefile"), re.MULTILINE)
    unknown = set(targets) - set(known)
    assert not unknown, f"no such target: {unknown}"
    subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)


def parse_pip(words):
    """The extras of this package exist; what else is installed is the network's affair."""
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    assert words[0] in ("install", "download")
    for extras in re.findall(r"\[(.+?)\]", " ".join(words)):
        assert set(extras.split(",")) <= config["options.extras_require"].keys()


def parse_accelerate(words):
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    assert args.module
    parse_module(args.training_script, args.training_script_args)


def parse_dp_grape(words):
    with only_parsing():
        main([*words])


def run_dp_grape(words):
    printed, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refused):
        code = main([*words])
    assert code == 0, printed.getvalue() + refused.getvalue()
    return printed.getvalue()


PARSE = {
    "accelerate": parse_accelerate,
    "dp-grape": parse_dp_grape,
    "make": parse_make,
    "pip": parse_pip,
    **dict.fromkeys(
        ("python", ".venv/bin/python"), lambda words: parse_module(words[1], words[2:])
    ),
}


def parse(words):
    assert words[0] in PARSE, f"say in PARSE how {words[0]!r} is checked, or mark it as not run"
    PARSE[words[0]](words[1:])


each_page = pytest.mark.parametrize("page", PAGES)


@pytest.mark.parametrize("page", slow_but({"README.md"}, PAGES))
@pytest.mark.usefixtures("desk")
@pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>' to upload:DeprecationWarning"  # huggingface_hub does
)
def test_a_page_runs_from_top_to_bottom(page):
    text = text_of(page)
    names, printed = PRELUDES.get(page, dict)(), None
    for block in blocks_of(text):
        where = f"{page}:{block.line}"
        if block.not_run:
            if block.language in SHELLS:
                for words in commands_of(block.text):
                    if words[0] in PARSE:
                        parse(words)
        elif block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), names)
            printed = out.getvalue().strip("\n")
        elif block.language == "text":
            assert block.text == printed, f"{where}: it prints\n{printed}"
        elif block.language in SHELLS:
            for words in commands_of(block.text):
                if words[0] == "dp-grape" and words[1] not in LONG:
                    run_dp_grape(words[1:])
                else:
                    parse(words)
        elif block.language == "console":
            for words, shown in transcript_of(block.text):
                assert words[0] == "dp-grape", where
                if words[1] in LONG:
                    parse(words)
                else:
                    assert run_dp_grape(words[1:]).strip("\n") == shown, where
        elif block.language != "math":
            assert not block.language, f"{where}: say how {block.language!r} is checked"
            assert not re.search(r"^(\$ |import |from )", block.text, re.MULTILINE), where


LONG_COMMANDS = [
    (page, words[1:], shown)
    for page in PAGES
    for block in blocks_of(text_of(page))
    if block.language == "console"
    for words, shown in transcript_of(block.text)
    if words[1] in LONG
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "words", "shown"),
    LONG_COMMANDS,
    ids=[f"{page}: {words[0]}" for page, words, _ in LONG_COMMANDS],
)
@pytest.mark.usefixtures("desk")
def test_a_long_command_prints_what_the_page_shows(page, words, shown):
    PRELUDES.get(page, dict)()
    assert run_dp_grape(words).strip("\n") == shown


@each_page
def test_a_command_within_a_sentence_exists(page):
    for span in re.findall(
        r"`((?:dp-grape|make|python -m|pip install|accelerate launch) [^`]+)`", text_of(page)
    ):
        words = shlex.split(span)
        if words[0] != "dp-grape":
            parse(words)
            continue
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
            main([words[1], "--help"])
        unknown = {word for word in words[2:] if word.startswith("--")} - set(
            re.findall(r"--\w+", said.getvalue())
        )
        assert not unknown, f"{span}: {unknown}"


@each_page
def test_a_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text_of(page))):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors_of(place.read_text(encoding="utf-8")), f"{page}: {target}"


@each_page
def test_a_file_that_a_page_names_is_there(page):
    files = {str(path) for top in TOPS for path in (ROOT / top).rglob("*.*")}
    named = re.findall(r"`([\w/]+\.(?:py|yaml|md))`", prose_of(text_of(page)))
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in files)}
    assert not missing, f"{page}: {missing}"


def anchors_of(text):
    """Returns what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_column(page, header):
    found = set()
    for table in re.findall(rf"^\| {header} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), re.M):
        for row in table.splitlines():
            found |= set(re.findall(r"`([^`]+)`", row.split("|")[1]))
    assert found, f"{page} has no table of {header}"
    return found


@pytest.mark.parametrize(
    ("page", "header"),
    [
        ("README.md", "Argument"),
        ("dp_grape_hf/arguments/README.md", "Argument"),
        ("dp_grape_hf/projections/README.md", "Option"),
    ],
)
def test_a_table_of_options_names_arguments(page, header):
    options = fields(DPGrapeTrainingArguments)
    known = {option.name for option in options}
    known |= {name.lstrip("-") for option in options for name in option.metadata.get("aliases", ())}
    assert not first_column(page, header) - known


def test_the_tables_of_methods_accountants_and_commands_are_whole():
    methods = first_column("dp_grape_hf/arguments/README.md", "`method`")
    assert methods == {*OURS}, "add a line to the page of arguments"
    accountants = first_column("dp_grape_hf/accounting/README.md", "`accountant`")
    assert accountants == ACCOUNTANTS.keys(), "add a line to the page of accounting"
    commands = {name.split()[1] for name in first_column("dp_grape_hf/cli/README.md", "Command")}
    assert commands == COMMANDS.keys(), "add a line to the page of cli"


def rows_of(page, header):
    (table,) = re.findall(rf"^\| {header} .*\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


@pytest.mark.slow
def test_the_table_of_replace_one_is_what_the_package_computes():
    rows = rows_of("dp_grape_hf/accounting/README.md", r"N \| Expected batch size \| Steps")
    for size, batch, steps, epsilon, *said in rows:
        adding, replacing = (
            find_noise_multiplier(
                target_epsilon=float(epsilon),
                target_delta=1e-5,
                sample_rate=int(batch) / int(size),
                steps=int(steps),
                adjacency=adjacency,
            )
            for adjacency in Adjacency
        )
        assert said == [f"{replacing:.2f}", f"{replacing / adding:.2f}"]


def test_the_table_of_bets_is_what_its_formulas_say():
    for epsilon, *said in rows_of("recipes/guide/epsilon.md", r"ε \| .+ \| An even bet"):
        odds = math.exp(float(epsilon))
        values = odds, odds / (1 + odds), odds / (99 + odds), odds / 1000
        for cell, value in zip(said, values, strict=True):
            if cell == "no bound":
                assert value > 1
                continue
            number = cell.removesuffix(" %").replace(",", "")
            places = len(number.partition(".")[2])
            assert float(number) == round(value * (100 if "%" in cell else 1), places)


def test_the_first_page_leads_to_every_other():
    linked = set(re.findall(r"\]\(([^)\s]+)\)", text_of("README.md")))
    of_recipes = {page for page in PAGES if page.startswith("recipes/")}
    assert not set(PAGES) - of_recipes - linked - {"README.md"}


def test_only_recipes_show_what_is_not_run(capsys):
    left = [(page, block) for page in PAGES for block in blocks_of(text_of(page)) if block.not_run]
    with capsys.disabled():
        for page, block in left:
            sys.stdout.write(f"\nnot run: {page}:{block.line}: {block.not_run}")
    assert all(page.startswith("recipes/") and block.language != "python" for page, block in left)


@pytest.mark.parametrize(
    "command",
    [
        "dp-grape calibrate --expected_batch_sizes 64",
        "make tests",
        "pip install '.[everything]'",
        "python -m recipes.benchmark --nothing",
        "python -m recipes.nothing --output_dir x",
        "accelerate launch --processes 2 -m recipes.digits",
        "accelerate launch -m recipes.digits --epsilons 4",
        "wget weights",
    ],
)
def test_a_wrong_command_is_seen(command):
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        parse(shlex.split(command))


def test_the_blocks_of_a_page_are_found():
    text = "a\n```python\nx = 1\n\ny\n```\n\n<!-- not run: no GPU -->\n\n```sh\n"
    text += "make \\\n  demo # b\n```"
    code, command = blocks_of(text)
    assert code == Block("python", "x = 1\n\ny", 3, None)
    assert command == Block("sh", "make \\\n  demo # b", 11, "no GPU")
    assert list(commands_of(command.text)) == [["make", "demo"]]
    assert list(transcript_of("$ a \\\n b\n1\n2\n$ c")) == [(["a", "b"], "1\n2"), (["c"], "")]
    assert anchors_of("# What it's *for*, 2\n") == {"what-its-for-2"}
