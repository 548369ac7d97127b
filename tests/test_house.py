"""The rules of the house, read from the sources: who imports whom, and what is never committed."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dp_grape_hf"

# A room (a folder of the package, or a module beside them) imports only from the lines above its
# own, and enters another by its face: what the room's __init__ names, and nothing else.
FLOORS = (
    ("errors", "phases", "tables"),  # the ground
    ("distributed",),
    ("sharding",),
    ("accounting", "projections"),  # mathematics: no model, no data, no file
    ("ledger", "per_sample", "optimizers"),  # what is written down, differentiated, moved
    ("choosing",),  # what a user need not say
    ("mechanism", "arguments", "publishing"),  # what is done, promised, shown
    ("trainer",),  # the Hugging Face loop
    ("memory", "auditing"),  # who looks at a run from outside
    ("cli",),  # the door
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# The libraries that only some places know, so that the rest can be read and tested without them.
ONLY_IN = {
    "torch": {*FLOOR_OF} - {"accounting", "errors", "phases", "tables"},
    "transformers": {
        *("per_sample.layerwise.rules", "per_sample.functorch", "per_sample.selfcheck"),
        *("projections.targets", "arguments", "publishing", "trainer", "memory"),
        "cli.suggest",
    },
    "trl": {"trainer.sft", "trainer.preferences"},
    "datasets": set[str](),
    "evaluate": set[str](),
    "unittest": set[str](),
    "recipes": set[str](),
    "tests": set[str](),
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


def modules_of(folder: str) -> dict[str, Path]:
    """The modules below a top-level folder, by dotted name; a package has that of its folder."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


MODULES = modules_of(PACKAGE)
OTHERS = modules_of("recipes") | modules_of("tests")
EVERY = MODULES | OTHERS


def room_of(module: str) -> str | None:
    """The room that a module of ours lies in; the package's own face is in none."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if package == PACKAGE else None


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Every import of a file as a module and the name taken from it, "" for the module itself."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: import by the whole name, not relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in EVERY else (node.module or "", alias.name)


def libraries(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {module.partition(".")[0] for module, _ in imports(path)}


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


each_module = pytest.mark.parametrize("module", MODULES)


@pytest.mark.parametrize("folder", [PACKAGE, "recipes", "tests"])
def test_every_folder_of_modules_is_a_package(folder: str) -> None:
    folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    missing = {place.name for place in folders if not (place / "__init__.py").exists()}
    assert not missing, f"no wheel would hold {', '.join(sorted(missing))}: add __init__.py"


@each_module
def test_a_room_imports_only_from_lower_floors(module: str) -> None:
    room = room_of(module)
    if room is None:
        return
    assert room in FLOOR_OF, f"{room} has no floor: add it to FLOORS, above everything it serves"
    rooms = {room_of(name) or "" for name, _ in imports(MODULES[module]) if name in MODULES}
    wrong = {other for other in rooms - {room} if FLOOR_OF.get(other, 99) >= FLOOR_OF[room]}
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("module", [*MODULES, *modules_of("recipes")])
def test_another_room_is_entered_by_its_face(module: str) -> None:
    inner = {
        name
        for name, _ in imports(EVERY[module])
        if name in MODULES and name.count(".") > 1 and room_of(name) != room_of(module)
    }
    assert not inner, f"{module} imports {', '.join(sorted(inner))}: import from the room itself"


@pytest.mark.parametrize("module", [*MODULES, *modules_of("recipes")])
def test_a_name_with_an_underscore_stays_in_its_module(module: str) -> None:
    path = EVERY[module]
    taken = {
        f"{name}.{taken}" for name, taken in imports(path) if name in MODULES and taken[:1] == "_"
    }
    ours = {
        alias.asname or alias.name
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE
        for alias in node.names
    }
    taken |= {
        f"{node.value.id}.{node.attr}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ours
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    }
    assert not taken, f"{module} uses {', '.join(sorted(taken))}"


def test_no_import_leads_back() -> None:
    graph = {
        module: {name for name, _ in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if module != PACKAGE
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("module", modules_of("tests"))
def test_no_test_module_is_imported(module: str) -> None:
    wrong = {
        name
        for name, _ in imports(OTHERS[module])
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    }
    assert not wrong, f"{', '.join(sorted(wrong))}: move what is shared to tests/support"


@each_module
def test_a_library_is_imported_only_where_it_belongs(module: str) -> None:
    place = module.removeprefix(f"{PACKAGE}.")
    wrong = {
        name
        for name in libraries(MODULES[module]) & ONLY_IN.keys()
        if place not in ONLY_IN[name] and room_of(module) not in ONLY_IN[name]
    }
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


@each_module
def test_no_module_imports_the_compiler(module: str) -> None:
    wrong = [name for name, _ in imports(MODULES[module]) if name.startswith("torch._dynamo")]
    assert not wrong, "it takes seconds of every start: look in sys.modules whether it was used"


@each_module
def test_every_import_is_declared_in_setup_cfg(module: str) -> None:
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = (
        config["options"]["install_requires"]
        + config["options.extras_require"]["pld"]
        + config["options.extras_require"]["sft"]
        + config["options.extras_require"]["plot"]
    ).splitlines()
    known = {re.split(r"[<>=!~;\[ ]", line)[0].replace("-", "_") for line in declared if line}
    third_party = libraries(MODULES[module]) - set(sys.stdlib_module_names) - {PACKAGE}
    missing = {DISTRIBUTIONS.get(name, name) for name in third_party} - known
    assert not missing, f"add to install_requires in setup.cfg: {', '.join(sorted(missing))}"


@each_module
def test_a_module_never_prints(module: str) -> None:
    lines = [
        node.lineno
        for node in nodes(MODULES[module])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not lines, f"{module} prints on line(s) {lines}: use logging"


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
