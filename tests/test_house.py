"""The rules of the house, read from the sources: who imports whom, and what is never committed."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dp_grape_hf"
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))

# A module imports only from the lines above its own.
TIERS = (
    ("errors", "forms", "noise", "tables", "options"),
    (
        *("randomness", "representations", "cross_entropy", "forwards", "timeline"),
        *("bad_data", "coins", "rows", "placement", "iterates", "methods"),
        *("truncated", "estimated_norms", "replace_one", "tuning"),
        "seams",
        "phases",
    ),
    ("accountants",),
    ("releases", "composition"),
    ("projection", "layer_rules", "heads", "probing", "accounting", "sampling", "processes"),
    ("losses", "mechanism", "sites", "targets", "coordinates", "units"),
    ("entries",),
    ("weight_files",),
    ("storage", "loading"),
    ("ledger", "vectorise", "update_rules", "released_projection", "directions"),
    ("claims", "staging"),
    ("file_checks", "hub"),
    ("per_sample", "optimizer", "verify", "continuing", "trainer_loss"),
    ("capture", "functorch", "low_rank", "norms", "zeroth_order", "unit_engine"),
    ("layerwise", "selfcheck"),
    ("engine", "batch_engine", "engines"),
    ("fakes",),
    ("host_options", "model_card", "refusals"),
    ("arguments",),
    ("plan",),
    ("callbacks", "checkpoints"),
    ("run",),
    ("data",),
    ("mixin",),
    ("trainers", "sft"),
    ("audit",),
    ("memory",),
    ("fit", "from_config"),
    ("comparison",),
    ("memory_command", "card_command"),
    ("audit_command", "ledger_command", "verify_command", "calibrate_command"),
    ("cli",),
    ("__init__",),
)
TIER_OF = {module: tier for tier, modules in enumerate(TIERS) for module in modules}

# The libraries only some modules know about, so that the rest can be read and tested without them.
ONLY_IN = {
    "transformers": {
        *("layer_rules", "vectorise", "targets", "loading"),
        *("host_options", "refusals", "arguments", "model_card", "plan"),
        *("callbacks", "checkpoints", "data", "mixin", "trainers"),
        *("memory_command", "from_config"),
        "selfcheck",
    },
    "trl": {"sft"},
    "datasets": set(),
    "evaluate": set(),
    "recipes": set(),
    "tests": set(),
}

# Where the name to import and the name to install differ.
DISTRIBUTIONS = {"yaml": "pyyaml"}

TOP_LEVEL = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("pyproject.toml", "setup.cfg"),
    *("dp_grape_hf", "model_cards", "recipes", "tests"),
}
# A path of one machine means nothing on the next; "facebook/opt-125m" is not one.
MACHINE_PATH = re.compile(r"(?<![\w.\-{}])/(?:work|root|opt|home|Users)/")


def module_name(path: Path) -> str:
    """The name of a module of the package, without the package: ``engine``, ``rules.linear``."""
    return ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)


def imports(source: str) -> Iterator[str]:
    """Every module the source imports, wherever in it; our own start with the package's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [PACKAGE if node.level else "", node.module]))
            if module == PACKAGE:
                yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
            else:
                yield module


def upward_imports(module: str, source: str) -> list[str]:
    """The imports of a module that do not come from a lower tier."""
    wrong = []
    for name in imports(source):
        package, _, imported = name.partition(".")
        if package != PACKAGE:
            continue
        # A name that is no module comes from the package's own __init__, the highest tier of all.
        tier = TIER_OF.get(imported.partition(".")[0], TIER_OF["__init__"])
        if tier >= TIER_OF[module]:
            wrong.append(name)
    return wrong


def tracked_files() -> list[Path]:
    """What git tracks, or a skip where there is no checkout."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: there is no list of committed files to look at")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    return [Path(name) for name in listed.stdout.split("\0") if name]


each_module = pytest.mark.parametrize("path", MODULES, ids=module_name)


@each_module
def test_a_module_imports_only_from_lower_tiers(path: Path) -> None:
    module = module_name(path)
    assert module in TIER_OF, (
        f"{module} has no tier: add it to TIERS in tests/test_house.py, above everything it serves"
    )
    wrong = upward_imports(module, path.read_text())
    assert not wrong, f"{module} (tier {TIER_OF[module]}) may not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("engine", "from .ledger import Ledger\nimport dp_grape_hf.errors", []),
        ("engine", "from .trainers import DPGrapeTrainer", ["dp_grape_hf.trainers"]),
        ("engine", "from . import run, errors", ["dp_grape_hf.run"]),
        ("engine", "from dp_grape_hf.cli import main", ["dp_grape_hf.cli"]),
        ("engine", "def f():\n    import dp_grape_hf.arguments", ["dp_grape_hf.arguments"]),
        ("layer_rules", "from .representations import Factored", []),
        ("layer_rules", "from .projection import project", ["dp_grape_hf.projection"]),
        ("cli", "from dp_grape_hf import DPGrapeTrainer", ["dp_grape_hf.DPGrapeTrainer"]),
    ],
)
def test_an_upward_import_is_seen_in_every_spelling(
    module: str, source: str, wrong: list[str]
) -> None:
    assert upward_imports(module, source) == wrong


@each_module
def test_a_library_is_imported_only_where_it_belongs(path: Path) -> None:
    module = module_name(path)
    used = {name.partition(".")[0] for name in imports(path.read_text())}
    wrong = {name for name in used & ONLY_IN.keys() if module not in ONLY_IN[name]}
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


@each_module
def test_no_module_imports_the_compiler(path: Path) -> None:
    wrong = [name for name in imports(path.read_text()) if name.startswith("torch._dynamo")]
    assert not wrong, "it takes seconds of every start: look in sys.modules whether it was used"


@each_module
def test_every_import_is_declared_in_setup_cfg(path: Path) -> None:
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = (
        config["options"]["install_requires"]
        + config["options.extras_require"]["pld"]
        + config["options.extras_require"]["sft"]
        + config["options.extras_require"]["plot"]
    ).splitlines()
    known = {re.split(r"[<>=!~;\[ ]", line)[0].replace("-", "_") for line in declared if line}
    used = {name.partition(".")[0] for name in imports(path.read_text())}
    third_party = used - set(sys.stdlib_module_names) - {PACKAGE}
    missing = {DISTRIBUTIONS.get(name, name) for name in third_party} - known
    assert not missing, f"add to install_requires in setup.cfg: {', '.join(sorted(missing))}"


@each_module
def test_a_module_never_prints(path: Path) -> None:
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not lines, f"{path.name} prints on line(s) {lines}: use logging"


def test_only_the_known_entries_are_at_the_top() -> None:
    unknown = {path.parts[0] for path in tracked_files()} - TOP_LEVEL
    assert not unknown, f"move below a folder or delete: {', '.join(sorted(unknown))}"


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted and not yet committed
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{path}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root", "opt", "home"])
def test_a_path_of_one_machine_is_recognised(folder: str) -> None:
    assert MACHINE_PATH.search(f"see /{folder}/notes")
    assert MACHINE_PATH.search(f'path="/{folder}/notes"')
    assert not MACHINE_PATH.search(f"models/{folder}/125m and facebook/{folder}-125m")


def test_the_pinned_versions_can_be_installed_anywhere() -> None:
    pins = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    wrong = [
        line
        for line in pins
        if line and not line.startswith("#") and not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)
    ]
    assert not wrong, f"an exact public version is name==1.2.3, not {wrong}"


def test_no_module_imports_a_test_module() -> None:
    """What two suites need lies in tests/support; a name imported from a suite is its own."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found = [name for name in names if re.match(r"tests\.(.*\.)?test_", name)]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in found]
    assert not wrong, "move what is shared to tests/support:\n" + "\n".join(wrong)
